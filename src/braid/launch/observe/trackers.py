"""Sends the numbers of a run to TensorBoard, MLflow, Weights and Biases, or trackio.

The files in the run's directory stay the source: nothing is lost if a tracker is down, and a run
can be sent again, later, or to another one. Sending is a reader's work, so it costs the training
nothing, and the numbers are averages over ranks.

A tracker is an object with `begin`, `log` and `end`; each adapter imports its package only then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from braid.errors import BraidError, ConfigError
from braid.launch.observe.run_directory import Run, read_record, read_run
from braid.runtime.clock import Clock
from braid.runtime.metrics import FOLDER, MetricRows, MetricsReader, average_rows, has_writer

__all__ = ["TRACKERS", "Tracker", "open_tracker", "send_run"]

POLL_S = 2.0
HIDDEN = frozenset({"step", "unix_s"})


class Tracker(Protocol):
    """Interface of experiment trackers: receives the numbers of one run."""

    def begin(self, name: str, facts: Mapping[str, str]) -> None:
        """Begin a run with a name and the facts of its start, such as command and commit."""

    def log(self, step: int, unix_s: float | None, values: Mapping[str, float]) -> None:
        """Receive the finite numbers of one step and, if known, the time at which it was logged."""

    def end(self) -> None:
        """End the run; everything must be written when this returns."""


class TensorBoard:
    """Writes event files for TensorBoard.

    Args:
        place: Directory of the event files.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._writer: Any = None

    def begin(self, name: str, facts: Mapping[str, str]) -> None:
        _package("tensorboard")
        module = import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(str(Path(self._place) / name))
        for key, value in facts.items():
            self._writer.add_text(key, value)

    def log(self, step: int, unix_s: float | None, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step, walltime=unix_s)

    def end(self) -> None:
        self._writer.close()


class MLflow:
    """Logs to an experiment of MLflow, at MLFLOW_TRACKING_URI.

    Args:
        place: Name of the experiment.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._mlflow: Any = None

    def begin(self, name: str, facts: Mapping[str, str]) -> None:
        self._mlflow = _package("mlflow")
        self._mlflow.set_experiment(self._place)
        self._mlflow.start_run(run_name=name)
        self._mlflow.log_params({key: value[:500] for key, value in facts.items()})

    def log(self, step: int, unix_s: float | None, values: Mapping[str, float]) -> None:
        del unix_s  # MLflow takes its own time
        self._mlflow.log_metrics({_plain(key): value for key, value in values.items()}, step=step)

    def end(self) -> None:
        self._mlflow.end_run()


class WeightsAndBiases:
    """Logs to a project of Weights and Biases; WANDB_MODE=offline keeps it on this machine.

    Args:
        place: Name of the project.
        package: Package with the functions `init`, `log` and `finish`.
    """

    def __init__(self, place: str, package: str = "wandb") -> None:
        self._place = place
        self._name = package
        self._package: Any = None

    def begin(self, name: str, facts: Mapping[str, str]) -> None:
        self._package = _package(self._name)
        self._package.init(project=self._place, name=name, config=dict(facts))

    def log(self, step: int, unix_s: float | None, values: Mapping[str, float]) -> None:
        times = {} if unix_s is None else {"unix_s": unix_s}
        self._package.log({**values, **times}, step=step)

    def end(self) -> None:
        self._package.finish()


TRACKERS: Mapping[str, Callable[[str], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WeightsAndBiases,
    "trackio": lambda place: WeightsAndBiases(place, "trackio"),
}


def open_tracker(name: str, place: str) -> Tracker:
    """Return the adapter of a tracker.

    Args:
        name: One of `TRACKERS`.
        place: Directory, experiment or project; "braid" if empty.

    Raises:
        ConfigError: The tracker is unknown.
    """
    if name not in TRACKERS:
        msg = f"unknown tracker {name}: choose one of {', '.join(TRACKERS)}"
        raise ConfigError(msg)
    return TRACKERS[name](place or "braid")


def send_run(path: Path, tracker: Tracker, *, follow: bool = False, clock: Clock) -> int:
    """Send all numbers of a run, and return the number of steps.

    Args:
        path: Directory of the run.
        tracker: Receiver.
        follow: Whether to go on until the run has ended. A step is then sent when a later one has
            been logged, so that slower ranks are in its average. A run has ended when `run.json`
            has its outcome. Without braid's launcher, or if it was killed, the run has ended when
            no process writes its numbers.
        clock: Waits between two looks at the files.

    Raises:
        ConfigError: `path` is not the directory of a run, the run has no numbers, or the tracker's
            package is missing or fails.
    """
    run = read_run(path)
    if not run.metrics and not follow:
        msg = f"{path} has no numbers to send: log them with braid.log(step=step, loss=loss)"
        raise ConfigError(msg)
    count = 0
    try:
        tracker.begin(path.resolve().name, _facts(run))
        try:
            for row in _growing_rows(path, clock) if follow else run.metrics:
                values = {k: v for k, v in row.items() if k not in HIDDEN and math.isfinite(v)}
                tracker.log(int(row["step"]), row.get("unix_s"), values)
                count += 1
        finally:
            tracker.end()
    except BraidError:
        raise
    except Exception as exc:
        msg = (
            f"the tracker failed after {count:,} steps with {type(exc).__name__}: {exc}. The "
            f"numbers are still in {path}: send them again when the reason is gone"
        )
        raise ConfigError(msg) from exc
    return count


def _growing_rows(path: Path, clock: Clock) -> Iterator[Mapping[str, float]]:
    """Yield the averages of each step of a run until it has ended; reads each line once."""
    readers: dict[Path, MetricsReader] = {}
    last = -math.inf
    while True:
        ended = _has_ended(path)  # first, so that what was written before is read
        for file in (*path.glob("*.jsonl"), *(path / FOLDER).glob("rank*.jsonl")):
            with suppress(OSError):  # a file that cannot be read is left out, as by `read_run`
                readers.setdefault(file, MetricsReader(file)).refresh()
        # averages of ranks count as one file; see `read_run`
        ranks, others = list[MetricRows](), list[MetricRows]()
        for file, reader in readers.items():
            if (new := reader.rows(after=last)) is not None:
                (ranks if file.parent.name == FOLDER else others).append(new)
        rows = average_rows((*others, MetricRows(average_rows(ranks), {})))
        for row in rows if ended else rows[:-1]:
            last = row["step"]
            yield row
        if ended:
            return
        clock.sleep(POLL_S)


def _has_ended(path: Path) -> bool:
    if read_record(path).outcome is not None:
        return True
    files = [*(path / FOLDER).glob("rank*.jsonl")]
    return bool(files) and not any(map(has_writer, files))


def _facts(run: Run) -> dict[str, str]:
    record = run.record
    facts = {
        "command": record.title or run.command_line,
        "ranks": str(record.num_ranks),
        "started": record.started,
        "commit": record.git,
        "directory": str(run.path.resolve()),
        **record.packages,
    }
    return {key: value for key, value in facts.items() if value}


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as exc:
        msg = f"{name} is not installed ({exc}): pip install 'braid-train[{name}]'"
        raise ConfigError(msg) from exc


def _plain(key: str) -> str:
    """Return a key with the characters that MLflow takes."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in key)
