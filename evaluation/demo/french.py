"""A case told in French, as `english` tells it. Articles and agreement follow from the gender that the facts carry."""

from random import Random

from evaluation.demo.case import Case
from evaluation.demo.medical_facts import SPECIALTIES


def french(case: Case, random: Random) -> str:
    """Return one report of about 60 to 300 words, as prose or under headings."""
    parts = [
        ("Motif", _opening(case, random)),
        ("Antécédents", _history(case, random)),
        ("Examen", _examination(case, random)),
        ("Bilan", _tests(case, random)),
        ("Diagnostic", _diagnosis(case, random)),
        ("Traitement", _treatment(case, random)),
        ("Évolution", _outcome(case, random)),
        ("Discussion", _comment(case, random)),
    ]
    optional = {"Antécédents": 0.75, "Examen": 0.6, "Discussion": 0.7}
    kept = [(head, text) for head, text in parts if random.random() < optional.get(head, 1.0)]
    if random.random() < 0.3:
        return "\n".join(f"{head} : {text}" for head, text in kept)
    return " ".join(text for _, text in kept)


def bare(noun: str) -> str:
    """Drop the gender: "f fièvre" -> "fièvre"."""
    return noun.partition(" ")[2]


def elides(word: str) -> bool:
    """Say whether the word takes l' and d'. Acronyms that are spelt out (HbA1c) begin with a vowel sound too."""
    return word[0].lower() in "aeéèêiîoôœuh"


def the(noun: str) -> str:
    """Definite article: la fièvre, l'asthme, les nausées."""
    gender, word = noun.split(" ", 1)
    if gender in ("fp", "mp"):
        return f"les {word}"
    return f"l'{word}" if elides(word) else f"{'la' if gender == 'f' else 'le'} {word}"


def a(noun: str) -> str:
    """Indefinite article: une fièvre, un asthme, des nausées."""
    gender, word = noun.split(" ", 1)
    return f"{ {'f': 'une', 'm': 'un'}.get(gender, 'des') } {word}"


def of(word: str) -> str:
    """de or d' before a word without an article: de fièvre, d'asthme."""
    return f"d'{word}" if elides(word) else f"de {word}"


def of_the(noun: str) -> str:
    """de and the definite article: de la fièvre, du zona, des nausées, de l'asthme."""
    definite = the(noun)
    if definite.startswith("le "):
        return f"du {definite[3:]}"
    return f"des {definite[4:]}" if definite.startswith("les ") else f"de {definite}"


def to_the(noun: str) -> str:
    """à and the definite article: à la fièvre, au zona, aux nausées, à l'asthme."""
    definite = the(noun)
    if definite.startswith("le "):
        return f"au {definite[3:]}"
    return f"aux {definite[4:]}" if definite.startswith("les ") else f"à {definite}"


def plural(noun: str) -> bool:
    return noun.split(" ", 1)[0] in ("fp", "mp")


def listed(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} et {items[-1]}"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def number(value: float, decimals: int) -> str:
    return f"{value:.{decimals}f}".replace(".", ",")


def _e(case: Case) -> str:
    return "e" if case.female else ""


def _person(case: Case) -> str:
    return f"{'une femme' if case.female else 'un homme'} de {case.age} ans"


def _patient(case: Case) -> str:
    return "la patiente" if case.female else "le patient"


def _he(case: Case) -> str:
    return "elle" if case.female else "il"


def _value(case: Case, value: float) -> str:
    assert case.lab is not None
    return f"{number(value, case.lab.decimals)} {case.lab.unit}"


def _opening(case: Case, random: Random) -> str:
    words = [bare(sign) for _, sign in case.symptoms]
    signs, of_signs = listed(words), listed([of(word) for word in words])
    person, department = _person(case), SPECIALTIES[case.disease.specialty][1]
    return random.choice(
        (
            f"{capital(person)} a été hospitalisé{_e(case)} dans le service {of(department)} pour {signs}, depuis {case.weeks} semaines.",
            f"{capital(_patient(case))}, âgé{_e(case)} de {case.age} ans, a consulté pour {signs} évoluant depuis {case.weeks} semaines.",
            f"Nous rapportons le cas d'{person} qui se plaignait {of_signs} depuis {case.weeks} semaines.",
            f"{capital(person)} a été adressé{_e(case)} en {department} en raison {of_signs}.",
            f"Depuis {case.weeks} semaines, {_patient(case)} de {case.age} ans souffrait {of_signs}, ce qui a motivé une consultation en {department}.",
        )
    )


