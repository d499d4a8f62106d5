"""What a phase writes while it trains: metrics.jsonl, rows.jsonl, TensorBoard, a progress bar. Rank 0 only.

Each step's line appears once: on resume, lines beyond the checkpoint's step are cut off before training goes on.
"""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from command_line import Failure
from pipeline.engine import State, write_aside


def _keep(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Remove unwanted lines, and a last line that a crash left unfinished; returns the records that stay."""
    if not path.exists():
        return []
    kept = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            if number == len(lines):
                break
            raise Failure(f"{path}: line {number} is damaged") from None
        if wanted(record):
            kept.append(record)
    write_aside(path, "".join(json.dumps(record) + "\n" for record in kept))
    return kept


class PhaseLog:
    """The log of one phase, from `state` on; a context manager. On ranks other than 0 it does nothing."""

    def __init__(
        self, folder: Path, tensorboard: Path | None, state: State, budget: int, every_steps: int, active: bool
    ) -> None:
        self.active, self.every_steps, self.state = active, every_steps, state
        self.validated_at: set[int] = set()
        self.validation: dict[str, dict[str, float]] = {}  # "start" and "end" losses, for the lineage
        if not active:
            return
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        # A phase that starts anew validates anew; a resumed phase keeps what it measured up to its checkpoint.
        last = state.step if state.step else -1
        kept = _keep(folder / "metrics.jsonl", lambda record: record["step"] <= last)
        for name in ("rows.jsonl", "spikes.jsonl"):
            _keep(folder / name, lambda record: record["step"] <= last)
        for record in kept:
            if record.get("validation"):
                self._note(record)
        self._metrics = open(folder / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115, closed in __exit__
        self._rows = open(folder / "rows.jsonl", "a", encoding="utf-8")  # noqa: SIM115
        self._bar = tqdm(
            total=budget,
            initial=state.tokens,
            unit="tok",
            unit_scale=True,
            desc=state.phase,
            file=sys.stderr,
            disable=None,
        )
        self._board = None
        if tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(tensorboard), purge_step=state.step + 1 if state.step else None)

    def __enter__(self) -> "PhaseLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.active:
            self._metrics.close()
            self._rows.close()
            self._bar.close()
            if self._board is not None:
                self._board.close()

    def due(self, step: int, last: bool) -> bool:
        return step % self.every_steps == 0 or step == 1 or last

    def rows(self, step: int, position: int, row_ids: list[int]) -> None:
        if self.active:
            self._rows.write(json.dumps({"step": step, "position": position, "rows": row_ids}) + "\n")
            self._rows.flush()

    def step(self, tokens: int) -> None:
        if self.active:
            self._bar.update(tokens)

    def train(self, record: dict[str, Any]) -> None:
        self._write(record)
        if self.active:
            loss, norm = (math.nan if record[key] is None else record[key] for key in ("loss", "grad_norm"))
            self._say(
                f"{record['phase']}  step {record['step']}  tokens {record['tokens']:,}  loss {loss:.4f}  "
                f"lr {record['learning_rate']:.3g}  grad norm {norm:.3g}  {record['tokens_per_second']:,.0f} tok/s"
            )

    def validate(self, record: dict[str, Any]) -> None:
        self._note(record)
        self._write(record)
        if self.active:
            self._say(
                f"{record['phase']}  step {record['step']}  tokens {record['tokens']:,}  "
                f"validation: MLM loss {record['mlm_loss']:.4f}  CLM loss {record['clm_loss']:.4f}"
            )

    def spike(self, record: dict[str, Any]) -> None:
        """Print a loss spike, and record its rows in spikes.jsonl for use in `faults.skip_rows`."""
        if self.active:
            with open(self._folder / "spikes.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            self._say(
                f"{record['phase']}  step {record['step']}  loss spike {record['loss']:.4f}; its rows are in spikes.jsonl"
            )

    def _note(self, record: dict[str, Any]) -> None:
        self.validated_at.add(record["step"])
        losses = {key: record[key] for key in ("mlm_loss", "clm_loss")}
        self.validation.setdefault("start", losses)
        self.validation["end"] = losses

    def _write(self, record: dict[str, Any]) -> None:
        if not self.active:
            return
        self._metrics.write(json.dumps(record) + "\n")
        self._metrics.flush()
        if self._board is not None:
            kind = "validation" if record.get("validation") else "train"
            for key, value in record.items():
                if isinstance(value, int | float) and key not in ("step", "validation"):
                    self._board.add_scalar(f"{kind}/{key}", value, record["step"])

    def _say(self, line: str) -> None:
        with self._bar.external_write_mode(file=sys.stdout):
            print(line, flush=True)
