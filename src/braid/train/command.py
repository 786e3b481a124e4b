"""`braid train`: check the configuration, start the ranks, show progress, print how to resume."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from rich.console import Console

from braid.errors import CheckpointError, ConfigError
from braid.launch import RESUME, JobSpec, Outcome, Supervisor
from braid.launch.process.job import ElasticLimits
from braid.launch.supervise.run_record import new_log_dir
from braid.train.config import TrainConfig, checkpoints_in
from braid.train.corpus import from_files
from braid.train.progress import TrainConsole

__all__ = ["choose_log_dir", "last_run", "launch", "option_words", "train"]

WORKER = "braid.train.worker"


def train(
    config: TrainConfig,
    *,
    num_ranks: int,
    out: Console,
    resume: str = "",
    threads: int | None = None,
) -> Outcome:
    """Train on ranks of this host and show progress.

    Args:
        config: Configuration of the training.
        num_ranks: Number of ranks.
        out: Console that shows the progress.
        resume: A checkpoint, a directory of checkpoints, the directory of a run, or "auto" for the
            last complete checkpoint in the log directory.
        threads: Number of threads of each rank; the launcher's choice when None.

    Returns:
        Outcome of the run. `str()` of a failed one is the error block, which ends with the
        `braid train` command that resumes the run.

    Raises:
        ConfigError: The training cannot work; nothing was started.
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
    """Check a configuration, train to the end, and pass the reports to the console.

    Raises:
        ConfigError: The training cannot work; nothing was started.
    """
    config.check_ranks(num_ranks)
    if config.device == "cuda":
        from braid.train.device import choose_device  # noqa: PLC0415 - imports torch

        choose_device(config.device)
    if config.data:
        from_files(config.data)
    if resume and resume != "auto":
        _check_resume(checkpoints_in(resume))
    job = JobSpec(
        command=(WORKER, config.to_json()),
        kind="module",
        num_ranks=num_ranks + config.num_helpers,
        expendable=frozenset(range(1, config.num_helpers)) if config.replicas else frozenset(),
        elastic=_limits(config),
        log_dir=config.log_dir,
        threads=threads,
        resume=resume,
        title=shlex.join(_words(config, num_ranks, threads)),
        resume_command=_words(config, num_ranks, threads, "--resume", RESUME),
    )
    return Supervisor(console).run(job)


def _limits(config: TrainConfig) -> ElasticLimits | None:
    if not config.min_ranks:
        return None
    return ElasticLimits(min_ranks=config.min_ranks, spares=config.spares, restarts=config.restarts)


def _check_resume(path: Path) -> None:
    """Raise ConfigError if a path neither is a checkpoint nor contains one."""
    from braid.checkpoint import ls, read_manifest  # noqa: PLC0415 - imports torch

    if not path.is_dir():
        msg = (
            f"{path} is not a checkpoint or a run's directory, so the training cannot be "
            "resumed: pass another path to --resume"
        )
        raise ConfigError(msg)
    if ls(path):
        return
    try:
        read_manifest(path)
    except CheckpointError as exc:
        msg = (
            f"{path} is not a checkpoint ({exc}) and contains none: give a checkpoint, or the "
            "directory of a run that has saved one, such as runs/2026-11-20_a3f"
        )
        raise ConfigError(msg) from exc


def choose_log_dir(resume: str, prefix: str = "") -> str:
    """Choose a log directory for a run without `--log-dir`.

    With `resume="auto"` return the directory of the last run, else a new one in ./runs, whose
    name begins with `prefix`.
    """
    if resume == "auto" and (last := last_run(Path("runs"))):
        return last
    return new_log_dir(prefix)


def last_run(runs: Path) -> str:
    """Return the directory of the run with the latest checkpoint; empty if there is none."""
    from braid.checkpoint import ls  # noqa: PLC0415 - imports torch

    runs_by_time: list[tuple[float, str]] = []
    for directory in runs.glob("*/checkpoints"):
        complete = [line.path for line in ls(directory) if not line.problem]
        if complete:
            runs_by_time.append((Path(complete[-1]).stat().st_mtime, str(directory.parent)))
    return f".{os.sep}{max(runs_by_time)[1]}" if runs_by_time else ""


def _words(
    config: TrainConfig, num_ranks: int, threads: int | None, *first: str
) -> tuple[str, ...]:
    """Return the words of a training's command line, without options at their defaults."""
    words = ["braid", "train", *first, "-n", str(num_ranks)]
    default = TrainConfig()
    for name in TrainConfig.__dataclass_fields__:
        if getattr(config, name) != getattr(default, name) or name == "log_dir":
            words += option_words(config, name)
    if threads is not None:
        words += ["--threads", str(threads)]
    return tuple(words)


def option_words(config: TrainConfig, name: str) -> tuple[str, ...]:
    """Return the words of the command line that set a field to its value in `config`."""
    option, value = name.replace("_", "-"), getattr(config, name)
    if isinstance(value, bool):
        return (f"--{option}" if value else f"--no-{option}",)
    return (f"--{option}", *(map(str, value) if isinstance(value, tuple) else [str(value)]))
