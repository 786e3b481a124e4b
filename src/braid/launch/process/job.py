"""What to run and what came of it.

`JobSpec` holds everything that can be said before the start, and `check_command` finds what can be
found wrong before anything is started: a missing script and a syntax error are one message on one
line, not one per rank and a log file.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from shutil import which
from typing import Literal

import psutil

from braid.diagnose import RankEnd, StopReport, error_block, render_block
from braid.errors import ConfigError
from braid.rendezvous import JobEnvironment

__all__ = [
    "JobSpec",
    "Outcome",
    "check_command",
    "choose_threads",
    "command_line",
    "inherited",
]

MAX_RANKS = 4096  # of one host; more is a slip of the finger
OUTER = ("BRAID_RESUME", "TORCHELASTIC_")  # what only a run around this one was told


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """One run.

    Attributes:
        command: The script, module or program, followed by its own arguments.
        num_ranks: Number of processes.
        kind: What `command[0]` is: a Python `script`, a Python `module`, or any `program`.
        log_dir: Where logs, events and the record of the run go; `./runs/<date>_<hex>` when None.
        port: `MASTER_PORT` for torch.distributed; a free one when None.
        timeout_s: Longest duration of the run; None for no limit.
        threads: OMP_NUM_THREADS of each rank; when None, the user's own or physical cores / ranks.
        stopped_limit_s: How long a rank may be stopped (SIGSTOP) before it is given up.
        hang_report_s: How long ranks may wait for one that does not come before it is reported; 0
        for never.
        grace_s: After a failure, how long the other ranks may end by themselves.
        interrupt_limit_s: After Ctrl-C or SIGTERM, how long all ranks may save and end.
        resume: Checkpoint that ranks shall resume from; `auto` for the last complete one.
        where: Options that say on which hosts and how many ranks; `-n` alone when empty.
        resume_command: What the user types to go on from a checkpoint; `braid run` with this job
        when empty.
        environ: Environment that ranks inherit.
    """

    command: tuple[str, ...]
    num_ranks: int = 1
    kind: Literal["script", "module", "program"] = "script"
    log_dir: str | None = None
    port: int | None = None
    timeout_s: float | None = None
    threads: int | None = None
    stopped_limit_s: float = 30.0
    hang_report_s: float = 10.0
    grace_s: float = 5.0
    interrupt_limit_s: float = 30.0
    resume: str = ""
    where: tuple[str, ...] = ()
    resume_command: str = ""
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)

    def __post_init__(self) -> None:
        problems = []
        if not self.command or not self.command[0]:
            problems.append("nothing to run: give a script, `-m module`, or `--no-python program`")
        if not 1 <= self.num_ranks <= MAX_RANKS:
            problems.append(f"the number of ranks is {self.num_ranks}, expected 1 to {MAX_RANKS}")
        if self.port is not None and not 1 <= self.port <= 65535:
            problems.append(f"port is {self.port}, expected 1 to 65535 or auto")
        if self.threads is not None and self.threads < 1:
            problems.append(f"threads is {self.threads}, expected at least 1")
        if self.timeout_s is not None and self.timeout_s <= 0:
            problems.append(f"timeout is {self.timeout_s:g} s, expected more than 0")
        limits = ("stopped_limit_s", "hang_report_s", "grace_s", "interrupt_limit_s")
        problems += [
            f"{name} is {getattr(self, name):g}, expected 0 or more"
            for name in limits
            if not getattr(self, name) >= 0
        ]
        if problems:
            raise ConfigError("; ".join(problems))


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome(StopReport):
    """How a run ended; printed, it is the error block."""

    @property
    def cause(self) -> tuple[RankEnd, ...]:
        """The ranks that the run failed because of."""
        return self.verdict.cause

    @property
    def affected(self) -> tuple[RankEnd, ...]:
        """All other ranks."""
        return self.verdict.affected

    def __str__(self) -> str:
        return render_block(error_block(self))


def command_line(job: JobSpec) -> list[str]:
    """Program and arguments of every rank."""
    if job.kind == "program":
        return [
            which(job.command[0], path=job.environ.get("PATH")) or job.command[0],
            *job.command[1:],
        ]
    return [sys.executable, *(["-m"] if job.kind == "module" else []), *job.command]


def check_command(job: JobSpec) -> None:
    """Refuse what cannot run.

    Raises:
        ConfigError: The script is missing, a directory, unreadable or no Python; the module is not
            found; the program is missing or not executable.
    """
    name = job.command[0]
    if job.kind == "script":
        _check_script(Path(name))
    elif job.kind == "module":
        _check_module(name, job.environ)
    elif which(name, path=job.environ.get("PATH")) is None:
        found = f"none named {name}: give its path, or see PATH"
        if Path(name).is_file():
            found = f"that {name} is not executable: chmod +x it"
        msg = f"expected a program to run, found {found}"
        raise ConfigError(msg)


def choose_threads(job: JobSpec) -> tuple[str, str]:
    """OMP_NUM_THREADS of each rank, and the reason."""
    if job.threads is not None:
        return str(job.threads), "as told"
    own = job.environ.get("OMP_NUM_THREADS")
    if own:
        return own, "from the environment"
    usable = len(psutil.Process().cpu_affinity()) if sys.platform == "linux" else MAX_RANKS
    cores = min(usable, psutil.cpu_count(logical=False) or usable)
    return str(max(1, cores // job.num_ranks)), f"cores / ranks = {cores} / {job.num_ranks}"


def inherited(environ: Mapping[str, str], told: JobEnvironment, threads: str) -> dict[str, str]:
    """The environment of a rank.

    Args:
        environ: That of whoever starts it.
        told: What it is told.
        threads: Its OMP_NUM_THREADS.
    """
    return {
        **{name: value for name, value in environ.items() if not name.startswith(OUTER)},
        **told.to_environ(),
        "OMP_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
        "BRAID_LAUNCHER_PID": str(os.getpid()),
    }


def _check_script(script: Path) -> None:
    try:
        source = script.read_bytes()
    except IsADirectoryError as exc:
        msg = f"expected a Python script, found the directory {script}: name a file in it"
        raise ConfigError(msg) from exc
    except OSError as exc:
        msg = f"expected a Python script, found that {script} cannot be read: {exc.strerror}"
        raise ConfigError(msg) from exc
    if source[:2] == b"PK":  # a zip archive with __main__.py, which Python runs as well
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each rank will show them
            compile(source, str(script), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as exc:
        where = f"{script.name}:{getattr(exc, 'lineno', None) or 1}"
        text = (getattr(exc, "text", None) or "").strip()
        msg = f"{script} is no valid Python: {getattr(exc, 'msg', exc)}      {where}"
        raise ConfigError(f"{msg}\n{text}" if text else msg) from exc


def _check_module(name: str, environ: Mapping[str, str]) -> None:
    """Look for the top package only: looking deeper would import it into the launcher."""
    top = name.partition(".")[0]
    paths = [str(Path.cwd()), *environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    if top in sys.builtin_module_names or PathFinder.find_spec(top, paths) is not None:
        return
    msg = f"expected a Python module, found none named {top!r}: is it installed in {sys.prefix}?"
    raise ConfigError(msg)
