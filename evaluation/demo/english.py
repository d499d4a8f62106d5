"""A case told in English. Each part of a report has several wordings; some parts are left out at random."""

from random import Random

from evaluation.demo.case import Case
from evaluation.demo.medical_facts import SPECIALTIES


def english(case: Case, random: Random) -> str:
    """Return one report of about 60 to 300 words, as prose or under headings."""
    parts = [
        ("Presentation", _opening(case, random)),
        ("History", _history(case, random)),
        ("Examination", _examination(case, random)),
        ("Investigations", _tests(case, random)),
        ("Diagnosis", _diagnosis(case, random)),
        ("Treatment", _treatment(case, random)),
        ("Outcome", _outcome(case, random)),
        ("Comment", _comment(case, random)),
    ]
    optional = {"History": 0.75, "Examination": 0.6, "Comment": 0.7}
    kept = [(head, text) for head, text in parts if random.random() < optional.get(head, 1.0)]
    if random.random() < 0.3:
        return "\n".join(f"{head}: {text}" for head, text in kept)
    return " ".join(text for _, text in kept)


def listed(items: list[str]) -> str:
    """Join the items: a, b and c."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def with_article(noun: str) -> str:
    """Put "a" or "an" before the noun by its first letter. Ages work too: an 80-year-old."""
    return f"{'an' if noun[0] in 'aeioAEIO8' or noun.startswith(('11', '18')) else 'a'} {noun}"


def _person(case: Case) -> str:
    return f"{case.age}-year-old {'woman' if case.female else 'man'}"


def _he(case: Case) -> str:
    return "she" if case.female else "he"


def _his(case: Case) -> str:
    return "her" if case.female else "his"


def _value(case: Case, value: float) -> str:
    assert case.lab is not None
    return f"{value:.{case.lab.decimals}f} {case.lab.unit}"


def _opening(case: Case, random: Random) -> str:
    signs = listed([sign for sign, _ in case.symptoms])
    person, department = _person(case), SPECIALTIES[case.disease.specialty][0]
    return random.choice(
        (
            f"{capital(with_article(person))} was admitted to the department of {department} with {signs}, which had begun {case.weeks} weeks earlier.",
            f"This {person} presented with {with_article(str(case.weeks))}-week history of {signs}.",
            f"We report the case of {with_article(person)} who complained of {signs} for {case.weeks} weeks.",
            f"{capital(with_article(person))} was referred to {department} because of {signs}.",
            f"For {case.weeks} weeks, this {person} had suffered from {signs}, and {_he(case)} came to the department of {department}.",
        )
    )


def _history(case: Case, random: Random) -> str:
    he, his = capital(_he(case)), capital(_his(case))
    habit = random.choice(
        (
            f"{he} had never smoked.",
            f"{he} had stopped smoking {case.weeks} years before.",
            f"{he} drank no alcohol and had no known allergy.",
            f"{his} parents were in good health.",
            f"{he} lived alone and was independent.",
        )
    )
    if case.background is None:
        first = random.choice(
            (f"{his} medical history was unremarkable.", f"{he} had no previous illness and took no medication.")
        )
    else:
        old, drug = case.background.en, case.background.drug[0]
        first = random.choice(
            (
                f"{he} had a history of {old}, treated with {drug}.",
                f"{he} had been taking {drug} for {old}.",
                f"{his} medical history included {old}, for which {_he(case)} took {drug}.",
            )
        )
    return f"{first} {habit}" if random.random() < 0.6 else first


def _examination(case: Case, random: Random) -> str:
    high, low = case.pressure
    fever = "feverish" if case.temperature >= 38 else "not feverish"
    return random.choice(
        (
            f"On examination, the temperature was {case.temperature:.1f} °C, the pulse {case.pulse} per minute and the blood pressure {high}/{low} mmHg. There was no {case.absent[0]}.",
            f"The patient was {fever} at {case.temperature:.1f} °C; the pulse was {case.pulse} per minute. Neither {case.absent[0]} nor any other sign of {case.other.en} was found.",
            f"Physical examination confirmed the {case.symptoms[0][0]}. The blood pressure was {high}/{low} mmHg, and {_he(case)} was {fever}.",
        )
    )


def _tests(case: Case, random: Random) -> str:
    test, finding = case.disease.test[0], case.disease.finding[0]
    image = random.choice(
        (
            f"{capital(test)} showed {finding}.",
            f"{capital(test)} was performed and revealed {finding}.",
            f"We found {finding} with {test}.",
        )
    )
    if case.lab is None:
        return f"{image} Blood tests were normal."
    value, usual = _value(case, case.ill), _value(case, case.lab.well[1])
    blood = random.choice(
        (
            f"The {case.lab.en} was {value}.",
            f"Laboratory tests showed {with_article(case.lab.en) if case.lab.en.endswith(('level', 'count', 'rate')) else case.lab.en} of {value}, against a usual {usual}.",
            f"Blood tests were abnormal, with {case.lab.en} at {value}.",
        )
    )
    return f"{blood} {image}" if random.random() < 0.5 else f"{image} {blood}"


def _diagnosis(case: Case, random: Random) -> str:
    disease, finding, sign = case.disease.en, case.disease.finding[0], case.symptoms[-1][0]
    first = random.choice(
        (
            f"A diagnosis of {disease} was made.",
            f"These findings were consistent with {disease}.",
            f"The combination of {sign} and {finding} pointed to {disease}.",
            f"The patient was found to have {disease}.",
        )
    )
    excluded = random.choice(
        (
            f"{capital(case.other.en)} was considered, but there was no {case.absent[0]}.",
            f"In the absence of {case.absent[0]}, {case.other.en} was ruled out.",
            f"{capital(case.other.test[0])} did not show {case.other.finding[0]}, which excluded {case.other.en}.",
        )
    )
    return f"{first} {excluded}" if random.random() < 0.5 else first


def _treatment(case: Case, random: Random) -> str:
    disease, drug, second, sign = (
        case.disease.en,
        case.disease.drug[0],
        case.disease.second_drug[0],
        case.symptoms[0][0],
    )
    first = random.choice(
        (
            f"The patient was treated with {drug} for {disease}.",
            f"The patient was treated with {drug} for {disease}.",
            f"Treatment of the {disease} with {drug} was started on day {min(case.days, 3)}.",
            f"{capital(_he(case))} received {drug} for {disease}.",
            f"{capital(drug)} was given for the {disease}.",
        )
    )
    if case.cured:
        return first
    more = random.choice(
        (
            f"Because the {sign} persisted, {second} was added to {drug}.",
            f"As {drug} alone was not enough, {_he(case)} was also given {second}.",
            f"After {case.days} days {drug} was replaced by {second}.",
        )
    )
    return f"{first} {more}"


def _outcome(case: Case, random: Random) -> str:
    he, sign, drug = capital(_he(case)), case.symptoms[0][0], case.disease.drug[0]
    ending = drug if case.cured else case.disease.second_drug[0]
    course = random.choice(
        (
            f"After {case.days} days the {sign} had resolved.",
            f"The {sign} improved within {case.days} days of {ending}.",
            f"{he} was discharged after {case.days} days on {ending}.",
        )
    )
    if case.lab is not None and random.random() < 0.7:
        change = "risen" if case.well > case.ill else "fallen"
        course += f" The {case.lab.en} had {change} from {_value(case, case.ill)} to {_value(case, case.well)}."
    follow = random.choice(
        (
            f"At the follow-up visit after {case.months} months, the {case.age}-year-old patient had no sign of {case.disease.en}.",
            f"{case.months} months later {_he(case)} was well and still took {ending}.",
            f"After {case.months} months there was neither {' nor '.join(sign for sign, _ in case.symptoms[:2])}.",
            f"The department of {SPECIALTIES[case.disease.specialty][0]} saw {'her' if case.female else 'him'} again after {case.months} months, in good health.",
        )
    )
    return f"{course} {follow}"


def _comment(case: Case, random: Random) -> str:
    disease = case.disease
    usual = listed(list(disease.symptoms[:2]))
    return random.choice(
        (
            f"{capital(disease.en)} often causes {usual}. {capital(disease.drug[0])} is its first treatment.",
            f"{capital(disease.drug[0])} is the usual treatment of {disease.en}; {disease.second_drug[0]} is an alternative.",
            f"When {disease.en} is suspected, {disease.test[0]} is the key examination, as it shows {disease.finding[0]}.",
            f"This case shows that {usual} in {with_article(_person(case))} can be due to {disease.en}, which responds to {disease.drug[0]}.",
            f"{capital(usual)} suggest {disease.en}, whereas {case.absent[0]} suggests {case.other.en}, which is treated with {case.other.drug[0]}.",
        )
    )
