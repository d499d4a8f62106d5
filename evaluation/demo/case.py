"""A medical case: what a report tells, before it is put into words.

A case is drawn first and told afterwards, so that a report agrees with itself. Its disease, symptoms, test, finding, drug
and values recur, and a reader can find a hidden word from other parts of the report.
"""

from dataclasses import dataclass
from random import Random

from evaluation.demo.medical_facts import Disease, Lab


@dataclass(frozen=True)
class Case:
    """What a report tells, whatever its language."""

    age: int  # years
    female: bool
    disease: Disease
    symptoms: list[tuple[str, str]]  # (English, French with gender)
    usual: list[tuple[str, str]]  # the first symptoms of the disease, whether the patient has them or not
    other: Disease  # considered and excluded
    absent: tuple[str, str]  # a symptom of `other` that the patient does not have
    background: Disease | None  # an older disease, under treatment
    lab: Lab | None
    ill: float  # the laboratory value at admission
    well: float  # and after treatment
    weeks: int  # of symptoms before admission
    days: int  # in hospital
    months: int  # until the follow-up
    cured: bool  # by the first drug alone
    temperature: float  # °C
    pulse: int  # a minute
    pressure: tuple[int, int]  # mmHg


def draw_case(random: Random, world: list[Disease], words: dict[str, str]) -> Case:
    """Draw a case from the diseases of `world`. `words` maps each symptom from English to French."""
    disease = random.choice(world)
    female = disease.sex == "f" or (disease.sex is None and random.random() < 0.5)
    possible = [d for d in world if d.sex in (None, "f" if female else "m") and d.specialty != disease.specialty]
    told = random.sample(disease.symptoms, k=min(len(disease.symptoms), random.choice((2, 3, 3, 4))))
    others = [d for d in possible if any(symptom not in disease.symptoms for symptom in d.symptoms)]
    other = random.choice(others)
    absent = random.choice([symptom for symptom in other.symptoms if symptom not in disease.symptoms])
    background = random.choice([d for d in possible if d is not other]) if random.random() < 0.6 else None
    lab = disease.lab
    fever = "fever" in told
    return Case(
        age=random.randint(19, 91),
        female=female,
        disease=disease,
        symptoms=[(symptom, words[symptom]) for symptom in told],
        usual=[(symptom, words[symptom]) for symptom in disease.symptoms[:2]],
        other=other,
        absent=(absent, words[absent]),
        background=background,
        lab=lab,
        ill=random.uniform(*lab.ill) if lab else 0.0,
        well=random.uniform(*lab.well) if lab else 0.0,
        weeks=random.randint(2, 16),
        days=random.randint(3, 21),
        months=random.choice((2, 3, 6, 9, 12, 18)),
        cured=random.random() < 0.65,
        temperature=random.uniform(38.2, 40.1) if fever else random.uniform(36.4, 37.4),
        pulse=random.randint(92, 124) if fever else random.randint(58, 90),
        pressure=(random.randint(104, 152), random.randint(58, 92)),
    )
