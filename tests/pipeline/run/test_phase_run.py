"""One phase, method by method: real rows, loader, log and folder; an engine whose numbers the test chooses; no file of weights."""

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from command_line import Failure, UsageError
from pipeline.data import Loader, Step
from pipeline.engine import State
from pipeline.ranks import Agreement, Ranks
from pipeline.recipe import load
from pipeline.run import PhaseRun, RunFolder, StopRequests, compatible, open_streams, random_config
from pipeline.run import phase_run as module
from tests.conftest import lines

Write = Callable[..., Path]
Begin = Callable[..., PhaseRun]
NAN = math.nan


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """(step, for good) of each checkpoint."""
    calls: list[tuple[int, bool]] = []

    def save(folder: Path, engine: Any, state: State, tokenizer: Path, agreement: Agreement, keep: bool) -> None:
        calls.append((state.step, keep))

    monkeypatch.setattr(module, "save", save)
    return calls


@pytest.fixture
def begin(recipe: Write, tmp_path: Path, saved: list[tuple[int, bool]]) -> Iterator[Begin]:
    """The run's first phase, entered, at a step; with keys of the recipe changed."""
    opened = []

    def enter(step: int = 0, tokens: int = 0, **changes: Any) -> PhaseRun:
        settings = load(recipe(**changes))
        [rows, _] = open_streams(settings, None)
        loader = Loader(rows, compatible(rows.sources), Ranks(), 8, 2)
        config = random_config(settings, rows.sources[0].manifest.tokenizer)
        engine = SimpleNamespace(device=torch.device("cpu"), encoder=SimpleNamespace(config=config))
        parts: Any = SimpleNamespace(
            folder=RunFolder(tmp_path / "run"), engine=engine, loaders=[loader], validation=None, tokenizer=tmp_path
        )
        state = State("clm", step, tokens, rows.digest)
        opened.append(PhaseRun(settings, 0, parts, Agreement(Ranks()), StopRequests({}), state))
        return opened[-1].__enter__()

    yield enter
    for phase in opened:
        phase.__exit__(None, None, None)


def test_a_step_moves_the_state_and_writes_the_log(begin: Begin, tmp_path: Path) -> None:
    phase = begin()
    step = phase.next_step()
    assert step is not None
    assert (len(step.batches), len(step.row_ids), step.position, step.save_first) == (4, 8, 0, False)
    assert step.tokens == sum(batch.tokens for batch in step.batches)
    phase.account(step, 1e-3, loss=2.0 * step.labels, grad_norm=0.5)
    assert (phase.state.step, phase.state.tokens, phase.state.position, phase.state.adam_step) == (1, step.tokens, 8, 1)
    [line] = lines(tmp_path / "run" / "clm" / "metrics.jsonl")
    assert (line["step"], line["loss"], line["grad_norm"], line["labels"]) == (1, 2.0, 0.5, step.labels)
    [line] = lines(tmp_path / "run" / "clm" / "rows.jsonl")
    assert line == {"step": 1, "position": 0, "rows": step.row_ids}


def test_what_is_not_finite_ends_the_run_or_is_skipped(begin: Begin, capsys: pytest.CaptureFixture[str]) -> None:
    phase = begin(4, 3000)
    step = phase.next_step()
    assert step is not None
    for loss, norm in ((NAN, 1.0), (1.0, NAN)):
        with pytest.raises(Failure, match=r"phase clm, step 5: .*the last checkpoint, of step 4, is intact"):
            phase.account(step, 1e-3, loss, norm)
    assert phase.state.step == 4
    lenient = begin(4, 3000, faults={"on_nonfinite": "skip", "max_skipped": 1})
    lenient.account(step, 1e-3, NAN, NAN)
    assert (lenient.state.step, lenient.state.skipped, lenient.state.adam_step) == (5, 1, 0)
    assert "skipped: phase clm, step 5" in capsys.readouterr().out
    with pytest.raises(Failure, match="step 6"):
        lenient.account(step, 1e-3, NAN, NAN)  # one more than faults.max_skipped


def test_a_stop_saves_what_is_not_saved(begin: Begin, tmp_path: Path, saved: list[tuple[int, bool]]) -> None:
    phase = begin(3, 2000)
    assert phase.stop() is False
    assert saved == []  # the phase began from that very checkpoint
    step = phase.next_step()
    assert step is not None
    phase.account(step, 1e-3, 1.0, 1.0)
    (tmp_path / "run" / "STOP").touch()
    assert not phase.go_on()
    assert phase.next_step() is None
    assert phase.stop() is False
    assert saved == [(4, False)]


def test_checkpoints_are_due_by_step_by_clock_and_at_the_end(begin: Begin, saved: list[tuple[int, bool]]) -> None:
    phase = begin(3, 2000, checkpoints={"every_steps": 2, "every_minutes": 1})
    assert not phase.checkpoint_due
    phase.state = phase.state.after(100, 8, applied=True)
    assert phase.checkpoint_due
    phase.save(keep=True)
    assert not phase.checkpoint_due  # saved already, though 4 is a multiple of 2
    phase.state = phase.state.after(100, 8, applied=True)
    phase.saved_at = time.monotonic() - 61
    step = phase.next_step()
    assert step is not None
    assert step.save_first
    phase.state = phase.state.after(20_000, 8, applied=True)
    assert phase.finished
    assert phase.checkpoint_due
    assert saved == [(4, True)]


def test_validation_is_due_and_a_missed_one_is_made_up_for(begin: Begin) -> None:
    phase = begin(5, 2000)
    assert phase.validation_due  # every 5 steps
    assert phase.validation_missed()
    phase.log.validated_at.add(5)
    assert not phase.validation_missed()
    phase.state = phase.state.after(100, 8, applied=True)
    assert not phase.validation_due
    assert not phase.validation_missed()
    without = begin(5, 2000, data__validation=None, validation=None)
    assert not without.validation_due


def test_all_ranks_hear_of_a_stop_and_of_a_step_without_rows() -> None:
    alone = Agreement(Ranks())
    step = Step([], 7, 3, 0, [1])
    assert module.agree_on_step(iter([step]), alone, [False, True]) == (step, [7, 3, 0, 1])
    assert module.agree_on_step(iter([]), alone, [False]) == (None, [0, 0, 1])
    with pytest.raises(UsageError, match="faults.skip_rows leaves a step without any row"):
        module.agree_on_step(iter([Step([], 0, 0, 0, [])]), alone, [False])
