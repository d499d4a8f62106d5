"""From text to token ids, and a new vocabulary from a corpus.

It may import `command_line`, `data_prep.rows` and `data_prep.documents`.
It offers a tokenizer that adds the special tokens of a document, and the training of one.
"""

from data_prep.tokenizer.document_tokenizer import DocumentTokenizer, load_tokenizer, tokenizer_of
from data_prep.tokenizer.train import NOTE, train_tokenizer

__all__ = ["NOTE", "DocumentTokenizer", "load_tokenizer", "tokenizer_of", "train_tokenizer"]
