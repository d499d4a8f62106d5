"""A case put into words. Each part of a report has several wordings in english.toml and french.toml; some are left out at random."""

import re
import tomllib
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from evaluation.demo.case import Case
from evaluation.demo.grammar import Either, EnglishNoun, FrenchNoun, Noun, Nouns
from evaluation.demo.medical_facts import SPECIALTIES, Disease

CHANCES = (1.0, 0.75, 0.6, 1.0, 1.0, 1.0, 1.0, 0.7)  # that a report keeps its opening, its history and so on


class Writer:
    """Writes reports in one language, "en" or "fr"."""

    def __init__(self, lang: str) -> None:
        self.side = ("en", "fr").index(lang)  # of a pair of `medical_facts`
        name = ("english", "french")[self.side]
        self.words: dict[str, Any] = tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text("utf-8"))

    def report(self, case: Case, random: Random) -> str:
        """Return one report of about 60 to 300 words, as prose or under headings."""
        fields = self._fields(case)

        def say(name: str) -> str:
            wordings = self.words["sentences"][name]
            template = wordings if isinstance(wordings, str) else random.choice(wordings)
            return re.sub(r"(^|\. ).", lambda start: start[0].upper(), template.format_map(fields))

        def chance(likely: float) -> bool:
            return random.random() < likely

        opening = [say("opening")]
        habit, history = say("habit"), [say("background" if case.background else "healthy")]
        if chance(0.6):
            history.append(habit)
        examination = [say("examination")]
        tests = [say("image"), say("blood" if case.lab else "normal_blood")]
        if case.lab and chance(0.5):
            tests.reverse()
        diagnosis = [say("diagnosis"), say("excluded")]
        if not chance(0.5):
            diagnosis.pop()
        treatment = [say("treatment")]
        if not case.cured:
            treatment.append(say("second_treatment"))
        outcome = [say("course")]
        if case.lab and chance(0.7):
            outcome.append(say("change"))
        outcome.append(say("follow_up"))
        comment = [say("comment")]

        parts = (opening, history, examination, tests, diagnosis, treatment, outcome, comment)
        headed = zip(self.words["headings"], parts, CHANCES, strict=True)
        kept = [(heading, " ".join(part)) for heading, part, likely in headed if chance(likely)]
        if chance(0.3):
            return "\n".join(f"{heading} {text}" for heading, text in kept)
        return " ".join(text for _, text in kept)

    def _fields(self, case: Case) -> dict[str, object]:
        """What a template may name."""
        signs, disease, lab = self._nouns(case.symptoms), self._disease(case.disease), case.lab
        fields = {
            "age": self._noun(str(case.age)),
            "female": Either(case.female),
            "department": self._noun(*SPECIALTIES[case.disease.specialty]),
            "disease": disease,
            "other": self._disease(case.other),
            "background": case.background and self._disease(case.background),
            "signs": signs,
            "last_sign": signs[-1],
            "usual_signs": self._nouns(case.usual),
            "absent": self._noun(*case.absent),
            "last_drug": disease.drug if case.cured else disease.second_drug,
            "weeks": self._noun(str(case.weeks)),
            "start": min(case.days, 3),
            "days": case.days,
            "months": case.months,
            "temperature": self._number(case.temperature, 1),
            "fever": Either(case.temperature >= 38),
            "pulse": case.pulse,
            "pressure": "{}/{}".format(*case.pressure),
        }
        if lab:
            values = {"ill": case.ill, "well": case.well, "usual_value": lab.well[1]}
            fields |= {name: f"{self._number(value, lab.decimals)} {lab.unit}" for name, value in values.items()}
            fields |= {"lab": self._noun(lab.en, lab.fr), "rise": Either(case.well > case.ill)}
        return fields

    def _disease(self, disease: Disease) -> SimpleNamespace:
        pairs = {name: getattr(disease, name) for name in ("test", "finding", "drug", "second_drug")}
        pairs["name"] = (disease.en, disease.fr)
        return SimpleNamespace(**{name: self._noun(*pair) for name, pair in pairs.items()})

    def _noun(self, *pair: str) -> Noun:
        """The noun in this language, from English and French or from one text for both."""
        return (EnglishNoun, FrenchNoun)[self.side](pair[self.side % len(pair)])

    def _nouns(self, pairs: list[tuple[str, str]]) -> Nouns:
        return Nouns([self._noun(*pair) for pair in pairs], self.words["and"])

    def _number(self, value: float, decimals: int) -> str:
        return f"{value:.{decimals}f}".replace(".", self.words["decimal"])
