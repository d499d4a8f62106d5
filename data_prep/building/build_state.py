"""The state of a build, on disk or in the bucket: what is to do, what is done, and the rows until they are complete.

    .rows.build/            beside a local OUT "rows", or OUT/_build of a URL; removed when the rows are in place
        plan.json           options, slices and sizes of the files; no names of files
        tokenizer/          for `finish`, whose command line names none
        units/KEY-000003    tokenised documents, see `tokenised_unit`
        slices/KEY.json     a slice that is done: the number of its units, digests of its files
        digests/KEY         sha256 of a file that is read in shares
        rows/               the rows, until they are complete (local only)

A key is a digest of everything that decides the content: the options, and the place, size, time of change and share of the file.
So a file that changes gets other keys, and the units of its former content are not used.
"""

import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from command_line import Failure, UsageError
from data_prep.documents import FORMATS, Member, SourceFile
from data_prep.rows import MANIFEST, AtomicFiles, Manifest, empty_place, is_url, put_in_place

PLAN = "plan.json"
REMOTE_STATE = "_build"


class Slice(BaseModel):
    model_config = ConfigDict(extra="forbid")
    key: str
    bytes: int  # of its files, for the progress bar


class Plan(BaseModel):
    model_config = ConfigDict(extra="forbid")
    version: int = 1
    options: dict[str, Any]  # by the name of the command-line option
    tokenizer_name: str
    sizes: list[int]  # bytes of each file
    digests: list[str | None]  # of each file: the key, if it is digested apart from reading
    slices: list[Slice]
    left_out: int


class SliceRecord(BaseModel):
    units: int
    digests: dict[int, str]  # sha256 by the number of the file


def _key(*facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]


def make_plan(
    options: dict[str, Any],
    deciding: dict[str, Any],
    tokenizer_name: str,
    files: list[SourceFile],
    slices: list[list[Member]],
    left_out: int,
) -> Plan:
    """The plan of a build. `deciding` are the options that decide the content of a unit."""
    places = [f.location if is_url(f.location) else os.path.realpath(f.location) for f in files]
    ends = {m.source: m.end for members in slices for m in members if m.end}  # of the last share of each file
    entries = []
    apart: list[str | None] = [
        _key("digest", place, file.version) if FORMATS[file.format].digested_apart else None
        for place, file in zip(places, files, strict=True)
    ]
    for members in slices:
        facts = [(places[m.source], files[m.source].version, m.source, m.begin, m.end) for m in members]
        size = 0
        for member in members:
            file = files[member.source]
            if member.end is not None:
                apart[member.source] = _key("digest", places[member.source], file.version)
            share = 1.0 if member.end is None else (member.end - member.begin) / ends[member.source]
            size += round(file.bytes * share)
        entries.append(Slice(key=_key(deciding, facts), bytes=size))
    return Plan(
        options=options,
        tokenizer_name=tokenizer_name,
        sizes=[file.bytes for file in files],
        digests=apart,
        slices=entries,
        left_out=left_out,
    )