def _history(case: Case, random: Random) -> str:
    he = capital(_he(case))
    habit = random.choice(
        (
            f"{he} n'avait jamais fumé.",
            f"{he} avait arrêté de fumer {case.weeks} ans plus tôt.",
            f"{he} ne consommait pas d'alcool et n'avait pas d'allergie connue.",
            "Ses parents étaient en bonne santé.",
            f"{he} vivait seul{_e(case)} et était autonome.",
        )
    )
    if case.background is None:
        first = random.choice(
            (
                "Il n'y avait pas d'antécédent particulier.",
                f"{he} n'avait aucune maladie connue et ne prenait aucun traitement.",
            )
        )
    else:
        old, drug = case.background.fr, case.background.drug[1]
        first = random.choice(
            (
                f"{he} avait un antécédent {of(bare(old))}, traité par {drug}.",
                f"{he} prenait déjà un traitement par {drug} pour {a(old)}.",
                f"Parmi ses antécédents figurait {a(old)}, sous {drug}.",
            )
        )
    return f"{first} {habit}" if random.random() < 0.6 else first


def _examination(case: Case, random: Random) -> str:
    high, low = case.pressure
    heat = number(case.temperature, 1)
    fever = "fébrile" if case.temperature >= 38 else "apyrétique"
    absent = of(bare(case.absent[1]))
    return random.choice(
        (
            f"À l'examen, la température était de {heat} °C, le pouls à {case.pulse} par minute et la pression artérielle à {high}/{low} mmHg. Il n'y avait pas {absent}.",
            f"{capital(_patient(case))} était {fever} à {heat} °C ; le pouls était à {case.pulse} par minute. L'absence {absent} n'était pas en faveur {of(a(case.other.fr))}.",
            f"L'examen clinique a confirmé {the(case.symptoms[0][1])}. La pression artérielle était de {high}/{low} mmHg et {_he(case)} était {fever}.",
        )
    )


def _tests(case: Case, random: Random) -> str:
    test, finding = the(case.disease.test[1]), case.disease.finding[1]
    image = random.choice(
        (
            f"{capital(test)} a montré {finding}.",
            f"{capital(test)} a été réalisé{'e' if case.disease.test[1].startswith('f ') else ''} et a révélé {finding}.",
            f"Nous avons trouvé {finding} grâce {to_the(case.disease.test[1])}.",
        )
    )
    if case.lab is None:
        return f"{image} Le bilan sanguin était normal."
    lab, value, usual = case.lab.fr, _value(case, case.ill), _value(case, case.lab.well[1])
    was = "étaient" if plural(lab) else "était"
    blood = random.choice(
        (
            f"{capital(the(lab))} {was} à {value}.",
            f"Au laboratoire, {the(lab)} {was} à {value}, pour une valeur habituelle de {usual}.",
            f"Le bilan sanguin était anormal, avec {the(lab)} à {value}.",
        )
    )
    return f"{blood} {image}" if random.random() < 0.5 else f"{image} {blood}"


def _diagnosis(case: Case, random: Random) -> str:
    disease, finding, sign = case.disease.fr, case.disease.finding[1], case.symptoms[-1][1]
    first = random.choice(
        (
            f"Le diagnostic {of(bare(disease))} a été posé.",
            f"Ces éléments étaient en faveur {of(a(disease))}.",
            f"L'association {of_the(sign)} et du résultat suivant, {finding}, évoquait {a(disease)}.",
            f"{capital(_patient(case))} présentait donc {a(disease)}.",
        )
    )
    absent = bare(case.absent[1])
    excluded = random.choice(
        (
            f"{capital(a(case.other.fr))} a été envisagé{'e' if case.other.fr.startswith('f ') else ''}, mais il n'y avait pas {of(absent)}.",
            f"En l'absence {of(absent)}, {a(case.other.fr)} a été écarté{'e' if case.other.fr.startswith('f ') else ''}.",
            f"{capital(the(case.other.test[1]))} n'était pas en faveur {of(a(case.other.fr))}.",
        )
    )
    return f"{first} {excluded}" if random.random() < 0.5 else first


