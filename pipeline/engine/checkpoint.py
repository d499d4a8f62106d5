"""Checkpoints of our own: one format for every ZeRO stage and number of ranks, complete or absent.

    checkpoints/step-00000500/
        weights.safetensors  exp_avg.safetensors  exp_avg_sq.safetensors     float32, by name: 12 bytes per parameter
        state.json                                                           see `State`
        config.json  tokenizer/                                              the model's: a checkpoint needs nothing beside it
    checkpoints/latest                                                       the name of the newest complete one

A checkpoint is written under a temporary name and renamed when complete; so is `latest`. Nothing is unpickled.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from command_line import Failure
from data_prep.rows import TOKENIZER
from pipeline.engine.deepspeed_engine import Engine
from pipeline.engine.zero_partitions import STATES
from pipeline.model import read_config, write_config
from pipeline.ranks import Agreement

LATEST = "latest"
KEPT = ".keep"  # marks a checkpoint that `retain` never removes


@dataclass(frozen=True)
class State:
    """Where a run stands: all that a resume needs besides the tensors."""

    phase: str
    step: int = 0  # finished steps of the phase
    tokens: int = 0  # trained tokens of the phase
    rows_digest: str = ""  # of the rows that the phase trains on
    positions: dict[str, int] = field(default_factory=dict)  # of the next row in each stream, by its rows' digest
    adam_step: int = 0
    skipped: int = 0  # steps of the phase whose gradient was not finite
    history: list[dict[str, Any]] = field(default_factory=list)  # the phases so far, this one last, for the lineage
    facts: dict[str, Any] = field(
        default_factory=dict
    )  # of the run, for the lineage: counts, digests, hyper-parameters

    @property
    def lineage(self) -> dict[str, Any]:
        """What the export says about the origin of the weights."""
        return {**self.facts, "phases": self.history}

    @property
    def position(self) -> int:
        """Position of the next row in the phase's stream."""
        return self.positions.get(self.rows_digest, 0)

    def after(self, tokens: int, rows: int, applied: bool) -> "State":
        """Returns the state after a step of `tokens` tokens and `rows` positions; `applied`: the weights moved."""
        return replace(
            self,
            step=self.step + 1,
            tokens=self.tokens + tokens,
            positions={**self.positions, self.rows_digest: self.position + rows},
            adam_step=self.adam_step + applied,
            skipped=self.skipped + (not applied),
        )


def write_aside(path: Path, text: str) -> None:
    """Write a small file so that it is there whole or not at all."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(aside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def save(folder: Path, engine: Engine, state: State, tokenizer: Path, agreement: Agreement, keep: bool = False) -> Path:
    """Save to folder/step-NNNNNNNN on rank 0 and point `latest` to it; `keep`: never remove it. A collective call.

    Raises a Failure on all ranks where it cannot be written; earlier checkpoints are untouched.
    """
    final = folder / f"step-{state.step:08d}"
    aside = folder / f".{final.name}.tmp"
    leads = agreement.ranks.leads

    def begin() -> None:
        if leads:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            shutil.copytree(tokenizer, aside / TOKENIZER)
            write_config(engine.encoder.config, aside)

    def finish() -> None:
        if leads:
            write_aside(aside / "state.json", json.dumps(asdict(state), indent=2) + "\n")
            if keep:
                (aside / KEPT).touch()
            if final.exists():
                shutil.rmtree(final)
            aside.rename(final)
            _sync(folder)
            write_aside(folder / LATEST, final.name + "\n")

    _written(begin, folder, agreement)
    for name in ("weights", *STATES):
        tensors = {
            key: tensor for key, tensor in engine.tensors(name) if leads
        }  # every rank takes part in gathering each tensor
        _written(partial(_save_tensors, aside / f"{name}.safetensors", tensors), folder, agreement)
    _written(finish, folder, agreement)
    return final


def _sync(folder: Path) -> None:
    """Make a rename outlast a crash of the machine."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    if tensors:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def _written(work: Callable[[], None], folder: Path, agreement: Agreement) -> None:
    def explained() -> None:
        try:
            work()
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or "the disk is full or not writable"
            raise Failure(
                f"the checkpoint in {folder} cannot be written: {reason}; the one before it is intact"
            ) from None

    agreement.together(explained)


def retain(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the newest `keep` and those kept for good, and remove what an interrupted save left."""
    for path in sorted(folder.glob("step-*"))[:-keep]:
        if not (path / KEPT).exists():
            shutil.rmtree(path)
    for path in folder.glob(".step-*.tmp"):
        shutil.rmtree(path)


class Checkpoint:
    """A complete checkpoint on disk, opened for reading."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.state = State(**json.loads((folder / "state.json").read_bytes()))
            self._files = {n: safe_open(folder / f"{n}.safetensors", framework="pt") for n in ("weights", *STATES)}
        except (OSError, ValueError, TypeError, SafetensorError) as error:
            raise Failure(f"checkpoint {folder} cannot be read ({type(error).__name__}): is it complete?") from None
        self.config = read_config(folder)

    def names(self) -> list[str]:
        return list(self._files["weights"].keys())

    def tensor(self, file: str, name: str) -> Tensor:
        """Returns the tensor `name` of `file`: "weights", "exp_avg" or "exp_avg_sq"."""
        try:
            tensor: Tensor = self._files[file].get_tensor(name)
            return tensor
        except SafetensorError:
            raise Failure(
                f"checkpoint {self.folder} has no {name} in {file}.safetensors: it is another model's"
            ) from None


def latest(folder: Path) -> Checkpoint | None:
    """Returns the newest complete checkpoint of a phase's `checkpoints` folder, or None where there is none yet."""
    try:
        name = (folder / LATEST).read_text().strip()
    except FileNotFoundError:
        return None
    if name != os.path.basename(name) or not (folder / name).is_dir():
        raise Failure(f"{folder / LATEST} names a checkpoint that is not there; write the name of one that is into it")
    return Checkpoint(folder / name)
