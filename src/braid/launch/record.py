"""The directory of a run: where it is, and the file that says what the run was."""

from __future__ import annotations

import secrets
from datetime import datetime
from pathlib import Path

import msgspec

from braid.diagnose import describe
from braid.errors import ConfigError
from braid.launch.job import JobSpec, Outcome

__all__ = ["RankRecord", "RunRecord", "make_log_dir", "write_record"]


class RankRecord(msgspec.Struct, frozen=True):
    """How a rank ended."""

    rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    ending: str
    reason: str
    where: str
    testimony: str
    details: tuple[str, ...] = ()


class RunRecord(msgspec.Struct, frozen=True):
    """What `run.json` holds; `kind` is empty while the run lasts, or if its launcher was killed."""

    braid: str
    run_id: str
    command: tuple[str, ...]
    command_kind: str
    num_ranks: int
    started: str
    threads: str
    kind: str = ""
    exit_code: int | None = None
    elapsed_s: float = 0.0
    step: int | None = None
    guilty: tuple[int, ...] = ()
    certain: bool = True
    saved_step: int | None = None
    ranks: tuple[RankRecord, ...] = ()


def make_log_dir(job: JobSpec) -> str:
    """Make the run's directory, and return its name as the user would write it.

    Raises:
        ConfigError: It cannot be made.
    """
    today = datetime.now().astimezone().date()
    name = job.log_dir or f"./runs/{today.isoformat()}_{secrets.token_hex(2)[:3]}"
    try:
        while not job.log_dir and Path(name).exists():
            name = f"./runs/{today.isoformat()}_{secrets.token_hex(2)[:3]}"
        Path(name).mkdir(parents=True, exist_ok=True)
        (Path(name) / "run.json").write_bytes(b"")
    except OSError as exc:
        msg = f"expected to write logs to {name}, found: {exc.strerror}; choose another --log-dir"
        raise ConfigError(msg) from exc
    return name


def write_record(log_dir: Path, record: RunRecord, outcome: Outcome | None = None) -> None:
    """Write `run.json`, whole or not at all.

    Raises:
        OSError: The directory cannot be written.
    """
    if outcome is not None:
        record = msgspec.structs.replace(
            record,
            kind=outcome.verdict.kind,
            exit_code=outcome.exit_code,
            elapsed_s=round(outcome.elapsed_s, 3),
            step=outcome.step,
            guilty=tuple(end.rank for end in outcome.guilty),
            certain=outcome.verdict.certain,
            saved_step=outcome.saved.step if outcome.saved else None,
            ranks=_rank_records(outcome),
        )
    text = msgspec.json.format(msgspec.json.encode(record), indent=2)
    part = log_dir / "run.json.part"
    part.write_bytes(text + b"\n")
    part.replace(log_dir / "run.json")


def _rank_records(outcome: Outcome) -> tuple[RankRecord, ...]:
    ends = sorted((*outcome.guilty, *outcome.others), key=lambda end: end.rank)
    return tuple(
        RankRecord(
            rank=end.rank,
            pid=end.pid,
            exit_code=end.exit_code,
            signal=end.signal,
            ending=end.ending.value,
            reason=describe(end) if end.exit_code != 0 or end in outcome.guilty else "finished",
            where=end.error.where if end.error else "",
            testimony=end.testimony,
            details=end.error.details if end.error else (),
        )
        for end in ends
    )
