"""The report: what stands on the page equals what the runs logged, and nothing else leaves the run folders."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from command_line import run
from evaluation.__main__ import main

DETOUR = [("clm", "clm", None), ("mlm_decay", "mlm", 0.15)]
TWIN = [("mlm", "mlm", 0.3), ("mlm_decay", "mlm", 0.15)]
STEP = 2048  # tokens
STEPS = 12  # of each phase


@dataclass
class Page(HTMLParser):
    """The parts of a page that the tests ask about."""

    text: str
    tags: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.feed(self.text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attributes)
        self.addresses += [v or "" for k, v in attributes if k in ("src", "href", "xlink:href", "srcset", "data")]
        self.ids += [values["id"] or ""] if "id" in values else []
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    def row(self, *start: str) -> list[str]:
        """The one table row that begins with these cells."""
        (found,) = [row for row in self.rows if len(row) > 1 and row[: len(start)] == list(start)]
        return found


def lines(phase: str, objective: str, start: float) -> list[dict[str, Any]]:
    """Metrics of one phase as the pipeline writes them; every value differs from every other."""
    found: list[dict[str, Any]] = []
    for step in range(STEPS + 1):
        loss = start * math.exp(-0.05 * step) + 0.01 * math.sin(7.0 * step)
        if step:
            found.append(
                {"phase": phase, "step": step, "tokens": step * STEP, "loss": loss, "learning_rate": 1e-4 * step}
                | {"grad_norm": 1 / step, "labels": 2000, "tokens_per_second": 9000.0 + step, "seconds": 0.2}
                | {"model_flops_utilization": None}
            )
        if step % 4 == 0:
            found.append(
                {"phase": phase, "step": step, "tokens": step * STEP, "validation": True, "rows": 64, "seconds": 1.2}
                | {"mlm_loss": loss + 0.25, "clm_loss": loss + (0.5 if objective == "mlm" else 0.125)}
            )
    return found


def make_run(folder: Path, name: str, phases: list[tuple[str, str, float | None]], done: int = 2) -> Path:
    """A run folder of which the first `done` phases are finished and the next ones have not begun."""
    budget = STEPS * STEP
    recipe = {
        "name": name,
        "phases": [{"name": n, "objective": o, "tokens": budget, "mask_rate": m} for n, o, m in phases],
        "batch": {"rows": 16, "rows_per_device": 8},
        "data": {"rows": "/somewhere/hospital/rows", "validation": "s3://hospital/validation"},
        "model": {"init": "/somewhere/models/base"},
        "validation": {"rows": 64, "mask_rate": 0.15},
        "seed": 17,
        "data_seed": 42,
    }
    folder.mkdir()
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "environment.json").write_text(json.dumps({"host": "node-of-hospital"}))
    for position, (phase, objective, _) in enumerate(phases[:done]):
        (folder / phase).mkdir()
        write(folder / phase, lines(phase, objective, 7.0 - 2 * position - 0.5 * (phases is TWIN)))
        (folder / phase / "DONE").touch()
    return folder


def write(folder: Path, records: list[dict[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def detour(tmp_path: Path) -> Path:
    return make_run(tmp_path / "folder-one", "bio-detour", DETOUR)


@pytest.fixture
def twin(tmp_path: Path) -> Path:
    return make_run(tmp_path / "folder-two", "bio-twin", TWIN)


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., Page]:
    def build(*runs: Path) -> Page:
        out = tmp_path / "report.html"
        assert run(main, ["report", *map(str, runs), "--out", str(out)]) == 0
        return Page(out.read_text(encoding="utf-8"))

    return build


def fails(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int) -> str:
    """The one line on stderr with which the command fails."""
    assert run(main, arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


def test_nothing_is_fetched_and_no_script_runs(report: Callable[..., Page], detour: Path, twin: Path) -> None:
    page = report(detour, twin)
    assert page.addresses
    assert all(address.startswith("#") or address == "data:," for address in page.addresses)
    assert not {"script", "iframe", "object", "embed", "img", "image", "base", "form"} & set(page.tags)
    for request in ("@import", "http:", "https:", "url(http", "url('", 'url("', "src="):
        assert request not in page.text
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)", page.text))
    assert "default-src 'none'" in page.text


def test_ids_are_unique_and_references_lead_somewhere(report: Callable[..., Page], detour: Path, twin: Path) -> None:
    page = report(detour, twin)
    assert len(page.ids) == len(set(page.ids))
    targets = [a[1:] for a in page.addresses if a.startswith("#")] + re.findall(r"url\(#([^)]*)\)", page.text)
    targets += " ".join(re.findall(r'aria-labelledby="([^"]*)"', page.text)).split()
    assert targets
    assert set(targets) <= set(page.ids)


def test_tables_hold_the_logged_numbers(report: Callable[..., Page], detour: Path, twin: Path) -> None:
    page = report(detour, twin)
    last = {}
    for folder, first_phase in ((detour, "clm"), (twin, "mlm")):
        first, second = read(folder / first_phase), read(folder / "mlm_decay")
        start, middle, end = first[0], first[-1], second[-1]
        expected = [
            [label, f"{m['mlm_loss']:.4f}", f"{math.exp(m['mlm_loss']):,.2f}", f"{m['clm_loss']:.4f}"]
            for label, m in (("start", start), (f"after {first_phase}", middle), ("after mlm_decay", end))
        ]
        found = [row[:4] for row in page.rows if row[0] in {"start", f"after {first_phase}", "after mlm_decay"}]
        assert all(row in found for row in expected)
        last[folder] = end["mlm_loss"]
        # 2 * 12 steps: both phases, from the start of the run.
        name = yaml.safe_load((folder / "recipe.yaml").read_text())["name"]
        row = page.row(name, f"{end['mlm_loss']:.4f}")
        assert row[-1] == f"{2 * STEPS * STEP:,}"
        phase = page.row(first_phase)
        training = [line for line in first if "loss" in line]
        assert phase[3:7] == [f"{STEPS * STEP:,}", f"{STEPS * STEP:,}", "finished", "9,006"]  # median of 9001 to 9012
        assert phase[-1] == f"{training[-1]['loss']:.4f}"
    difference = f"{last[twin] - last[detour]:+.4f}".replace("-", "\N{MINUS SIGN}")
    assert page.row("bio-twin", f"{last[twin]:.4f}")[2] == difference


def path_of(page: Page, plot: str, curve: int) -> list[tuple[float, float]]:
    (path,) = re.findall(rf'<g id="{plot}-curve-{curve}">\s*<path d="([^"]*)"', page.text)
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path)]


@pytest.mark.parametrize(
    ("plot", "key"),
    [
        ("validation-mlm", "mlm_loss"),
        ("validation-clm", "clm_loss"),
        ("training-loss", "loss"),
        ("learning-rate", "learning_rate"),
        ("grad-norm", "grad_norm"),
    ],
)
def test_curves_are_the_logged_points(
    report: Callable[..., Page], detour: Path, twin: Path, plot: str, key: str
) -> None:
    """All points of both runs and phases lie on one affine map from (tokens of the run, value) to the drawing."""
    page = report(detour, twin)
    folders = [detour / "clm", detour / "mlm_decay", twin / "mlm", twin / "mlm_decay"]
    logged, drawn = [], []
    for curve, folder in enumerate(folders):
        points = [line for line in read(folder) if key in line]
        path = path_of(page, plot, curve)
        assert len(path) == len(points)
        offset = STEPS * STEP * (curve % 2)
        logged += [
            (offset + line["tokens"], math.log(line[key]) if plot == "grad-norm" else line[key]) for line in points
        ]
        drawn += path
    for axis, sign in ((0, 1), (1, -1)):
        values, places = [p[axis] for p in logged], [p[axis] for p in drawn]
        low, high = values.index(min(values)), values.index(max(values))
        slope = (places[high] - places[low]) / (values[high] - values[low])
        assert slope * sign > 0
        for value, place in zip(values, places, strict=True):
            assert place == pytest.approx(places[low] + slope * (value - values[low]), abs=0.01)


def test_objective_and_phase_boundary_are_drawn(report: Callable[..., Page], detour: Path, twin: Path) -> None:
    page = report(detour, twin)
    for plot in ("validation-mlm", "training-loss", "learning-rate"):
        dashed = [
            "stroke-dasharray" in re.findall(rf'id="{plot}-curve-{curve}">\s*<path [^>]*>', page.text)[0]
            for curve in range(4)
        ]
        assert dashed == [False, True, True, True]  # CLM solid, MLM dashed
        # Both runs change phase at the same place: one line.
        assert [i for i in page.ids if i.startswith(f"{plot}-boundary")] == [f"{plot}-boundary-2-{STEPS * STEP}"]


def test_hostile_names_are_text(report: Callable[..., Page], tmp_path: Path) -> None:
    name = "<script>alert('$x^2$')</script> & \"quoted\""
    phase = "<img src=x onerror=alert(1)>"
    page = report(make_run(tmp_path / "r", name, [(phase, "<b>", None), *DETOUR[1:]]))
    assert "<script" not in page.text
    assert "<img" not in page.text
    assert "b" not in page.tags
    assert any(name in words for words in page.words)
    assert page.row(phase)


def test_privacy(report: Callable[..., Page], detour: Path, twin: Path, tmp_path: Path) -> None:
    page = report(detour, twin)
    for secret in ("hospital", "somewhere", "folder-one", str(tmp_path), "recipe.yaml", ".jsonl"):
        assert secret not in page.text


def test_same_input_same_bytes(detour: Path, twin: Path, tmp_path: Path) -> None:
    for out in ("a.html", "b.html"):
        assert main(["report", str(detour), str(twin), "--out", str(tmp_path / out)]) == 0
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_runs_of_one_name_are_numbered(report: Callable[..., Page], tmp_path: Path) -> None:
    folders = [make_run(tmp_path / f"r{i}", name, TWIN) for i, name in enumerate(["same", "same (1)", "same"])]
    names = [row[0] for row in report(*folders).rows if row[0].startswith("same") and len(row) > 1]
    assert names == ["same (2)", "same (1)", "same (3)"]


def test_unfinished_run(report: Callable[..., Page], tmp_path: Path, detour: Path) -> None:
    twin = make_run(tmp_path / "twin", "twin", TWIN, done=1)
    (twin / "mlm" / "DONE").unlink()
    kept = lines("mlm", "mlm", 6.5)[:10]
    write(twin / "mlm", kept)
    with (twin / "mlm" / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "mlm", "step": 9, "tok')
    page = report(detour, twin)
    words = " ".join(page.words)
    trained = max(line["tokens"] for line in kept)
    assert f"twin, mlm: unfinished, {trained:,} of {STEPS * STEP:,} tokens." in words
    assert "twin, mlm: the last line of the metrics is incomplete and was left out." in words
    assert "twin, mlm_decay: not started yet." in words
    assert page.row("twin")[-2:] == ["in mlm so far", f"{4 * STEP:,}"]
    assert len(path_of(page, "training-loss", 2)) == sum("loss" in line for line in kept)


def test_a_run_that_has_not_begun_beside_one_that_has(
    report: Callable[..., Page], tmp_path: Path, detour: Path
) -> None:
    page = report(make_run(tmp_path / "new", "new", TWIN, done=0), detour)
    assert page.row("new")[-2] == "not validated yet"
    assert "bio-detour ends with" in " ".join(page.words)


def test_steps_trained_again_count_once(report: Callable[..., Page], detour: Path) -> None:
    """After a kill training goes back to a checkpoint: the steps since then stand twice, the second time counts."""
    first = lines("clm", "clm", 7.0)
    cut = next(i for i, line in enumerate(first) if line["step"] == 7)
    again = [line | {"loss": line["loss"] + 1} if "loss" in line else line for line in first if line["step"] > 4]
    write(detour / "clm", first[: cut + 1] + again)
    page = report(detour)
    assert len(path_of(page, "training-loss", 0)) == STEPS
    assert page.row("clm")[-1] == f"{again[-2]['loss']:.4f}"
    assert "bio-detour, clm: 3 logged lines were left out" in " ".join(page.words)  # steps 5, 6, 7


def test_a_loss_that_is_not_finite_leaves_a_gap(report: Callable[..., Page], detour: Path) -> None:
    records = lines("clm", "clm", 7.0)
    records[6]["loss"] = math.nan
    write(detour / "clm", records)
    page = report(detour)
    assert len(path_of(page, "training-loss", 0)) == STEPS - 1
    assert "1 logged steps have no finite training loss" in " ".join(page.words)


def test_a_spike_in_a_long_run_stays_visible(report: Callable[..., Page], detour: Path) -> None:
    template = next(line for line in lines("clm", "clm", 7.0) if "loss" in line)
    records = [template | {"step": s, "tokens": s, "loss": 3.0 + 0.01 * (s % 7)} for s in range(1, 20_001)]
    records[7_777]["loss"] = 9.0
    write(detour / "clm", records)
    page = report(detour)
    heights = sorted(y for _, y in path_of(page, "training-loss", 0))
    assert heights[0] < heights[1] - 50  # y grows downwards
    assert len(page.text) < 1_000_000


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"seed": 1, "data_seed": 1}, "different orders"),
        ({"validation": {"rows": 64, "mask_rate": 0.3}}, "different mask rates"),
        ({"data": {"validation": "elsewhere"}}, "different rows"),
    ],
)
def test_what_spoils_a_comparison_is_said(
    report: Callable[..., Page], detour: Path, twin: Path, change: dict[str, Any], word: str
) -> None:
    assert word not in " ".join(report(detour, twin).words)
    recipe = yaml.safe_load((twin / "recipe.yaml").read_text())
    (twin / "recipe.yaml").write_text(yaml.safe_dump(recipe | change))
    assert word in " ".join(report(detour, twin).words)


@pytest.mark.parametrize("bad", ['{"phase": "clm", "step": 3, "canary', '["canary"]', '{"step": 1}', ""])
def test_a_bad_middle_line_is_named_and_not_quoted(
    capsys: pytest.CaptureFixture[str], detour: Path, tmp_path: Path, bad: str
) -> None:
    file = detour / "clm" / "metrics.jsonl"
    good = file.read_text().splitlines()
    file.write_text("\n".join([*good[:4], bad, *good[4:]]) + "\n")
    message = fails(capsys, ["report", str(detour), "--out", str(tmp_path / "r.html")], 1)
    assert f"{file}, line 5" in message
    assert "canary" not in message
    assert not (tmp_path / "r.html").exists()


def test_a_wrong_field_is_named_even_in_the_last_line(
    capsys: pytest.CaptureFixture[str], detour: Path, tmp_path: Path
) -> None:
    records = lines("clm", "clm", 7.0)
    write(detour / "clm", [*records, records[-2] | {"loss": "canary"}])
    message = fails(capsys, ["report", str(detour), "--out", str(tmp_path / "r.html")], 1)
    assert f"line {len(records) + 1}" in message
    assert "field loss" in message
    assert "canary" not in message


def test_wrong_use(capsys: pytest.CaptureFixture[str], detour: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "r.html")
    (tmp_path / "empty").mkdir()
    assert "not a run folder" in fails(capsys, ["report", str(tmp_path / "empty"), "--out", out], 1)
    assert "not a run folder" in fails(capsys, ["report", str(tmp_path / "absent"), "--out", out], 1)
    new = make_run(tmp_path / "new", "new", TWIN, done=0)
    assert "no metrics" in fails(capsys, ["report", str(new), "--out", out], 1)
    assert "does not exist" in fails(capsys, ["report", str(detour), "--out", str(tmp_path / "absent" / "r.html")], 2)
    assert "is a folder" in fails(capsys, ["report", str(detour), "--out", str(tmp_path)], 2)
    assert "--out" in fails(capsys, ["report", str(detour)], 2)
    assert "invalid choice" in fails(capsys, ["reprot"], 2)
    (detour / "recipe.yaml").write_text("name: x\nphases: [{name: ../elsewhere, objective: clm, tokens: 1}]")
    assert "recipe.yaml is not the recipe" in fails(capsys, ["report", str(detour), "--out", out], 1)
