"""Creates the directory of a run and writes `run.json`, the record of the run."""

from __future__ import annotations

import secrets
from datetime import datetime
from pathlib import Path

import msgspec

from braid.diagnose import RunRecord
from braid.errors import ConfigError
from braid.launch.process.job import JobSpec

__all__ = ["make_log_dir", "write_record"]


def make_log_dir(job: JobSpec) -> str:
    """Create the run's directory and return its name as the user would write it.

    Raises:
        ConfigError: The directory cannot be created.
    """
    today = datetime.now().astimezone().date()
    name = job.log_dir or f"./runs/{today.isoformat()}_{secrets.token_hex(2)[:3]}"
    try:
        while not job.log_dir and Path(name).exists():
            name = f"./runs/{today.isoformat()}_{secrets.token_hex(2)[:3]}"
        Path(name).mkdir(parents=True, exist_ok=True)
        (Path(name) / "run.json").write_bytes(b"")
    except OSError as exc:
        msg = f"cannot write logs to {name}: {exc.strerror}; choose another --log-dir"
        raise ConfigError(msg) from exc
    return name


def write_record(log_dir: Path, record: RunRecord) -> None:
    """Write `run.json` atomically.

    Raises:
        OSError: The directory cannot be written.
    """
    text = msgspec.json.format(msgspec.json.encode(record), indent=2)
    part = log_dir / "run.json.part"
    part.write_bytes(text + b"\n")
    part.replace(log_dir / "run.json")
