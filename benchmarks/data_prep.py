"""How fast `data_prep build` is and how much memory it takes.

    python -m benchmarks.data_prep                      all of pmc_ei_open, about 4 minutes on 2 idle cores
    python -m benchmarks.data_prep --documents 500      less of it
    python -m benchmarks.data_prep --text FILE --tokenizer FOLDER

Three ways over the same documents with the same tokenizer, each a process tree of its own, in turns:

    encode_batch    tokenizers.encode_batch alone on texts that are in memory, both cores; only the calls are timed
    build           `python -m data_prep build --workers 2`, from start to exit: read, tokenise, pack, write, hash
    datasets        load, map(tokenise, num_proc=2), map(concatenate and chunk, num_proc=2), save_to_disk

On a machine with other work the CPU seconds tell more than the ratio of speeds: whoever has more processes gets more of it.
Memory is the peak of the sum over the tree of the proportional set size (shared pages counted once), sampled every 50 ms.
The same build is done with a tenth of the documents, to see that memory does not grow with the corpus.
"""

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
ROW_LENGTH = 8192
CORES = 2


@dataclass(frozen=True)
class Measured:
    seconds: float
    tokens: int
    peak: int  # bytes
    cpu: float  # seconds of all cores together

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, default=SHARED / "text" / "pmc_ei_open.jsonl.zst")
    parser.add_argument(
        "--tokenizer", type=Path, help="folder with tokenizer.json (default: OLMo's with four tokens added)"
    )
    parser.add_argument("--documents", type=int, help="only the first N")
    parser.add_argument("--repeats", type=int, default=2, help="of each way, the best counts (default 2)")
    parser.add_argument("--step", choices=("encode_batch", "datasets"), help=argparse.SUPPRESS)
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step:
        {"encode_batch": encode_batch, "datasets": with_datasets}[arguments.step](arguments.corpus, arguments.tokenizer)
        return
    if not arguments.text.is_file():
        raise SystemExit(f"no {arguments.text}: name a JSONL file with --text")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = arguments.tokenizer or olmo(folder / "tokenizer")
        texts = list(read(arguments.text, arguments.documents))
        whole, tenth = folder / "whole.jsonl", folder / "tenth.jsonl"
        for path, share in ((whole, texts), (tenth, texts[::10])):
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in share), "utf-8")
        print(f"{len(texts):,} documents, {whole.stat().st_size / 1e6:.0f} MB, rows of {ROW_LENGTH:,}, {CORES} workers")
        alone, built, chunked = [], [], []
        for number in range(arguments.repeats):
            alone.append(step("encode_batch", whole, tokenizer))
            built.append(build(whole, tokenizer, folder / f"rows{number}"))
            chunked.append(step("datasets", whole, tokenizer))
        small = build(tenth, tokenizer, folder / "small")
    best = [max(several, key=lambda m: m.speed) for several in (alone, built, chunked)]
    show(best[0], best[1], small, best[2])


def show(alone: Measured, built: Measured, small: Measured, chunked: Measured) -> None:
    print(f"\n{'':24}{'seconds':>9}{'tokens/s':>12}{'of encode_batch':>17}{'CPU seconds':>13}{'peak memory':>14}")
    named = {"encode_batch alone": alone, "build": built, "build of a tenth": small, "datasets, map and chunk": chunked}
    for name, m in named.items():
        print(
            f"{name:24}{m.seconds:9.1f}{m.speed:12,.0f}{m.speed / alone.speed:17.2f}{m.cpu:13.1f}{m.peak / 2**20:11,.0f} MB"
        )
    print(f"\nbuild is {chunked.seconds / built.seconds:.2f} times as fast as datasets")
    print(f"ten times the corpus takes {built.peak / small.peak - 1:+.1%} memory")


def read(path: Path, documents: int | None) -> Iterator[str]:
    sys.path.insert(0, str(ROOT))
    from data_prep.documents import Document, Reading, corpus, find_files, ignore

    found = corpus(find_files([str(path)]).files, Reading(), "skip", ignore)
    texts = (document.text for document in found if isinstance(document, Document))
    for number, text in enumerate(texts):
        if number == documents:
            return
        yield text


def olmo(folder: Path) -> Path:
    from tokenizers import AddedToken, Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(SHARED / "tokenizer" / "olmo-tokenizer.json"))
    special = ("[CLS]", "[SEP]", "[MASK]", "[PAD]")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(token, tokenizer.token_to_id(token)) for token in special[:2]]
    )
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def build(corpus: Path, tokenizer: Path, out: Path) -> Measured:
    command = ["-m", "data_prep", "build", str(corpus), "--tokenizer", str(tokenizer), "--out", str(out)]
    seconds, peak, cpu, _ = timed([*command, "--row-length", str(ROW_LENGTH), "--workers", str(CORES)])
    counts = json.loads((out / "manifest.json").read_text())["counts"]
    return Measured(seconds, counts["tokens"], peak, cpu)


def step(name: str, corpus: Path, tokenizer: Path) -> Measured:
    command = ["-m", "benchmarks.data_prep", "--step", name, "--corpus", str(corpus), "--tokenizer", str(tokenizer)]
    seconds, peak, cpu, said = timed(command)
    if name == "encode_batch":
        seconds, cpu = (float(part) for part in said.split()[-3:-1])
    return Measured(seconds, int(said.split()[-1]), peak, cpu)


def timed(command: list[str]) -> tuple[float, int, float, str]:
    """Seconds, peak memory of the tree in bytes, seconds of CPU of the tree, and what the command printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    peak, ended = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.05):
            peak = max(peak, tree_memory(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    said, _ = process.communicate()
    seconds = time.perf_counter() - start
    ended.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"failed: {' '.join(command)}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, peak, cpu, said


def tree_memory(pid: int) -> int:
    """Bytes of the proportional set size of a process and all below it."""
    total = 0
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) << 10
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                total += tree_memory(int(child))
    return total


def encode_batch(corpus: Path, tokenizer: Path) -> None:
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in corpus.read_text("utf-8").splitlines()]
    loaded.encode_batch(texts[:20])
    start, cpu, tokens = time.perf_counter(), time.process_time(), 0
    for first in range(0, len(texts), 200):
        tokens += sum(map(len, loaded.encode_batch(texts[first : first + 200])))
    print(time.perf_counter() - start, time.process_time() - cpu, tokens)


def with_datasets(corpus: Path, tokenizer: Path) -> None:
    """What tutorials do: every text tokenised, all of it concatenated, cut into rows, the rest dropped."""
    from itertools import chain

    from datasets import Dataset, disable_progress_bars, load_dataset
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    disable_progress_bars()
    loaded = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))

    def tokenise(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [encoding.ids for encoding in loaded.encode_batch(batch["text"])]}

    def chunk(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        ids = list(chain.from_iterable(batch["input_ids"]))
        return {"input_ids": [ids[at : at + ROW_LENGTH] for at in range(0, len(ids) - ROW_LENGTH + 1, ROW_LENGTH)]}

    with tempfile.TemporaryDirectory() as cache:
        texts = load_dataset("json", data_files=str(corpus), split="train", cache_dir=cache)
        assert isinstance(texts, Dataset)
        options = {"batched": True, "num_proc": CORES}
        tokenised = texts.map(tokenise, remove_columns=texts.column_names, batch_size=100, **options)
        rows = tokenised.map(chunk, **options)
        rows.save_to_disk(str(Path(cache) / "saved"))
        print(0, len(rows) * ROW_LENGTH)


if __name__ == "__main__":
    main()
