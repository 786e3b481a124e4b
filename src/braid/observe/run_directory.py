"""The directory that a run left, read without trust: a run may have been killed while it wrote, or still be going on.

What makes the directory a run is `run.json`. Everything else is optional, and what cannot be read
is left out and said: a torn ring of one rank is no reason to hide what the other seven recorded.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from braid._version import __version__
from braid.diagnose import RunRecord
from braid.errors import ConfigError
from braid.events import HEADER_BYTES, EventRing

__all__ = ["LogTail", "Run", "read_run"]

TAIL_LINES = 20
TAIL_BYTES = 16 << 10
TERMINAL_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class LogTail:
    """The last lines of a rank's log."""

    rank: int
    text: str
    shortened: bool


class _Metrics(NamedTuple):
    rows: list[dict[str, float]]
    about: dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as it is on disk.

    Attributes:
        path: Its directory.
        record: What the launcher wrote about it.
        rings: Events of the ranks that have some.
        metrics: One mapping for each step that rank 0 reported, by step; numbers only.
        about: What the metrics begin with: model, data and so on; may be empty.
        logs: Ends of the ranks' logs, by rank.
        notices: What could not be read, in words.
    """

    path: Path
    record: RunRecord
    rings: tuple[EventRing, ...] = ()
    metrics: tuple[Mapping[str, float], ...] = ()
    about: Mapping[str, object] = field(default_factory=dict)
    logs: tuple[LogTail, ...] = ()
    notices: tuple[str, ...] = ()

    @property
    def command_line(self) -> str:
        """The command as one would type it."""
        kind = {"module": ["-m"], "program": ["--no-python"]}.get(self.record.command_kind, [])
        words = ["braid", "run", "-n", str(self.record.num_ranks), *kind, *self.record.command]
        return shlex.join(words)


def read_run(path: Path) -> Run:
    """Read the directory of a run.

    Raises:
        ConfigError: It is missing, is not the directory of a run, or was written by a newer braid.
    """
    record = _read_record(path)
    notices: list[str] = []
    rings = _each(sorted((path / "events").glob("rank*.ring")), _read_ring, notices)
    metrics = _each(sorted(path.glob("*.jsonl")), _read_metrics, notices)
    logs = _each(sorted(path.glob("rank*.log")), _read_tail, notices)
    by_step = sorted((row for file in metrics for row in file.rows), key=lambda row: row["step"])
    return Run(
        path=path,
        record=record,
        rings=tuple(sorted(rings, key=lambda ring: ring.rank)),
        metrics=tuple(by_step),
        about={key: value for file in metrics for key, value in file.about.items()},
        logs=tuple(sorted(logs, key=lambda log: log.rank)),
        notices=tuple(notices),
    )


def _read_record(path: Path) -> RunRecord:
    expected = "expected the directory of a run, such as runs/2026-11-20_a3f"
    try:
        raw = (path / "run.json").read_bytes()
    except FileNotFoundError as exc:
        if not path.exists():
            msg = f"{expected}, found nothing at {path}"
        elif not any(path.iterdir()):
            msg = f"{expected}, found that {path} is empty"
        else:
            msg = f"{expected}, found no run.json in {path}"
        raise ConfigError(f"{msg}: `braid run` prints the directory when it starts") from exc
    except OSError as exc:
        msg = f"{expected}, found that {path / 'run.json'} cannot be read: {exc.strerror}"
        raise ConfigError(msg) from exc
    if not raw:
        msg = (
            f"expected a record of the run in {path / 'run.json'}, found it empty: its launcher "
            "could not write it"
        )
        raise ConfigError(msg)
    try:
        version = str(msgspec.json.decode(raw, type=dict[str, object]).get("braid", ""))
        if _major_minor(version) > _major_minor(__version__):
            msg = (
                f"expected a run of braid {__version__} or older in {path}, found braid "
                f"{version}: update braid"
            )
            raise ConfigError(msg)
        return msgspec.json.decode(raw, type=RunRecord)
    except msgspec.MsgspecError as exc:
        msg = (
            f"expected a record of a run in {path / 'run.json'}, found: {exc}; is it a run of "
            "braid?"
        )
        raise ConfigError(msg) from exc


def _each(paths: list[Path], read: Callable[[Path], T | None], notices: list[str]) -> list[T]:
    found = []
    for path in paths:
        try:
            value = read(path)
        except OSError as exc:
            notices.append(f"{path.name} is left out: {exc.strerror}")
        except ConfigError as exc:
            notices.append(f"{path.name} is left out: {exc}")
        else:
            if value is not None:
                found.append(value)
    return found


def _read_ring(path: Path) -> EventRing:
    raw = path.read_bytes()
    if len(raw) < HEADER_BYTES:
        msg = f"expected an event ring, found {len(raw)} bytes, less than its header"
        raise ConfigError(msg)
    ring = EventRing(raw)
    expected = EventRing.nbytes_for(ring.capacity)
    if len(raw) < expected:
        msg = (
            f"expected {expected:,} bytes for {ring.capacity:,} records, found {len(raw):,}: it "
            "was not "
            "written to the end"
        )
        raise ConfigError(msg)
    try:
        for event in ring.tail():
            ring.name(event.kind)
            ring.name(event.site)
    except (struct.error, ValueError) as exc:
        msg = f"expected a table of names after the records, found it damaged ({exc})"
        raise ConfigError(msg) from exc
    return ring


def _read_metrics(path: Path) -> _Metrics | None:
    """Rows with a step, and what stands before them; the last line may be torn. None when the file has no such row."""
    rows: list[dict[str, float]] = []
    about: dict[str, object] = {}
    with path.open(errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if not isinstance(row, dict):
                continue
            if isinstance(row.get("step"), int):
                rows.append(
                    {
                        key: math.nan if value is None else float(value)
                        for key, value in row.items()
                        if value is None or isinstance(value, (int, float))
                    }
                )
            elif not rows:
                about |= row
    return _Metrics(rows, about) if rows else None


def _read_tail(path: Path) -> LogTail | None:
    number = path.stem.removeprefix("rank")
    if not number.isdecimal():
        return None
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    lines = [
        TERMINAL_SEQUENCE.sub("", line.rstrip("\r\n").rpartition("\r")[2])
        for line in text.split("\n")
    ]
    while lines and not lines[-1]:
        lines.pop()
    shortened = size > TAIL_BYTES or len(lines) > TAIL_LINES
    return LogTail(rank=int(number), text="\n".join(lines[-TAIL_LINES:]), shortened=shortened)


def _major_minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
