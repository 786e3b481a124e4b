"""`braid train`: check, start the ranks, draw what they say, and say how to go on."""

from __future__ import annotations

import os
import secrets
import shlex
from datetime import datetime
from pathlib import Path

from rich.console import Console

from braid.checkpoint import ls
from braid.data import from_files
from braid.errors import ConfigError
from braid.launch import JobSpec, Outcome, Supervisor
from braid.train.config import TrainConfig
from braid.train.progress import TrainConsole

__all__ = ["choose_log_dir", "last_run", "launch", "train"]

WORKER = "braid.train.worker"


def train(
    config: TrainConfig,
    *,
    num_ranks: int,
    out: Console,
    resume: str = "",
    threads: int | None = None,
) -> Outcome:
    """Train on ranks of this host, showing progress.

    Args:
        config: What to do.
        num_ranks: Number of ranks.
        out: Where progress is drawn.
        resume: A checkpoint, a directory of them, a run, or auto: the last complete one of the log
            directory.
        threads: Threads of each rank.

    Returns:
        What came of it; printed, it is the error block, whose resume line is a `braid train`
        command.

    Raises:
        ConfigError: It cannot work; nothing was started.
    """
    with TrainConsole(out) as console:
        return launch(config, num_ranks=num_ranks, console=console, resume=resume, threads=threads)


def launch(
    config: TrainConfig,
    *,
    num_ranks: int,
    console: TrainConsole,
    resume: str = "",
    threads: int | None = None,
) -> Outcome:
    """Check a training and run it to its end; the console gets what it says.

    Raises:
        ConfigError: It cannot work; nothing was started.
    """
    config.check_ranks(num_ranks)
    if config.data:
        from_files(config.data)
    if resume and resume != "auto" and not Path(resume).is_dir():
        msg = f"there is no checkpoint and no directory of a run at {resume} to resume from"
        raise ConfigError(msg)
    job = JobSpec(
        command=(WORKER, config.to_json()),
        kind="module",
        num_ranks=num_ranks,
        log_dir=config.log_dir,
        threads=threads,
        resume=resume,
        resume_command=_resume_line(config, num_ranks, threads),
    )
    return Supervisor(console).run(job)


def choose_log_dir(resume: str, prefix: str = "") -> str:
    """Directory of a run that was not given one: that of the last run to continue, else a new one below ./runs."""
    if resume == "auto" and (found := last_run(Path("runs"))):
        return found
    today = datetime.now().astimezone().date().isoformat()
    while True:
        name = f"./runs/{prefix}{today}_{secrets.token_hex(2)[:3]}"
        if not Path(name).exists():
            return name


def last_run(runs: Path) -> str:
    """The run whose checkpoint is the latest; empty when there is none."""
    found: list[tuple[float, str]] = []
    for directory in runs.glob("*/checkpoints"):
        complete = [line.path for line in ls(directory) if not line.problem]
        if complete:
            found.append((Path(complete[-1]).stat().st_mtime, str(directory.parent)))
    return f".{os.sep}{max(found)[1]}" if found else ""


def _resume_line(config: TrainConfig, num_ranks: int, threads: int | None) -> str:
    """The command that goes on from the last checkpoint; options that have their default are left out."""
    words = ["braid", "train", "--resume", "auto", "-n", str(num_ranks)]
    default = TrainConfig()
    for name in TrainConfig.__dataclass_fields__:
        value = getattr(config, name)
        if value == getattr(default, name) and name != "log_dir":
            continue
        words.append(f"--{name.replace('_', '-')}")
        words += [str(v) for v in value] if isinstance(value, tuple) else [str(value)]
    if threads is not None:
        words += ["--threads", str(threads)]
    return shlex.join(words)