class BuildState:
    """The state of the build that makes `out`, a folder or URL."""

    def __init__(self, out: str) -> None:
        self.out = out
        if is_url(out):
            self.out = out.rstrip("/")
            self.store = AtomicFiles(f"{self.out}/{REMOTE_STATE}")
            self.rows = AtomicFiles(self.out)
            self.shown = self.store.location
        else:
            self.final = Path(os.path.abspath(out))
            self.store = AtomicFiles(str(self.final.parent / f".{self.final.name}.build"))
            self.rows = AtomicFiles(os.path.join(self.store.location, "rows"))
            self.shown = os.path.join(os.path.dirname(out.rstrip("/")), f".{self.final.name}.build")
        self._lock: Any = None

    def finished(self, splits: list[str]) -> list[Manifest] | None:
        """The manifests, if `out` is complete already, else None."""
        place = AtomicFiles(self.out)
        try:
            return [
                Manifest.model_validate_json(place.get(f"{split}/{MANIFEST}" if split else MANIFEST))
                for split in splits
            ]
        except (OSError, ValidationError):
            return None

    def begin(self, plan: Plan, resume: bool, part: tuple[int, int] | None) -> None:
        """Make the state, or take up the one that is there. Raises Failure or UsageError if that is not allowed."""
        there = self.plan()
        if not self.rows.remote:
            empty_place(self.out)
            self.final.parent.mkdir(parents=True, exist_ok=True)
        elif there is None and any(not name.startswith(f"{REMOTE_STATE}/") for name in self.rows.sizes()):
            raise Failure(f"--out {self.out!r} is not empty: nothing is overwritten; remove it or name another place")
        if there is not None:
            if not resume and part is None:
                raise Failure(
                    f"a build of {self.out!r} was interrupted: go on with --resume, or remove {self.shown} to start anew"
                )
            self._agree(there, plan, part)
        if not self.store.remote:
            os.makedirs(self.store.location, mode=0o700, exist_ok=True)
            self.lock(f"lock-{part[0]}" if part else "lock")
        if there == plan:
            return
        try:
            self.store.put(PLAN, plan.model_dump_json().encode())
        except BaseException:
            if there is None:
                self.discard()
            raise

    def _agree(self, there: Plan, plan: Plan, part: tuple[int, int] | None) -> None:
        names = [n for n in plan.options if there.options.get(n) != plan.options[n]]
        if names:
            name = names[0]
            raise UsageError(
                f"--{name} was {there.options.get(name)!r} when the build of {self.out!r} began and is {plan.options[name]!r} now:"
                f" give what it was, or remove {self.shown} to start anew"
            )
        if part and there != plan:
            raise Failure(
                f"the input is not what it was when the first part of {self.out!r} began: the parts would not belong together;"
                f" remove {self.shown} to start anew"
            )

    def lock(self, name: str = "lock") -> None:
        """Keep other processes from this build, or from this part of it. Raises Failure if one is at work."""
        self._lock = open(os.path.join(self.store.location, name), "w")  # noqa: SIM115, open until the process ends
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Failure(f"another process is building {self.out!r}: wait for it, or end it") from None
        except OSError:  # a file system without locks
            pass

    def plan(self) -> Plan | None:
        """The plan of an unfinished build, or None if there is none."""
        try:
            return Plan.model_validate_json(self.store.get(PLAN))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Failure(f"{self.out}: {error.strerror or type(error).__name__}") from None
        except ValidationError:
            raise Failure(f"{self.shown} is of another version: remove it to start anew") from None

    def finished_units(self, plan: Plan) -> tuple[list[str], list[str]]:
        """The names of all units, in order, and the sha256 of each file. Raises Failure if something is not done."""
        stored = self.store.sizes()
        missing = [n for n, part in enumerate(plan.slices) if f"slices/{part.key}.json" not in stored]
        lost = [n for n, key in enumerate(plan.digests) if key and f"digests/{key}" not in stored]
        if missing or lost:
            first = (missing or lost)[0]
            raise Failure(
                f"{len(missing) or len(lost)} of {len(plan.slices)} slices of {self.out!r} are not done, the first of them {first}: "
                f"run the missing parts (with n parts it belongs to part {first} mod n + 1), then `finish` again"
            )
        names: list[str] = []
        digests = [self.store.get(f"digests/{key}").decode() if key else "" for key in plan.digests]
        for part in plan.slices:
            record = SliceRecord.model_validate_json(self.store.get(f"slices/{part.key}.json"))
            names += [f"units/{part.key}-{number:06}" for number in range(record.units)]
            for source, digest in record.digests.items():
                digests[source] = digests[source] or digest
        return names, digests

    def publish(self, written: set[str]) -> None:
        """Put the rows in place and remove the state. `written` are the names of their files."""
        found = self.rows.sizes(partial=True)  # an earlier attempt that was killed may have left more
        self.rows.remove([name for name in found if name not in written and not name.startswith(f"{REMOTE_STATE}/")])
        if not self.rows.remote:
            put_in_place(Path(self.rows.location), self.final, self.out)
        self.discard()

    def discard(self) -> None:
        self.store.remove_all()
        if self._lock is not None:
            self._lock.close()
            self._lock = None
