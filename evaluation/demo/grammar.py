"""What the fields of a sentence do in the two languages: articles, agreement and lists.

A template asks for an article after a colon, by its simplest form: {lab:a} in English; {lab:le}, {lab:un}, {lab:de},
{lab:du} and {lab:au} in French. It chooses between two words with a slash: {female:she/he}, {lab.plural:étaient/était}.
"""

import re
from abc import ABC, abstractmethod

ARTICLES = {  # masculine, feminine, plural; before a vowel in the singular, if it differs
    "le": ("le ", "la ", "les ", "l'"),
    "un": ("un ", "une ", "des ", ""),
    "du": ("du ", "de la ", "des ", "de l'"),
    "au": ("au ", "à la ", "aux ", "à l'"),
}


class Either(int):
    """A truth that picks a word: the first if true, else the second."""

    def __format__(self, words: str) -> str:
        return words.split("/")[not self]


class Noun(ABC):
    """A noun of `medical_facts`, with its gender in French: "f fièvre"."""

    def __init__(self, text: str) -> None:
        gender, self.word = re.findall("^(?:([fm]p?) )?(.*)", text)[0]
        self.feminine, self.plural = Either("f" in gender), Either("p" in gender)

    def __format__(self, article: str) -> str:
        return (self.article(article) if article else "") + self.word

    @abstractmethod
    def article(self, form: str) -> str:
        """The article of this noun, with its space, for a template's `form`."""


class EnglishNoun(Noun):
    def article(self, form: str) -> str:
        """Put "a" or "an" before a number (an 80-year-old) or what is counted (a white cell count), none before calcium."""
        if not re.search(r"^\d|(level|count|rate)$", self.word):
            return ""
        return "an " if re.match("[aeio8]|11|18", self.word, re.IGNORECASE) else "a "


class FrenchNoun(Noun):
    def article(self, form: str) -> str:
        """Elide before a vowel: l'asthme. Acronyms that are spelt out (HbA1c) begin with a vowel sound too."""
        elides = re.match("[aeéèêiîoôœuh]", self.word, re.IGNORECASE)
        if form == "de":
            return "d'" if elides else "de "
        masculine, feminine, plural, elided = ARTICLES[form]
        if self.plural:
            return plural
        return elided if elides and elided else feminine if self.feminine else masculine


class Nouns(list[Noun]):
    """Two nouns or more, each with the article asked for: a, b and c."""

    def __init__(self, nouns: list[Noun], last: str) -> None:
        super().__init__(nouns)
        self.last = last  # " and "

    def __format__(self, article: str) -> str:
        *others, final = (format(noun, article) for noun in self)
        return ", ".join(others) + self.last + final
