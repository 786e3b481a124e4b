"""Specification of a job, checks before its start, and its outcome.

`check_command` detects a missing script or a syntax error before any process is started. The user
then reads one message instead of one traceback per rank.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path
from shutil import which
from typing import Annotated, Literal

import psutil

from braid.errors import ConfigError, below, raise_all
from braid.runtime.diagnose.block import StopReport, error_block, render_block
from braid.runtime.diagnose.verdict import RankEnd
from braid.runtime.option_display import shown_as
from braid.runtime.rendezvous import JobEnvironment

__all__ = [
    "RANK_VARIABLES",
    "RESUME",
    "ElasticLimits",
    "JobSpec",
    "Outcome",
    "RunOptions",
    "check_command",
    "choose_threads",
    "command_line",
    "rank_environ",
]

MAX_RANKS = 4096  # on one host; a larger number is a typing error
# further variables of ranks, each with the variable of torchrun that it is a copy of:
# "A=RANK B=WORLD_SIZE"; HOSTNAME stands for the name of the rank's host
RANK_VARIABLES = "BRAID_RANK_VARIABLES"
RESUME = "{resume}"  # in the command that resumes
OUTER = ("BRAID_RESUME", "TORCHELASTIC_")  # variables of an enclosing run
# Defaults for ranks: torch requests huge pages, and glibc keeps freed memory for the next step, so
# that the kernel need not clear new pages. One of glibc's thresholds alone would be slower.
MEMORY_VARIABLES = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # to which glibc would raise it by itself
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticLimits:
    """Limits of a run that continues when ranks are lost; see `supervise.membership_state`.

    Ranks with roles, such as servers and workers, have no epochs: a new process takes the role of a
    lost one while the others go on.

    Attributes:
        min_ranks: Minimum number of ranks with which the run continues.
        max_ranks: Maximum number of ranks that train; 0 for the initial number.
        spares: Number of additional ranks that wait until one is lost.
        restarts: Number of processes that are started to replace lost ones.
        gains_slots: Whether more ranks may join for other reasons; see `supervise.slots`.
    """

    min_ranks: int
    max_ranks: int = 0
    spares: int = 0
    restarts: int = 3
    gains_slots: bool = False

    def __post_init__(self) -> None:
        problems = below(1, min_ranks=self.min_ranks)
        problems += below(0, max_ranks=self.max_ranks, spares=self.spares, restarts=self.restarts)
        if 0 < self.max_ranks < self.min_ranks:
            problems.append(
                f"--min-ranks {self.min_ranks} is more than --max-ranks {self.max_ranks}: lower "
                "--min-ranks, or raise --max-ranks"
            )
        raise_all(problems)

    def with_ranks(self, num_ranks: int) -> ElasticLimits:
        """Return the limits of a run that begins with `num_ranks` ranks.

        Raises:
            ConfigError: The number is outside of the limits.
        """
        max_ranks = self.max_ranks or num_ranks
        if not self.min_ranks <= num_ranks <= max_ranks:
            least, most = f"{self.min_ranks} (--min-ranks)", f"{max_ranks} (--max-ranks)"
            limits = f"{least} to {most}" if self.max_ranks else f"at least {least}"
            msg = (
                f"the number of ranks must be {limits}, got {num_ranks}: change -n, the slots of "
                "the hosts, or a limit"
            )
            raise ConfigError(msg)
        return replace(self, max_ranks=max_ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """Options of `braid run` that a job takes as they are.

    Attributes:
        log_dir: Directory for logs, events and the record of the run (default:
            ./runs/<date>_<hex>).
        timeout_s: Longest duration of the run, in seconds; then programs that called braid.init()
            give their stacks.
        threads: OMP_NUM_THREADS of each rank (default: your own, or physical cores / N).
        stopped_limit_s: Seconds that a rank may be stopped (SIGSTOP) before it is killed (default:
            30; 0.5, with its earlier stops, if running members of an elastic run wait for it).
        hang_report_s: Seconds that ranks may wait for another rank before it is reported; 0 for
            never.
        grace_s: Seconds that the other ranks have to end by themselves after a failure.
        resume: Checkpoint to resume from; auto for the last complete one.
        stdin_rank: Rank that reads the standard input, for breakpoint() and input(): it has the
            terminal, and hang reports and deadlines of collectives wait.
    """

    log_dir: Annotated[str | None, shown_as("DIR")] = None
    timeout_s: Annotated[float | None, shown_as("FLOAT", name="timeout")] = None
    threads: Annotated[int | None, shown_as("INT")] = None
    stopped_limit_s: Annotated[float | None, shown_as("FLOAT", name="stopped-limit")] = None
    hang_report_s: Annotated[float, shown_as(None, name="hang-report")] = 10.0
    grace_s: Annotated[float, shown_as(None, name="grace")] = 5.0
    resume: Annotated[str, shown_as("PATH")] = ""
    stdin_rank: Annotated[int | None, shown_as("RANK", name="stdin")] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec(RunOptions):
    """Specification of one run; see `RunOptions` for its further fields.

    Attributes:
        command: Script, module or program, followed by its own arguments.
        num_ranks: Number of processes.
        kind: Kind of `command[0]`: a Python `script`, a Python `module`, or any `program`.
        port: `MASTER_PORT` for torch.distributed; a free port when None.
        interrupt_limit_s: Seconds that ranks have to save and end after Ctrl-C or SIGTERM.
        where: Command-line options for hosts and numbers of ranks; `-n` alone when empty.
        resume_command: Words of the command that resumes from a checkpoint, with `RESUME` in the
            place of the checkpoint; `braid run` with this job when empty.
        title: Command line that a user would type, where `command` is internal.
        environ: Environment that ranks inherit.
        expendable: Ranks without which the others can go on, such as servers that have replicas.
        needed: Sets of expendable ranks; the death of the last one of a set fails the run.
        elastic: Limits of an elastic run, with members that may change; None if they are fixed.
    """

    command: tuple[str, ...]
    num_ranks: int = 1
    kind: Literal["script", "module", "program"] = "script"
    port: int | None = None
    interrupt_limit_s: float = 30.0
    where: tuple[str, ...] = ()
    resume_command: tuple[str, ...] = ()
    title: str = ""
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)
    expendable: frozenset[int] = frozenset()
    needed: tuple[frozenset[int], ...] = ()
    elastic: ElasticLimits | None = None

    def __post_init__(self) -> None:
        problems = []
        if not self.command or not self.command[0]:
            problems.append(
                "there is no program to run: give a script, `-m module`, or `--no-python program`"
            )
        if not 1 <= self.num_ranks <= MAX_RANKS:
            problems.append(f"number of ranks must be 1 to {MAX_RANKS}, got {self.num_ranks}")
        if self.port is not None and not 1 <= self.port <= 65535:
            problems.append(f"port must be 1 to 65535 or auto, got {self.port}")
        problems += below(1, threads=self.threads) if self.threads is not None else []
        if self.timeout_s is not None and self.timeout_s <= 0:
            problems.append(f"timeout must be more than 0 s, got {self.timeout_s:g} s")
        if self.stdin_rank is not None and not 0 <= self.stdin_rank < self.num_ranks:
            problems.append(
                f"the rank of --stdin must be 0 to {self.num_ranks - 1}, got {self.stdin_rank}"
            )
        limits = ("stopped_limit_s", "hang_report_s", "grace_s", "interrupt_limit_s")
        problems += [
            f"{name} must be 0 or more, got {getattr(self, name):g}"
            for name in limits
            if not (getattr(self, name) or 0) >= 0
        ]
        raise_all(problems)

    def resume_line(self, checkpoint: str) -> str:
        """Return the command line that resumes this job from a checkpoint; see `resume`."""
        words = self.resume_command
        if not words:
            flag = {"script": (), "module": ("-m",), "program": ("--no-python",)}[self.kind]
            where = self.where or ("-n", str(self.num_ranks))
            place = ("--log-dir", self.log_dir) if self.log_dir else ()
            words = ("braid", "run", "--resume", RESUME, *where, *place, *flag, *self.command)
        return shlex.join(checkpoint if word == RESUME else word for word in words)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome(StopReport):
    """Outcome of a run; its text is the error block."""

    @property
    def cause(self) -> tuple[RankEnd, ...]:
        """Ranks that made the run fail."""
        return self.verdict.cause

    @property
    def affected(self) -> tuple[RankEnd, ...]:
        """Ranks that did not make the run fail."""
        return self.verdict.affected

    def __str__(self) -> str:
        return render_block(error_block(self))


def command_line(job: JobSpec) -> list[str]:
    """Return the program and arguments of every rank."""
    if job.kind == "program":
        return [
            which(job.command[0], path=job.environ.get("PATH")) or job.command[0],
            *job.command[1:],
        ]
    return [sys.executable, *(["-m"] if job.kind == "module" else []), *job.command]


def check_command(job: JobSpec) -> None:
    """Check that the command of a job can run, and that the checkpoint to resume from exists.

    Raises:
        ConfigError: The script is missing, a directory, unreadable or not valid Python; the module
            does not exist; the program is missing or not executable; the checkpoint is missing.
    """
    if job.resume not in {"", "auto"} and not Path(job.resume).exists():
        msg = (
            f"{job.resume} does not exist, so it cannot be resumed: give a checkpoint, a directory "
            "with checkpoints, or --resume auto for the last one of the program's own directory"
        )
        raise ConfigError(msg)
    name = job.command[0]
    if job.kind == "script":
        _check_script(Path(name))
    elif job.kind == "module":
        _check_module(name, job.environ)
    elif which(name, path=job.environ.get("PATH")) is None:
        if Path(name).is_file():
            msg = f"program {name} is not executable: chmod +x it"
        else:
            msg = f"the program {name} is not on PATH: give its path, or extend PATH"
        raise ConfigError(msg)


def choose_threads(job: JobSpec) -> tuple[str, str]:
    """Return OMP_NUM_THREADS of each rank, and the reason for the choice."""
    if job.threads is not None:
        return str(job.threads), "as given"
    num_threads = job.environ.get("OMP_NUM_THREADS")
    if num_threads:
        return num_threads, "from the environment"
    usable = len(psutil.Process().cpu_affinity()) if sys.platform == "linux" else MAX_RANKS
    cores = min(usable, psutil.cpu_count(logical=False) or usable)
    return str(max(1, cores // job.num_ranks)), f"cores / ranks = {cores} / {job.num_ranks}"


def rank_environ(
    environ: Mapping[str, str], environment: JobEnvironment, threads: str
) -> dict[str, str]:
    """Return the environment variables of a rank.

    Args:
        environ: Environment variables of the launcher or agent.
        environment: Settings that the launcher passes to the rank.
        threads: OMP_NUM_THREADS of the rank.
    """
    of_rank = environment.to_environ()
    values = {**of_rank, "HOSTNAME": platform.node()}
    pairs = (pair.partition("=") for pair in environ.get(RANK_VARIABLES, "").split())
    return {
        **({} if environ.keys() & MEMORY_VARIABLES.keys() else MEMORY_VARIABLES),
        **{name: value for name, value in environ.items() if not name.startswith(OUTER)},
        **{name: values.get(source, "") for name, _, source in pairs},
        **of_rank,
        "OMP_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
        "BRAID_LAUNCHER_PID": str(os.getpid()),
    }


def _check_script(script: Path) -> None:
    try:
        source = script.read_bytes()
    except IsADirectoryError as exc:
        msg = f"{script} is a directory, not a Python script: name a file in it"
        raise ConfigError(msg) from exc
    except OSError as exc:
        msg = f"cannot read the script {script}: {exc.strerror}"
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
        msg = f"{script} is not valid Python: {getattr(exc, 'msg', exc)}      {where}"
        raise ConfigError(f"{msg}\n{text}" if text else msg) from exc


def _check_module(name: str, environ: Mapping[str, str]) -> None:
    """Check that the top package exists; a deeper search would import it into the launcher."""
    top = name.partition(".")[0]
    paths = [str(Path.cwd()), *environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    if top in sys.builtin_module_names or PathFinder.find_spec(top, paths) is not None:
        return
    msg = (
        f"the Python module {top!r} was not found: install it in {sys.prefix}, or correct its name"
    )
    raise ConfigError(msg)
