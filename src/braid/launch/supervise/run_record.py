"""Creates the directory of a run and writes `run.json`, the record of the run."""

from __future__ import annotations

import platform
import secrets
import subprocess
from contextlib import suppress
from datetime import datetime
from importlib import metadata
from itertools import count
from pathlib import Path

import msgspec

from braid.errors import ConfigError
from braid.launch.process.job import JobSpec
from braid.runtime.diagnose.run_record import RunRecord

__all__ = ["git_commit", "make_log_dir", "new_log_dir", "package_versions", "write_record"]

GIT_LIMIT_S = 2.0
# files of one run beside run.json; what belongs to a training over several runs is not among them
OF_RUN = (
    "rank*.log",
    "metrics",
    "events",
    "stacks",
    "hang-*.txt",
    "report.html",
    "compare.html",
    "trace.json*",
    "chaos.*",
)
PACKAGES = (
    "torch",
    "numpy",
    "transformers",
    "accelerate",
    "lightning",
    "timm",
    "datasets",
)


def make_log_dir(job: JobSpec) -> str:
    """Create the run's directory and return its name as the user would write it.

    Raises:
        ConfigError: The directory cannot be created.
    """
    name = job.log_dir or new_log_dir()
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
        _set_aside(Path(name))
        (Path(name) / "run.json").write_bytes(b"")
    except OSError as exc:
        msg = f"cannot write logs to {name}: {exc.strerror}; choose another --log-dir"
        raise ConfigError(msg) from exc
    return name


def new_log_dir(prefix: str = "") -> str:
    """Return a new name for the directory of a run below ./runs; it begins with `prefix`."""
    today = datetime.now().astimezone().date()
    while True:
        name = f"./runs/{prefix}{today.isoformat()}_{secrets.token_hex(2)[:3]}"
        if not Path(name).exists():
            return name


def _set_aside(log_dir: Path) -> None:
    """Move the files of an earlier run in this directory to a subdirectory of it.

    `run.json` is moved last: if this is interrupted, the next run moves the remaining files to the
    same place. Checkpoints and files that the program has written stay where they are.
    """
    record = log_dir / "run.json"
    if not record.exists() or not record.stat().st_size:
        return
    number = next(n for n in count(1) if not (log_dir / f"earlier-{n}" / "run.json").exists())
    aside = log_dir / f"earlier-{number}"
    aside.mkdir(exist_ok=True)
    for pattern in (*OF_RUN, record.name):
        for path in log_dir.glob(pattern):
            path.rename(aside / path.name)


def write_record(log_dir: Path, record: RunRecord) -> None:
    """Write `run.json` atomically.

    Raises:
        OSError: The directory cannot be written.
    """
    text = msgspec.json.format(msgspec.json.encode(record), indent=2)
    part = log_dir / "run.json.part"
    part.write_bytes(text + b"\n")
    part.replace(log_dir / "run.json")


def git_commit() -> str:
    """Return the commit of the working directory, with `+changes` if files differ from it.

    Empty outside of a repository, or where git is missing or slow.
    """
    command = ["git", "--no-optional-locks", "status", "--porcelain=v2", "--branch", "-uno"]
    try:
        status = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_LIMIT_S, check=False
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    lines = status.stdout.splitlines()
    commit = next((line.split()[2] for line in lines if line.startswith("# branch.oid ")), "")
    if status.returncode or not commit or commit == "(initial)":
        return ""
    changed = any(not line.startswith("#") for line in lines)
    return commit + "+changes" * changed


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of those packages of `PACKAGES` that are installed."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