def _treatment(case: Case, random: Random) -> str:
    disease, drug, second = case.disease.fr, case.disease.drug[1], case.disease.second_drug[1]
    first = random.choice(
        (
            f"{capital(_patient(case))} a été traité{_e(case)} par {drug} pour {a(disease)}.",
            f"{capital(_patient(case))} a été traité{_e(case)} par {drug} pour {a(disease)}.",
            f"Un traitement {of_the(disease)} par {drug} a été débuté au jour {min(case.days, 3)}.",
            f"{capital(_he(case))} a été mis{_e(case)} sous {drug} pour {a(disease)}.",
            f"La prise en charge {of_the(disease)} reposait sur un traitement par {drug}.",
        )
    )
    if case.cured:
        return first
    sign = the(case.symptoms[0][1])
    lasted = "persistaient" if plural(case.symptoms[0][1]) else "persistait"
    more = random.choice(
        (
            f"Comme {sign} {lasted}, un traitement par {second} a été ajouté à celui par {drug}.",
            f"Le traitement par {drug} ne suffisant pas, {_he(case)} a aussi reçu un traitement par {second}.",
            f"Après {case.days} jours, le traitement par {drug} a été remplacé par {second}.",
        )
    )
    return f"{first} {more}"


def _outcome(case: Case, random: Random) -> str:
    he, sign = capital(_he(case)), case.symptoms[0][1]
    ending = case.disease.drug[1] if case.cured else case.disease.second_drug[1]
    had = "avaient" if plural(sign) else "avait"
    course = random.choice(
        (
            f"Après {case.days} jours, {the(sign)} {had} disparu.",
            f"L'évolution a été favorable, avec disparition {of_the(sign)} en {case.days} jours sous {ending}.",
            f"{he} est sorti{_e(case)} après {case.days} jours sous {ending}.",
        )
    )
    if case.lab is not None and random.random() < 0.7:
        change = "remonté" if case.well > case.ill else "redescendu"
        lab = case.lab.fr
        agreed = change + ("e" if lab.startswith("f") else "") + ("s" if plural(lab) else "")
        verb = "étaient" if plural(lab) else "était"
        course += f" {capital(the(lab))} {verb} {agreed} de {_value(case, case.ill)} à {_value(case, case.well)}."
    follow = random.choice(
        (
            f"À la consultation de contrôle, après {case.months} mois, {_patient(case)} de {case.age} ans n'avait plus aucun signe {of(bare(case.disease.fr))}.",
            f"{case.months} mois plus tard, {_he(case)} allait bien et prenait toujours un traitement par {ending}.",
            f"Après {case.months} mois, il n'y avait plus {' ni '.join(of(bare(sign)) for _, sign in case.symptoms[:2])}.",
            f"Le service {of(SPECIALTIES[case.disease.specialty][1])} l'a revu{_e(case)} après {case.months} mois, en bonne santé.",
        )
    )
    return f"{course} {follow}"


def _comment(case: Case, random: Random) -> str:
    disease, words = case.disease, [bare(sign) for _, sign in case.symptoms[:2]]
    usual = listed(words)
    return random.choice(
        (
            f"{capital(the(disease.fr))} se manifeste souvent par {usual}. Le premier traitement repose sur {disease.drug[1]}.",
            f"Le traitement habituel {of_the(disease.fr)} est {disease.drug[1]} ; on peut aussi proposer {disease.second_drug[1]}.",
            f"Devant une suspicion {of(bare(disease.fr))}, {the(disease.test[1])} est l'examen clé, car on y trouve {disease.finding[1]}.",
            f"Ce cas montre que {usual} chez {_person(case)} peuvent révéler {a(disease.fr)}, qui répond au traitement par {disease.drug[1]}.",
            f"Ainsi, {usual} font évoquer {a(disease.fr)}, alors que {the(case.absent[1])} {'évoquent' if plural(case.absent[1]) else 'évoque'} {a(case.other.fr)}, dont le traitement est {case.other.drug[1]}.",
        )
    )
