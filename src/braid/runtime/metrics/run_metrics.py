"""Metrics that one rank logs during a run, and their destinations.

Under `braid run` a row is a message to the launcher, which has the run's directory, for ranks on
any host. Under another launcher, or alone, ranks write to a directory below `./runs`; they agree on
its name through the job's store. `braid report` reads it as well.
"""

from __future__ import annotations

import functools
import logging
import os
import resource
import secrets
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from braid._version import __version__
from braid.errors import ConfigError
from braid.runtime.clock import Clock
from braid.runtime.events import Recorder
from braid.runtime.metrics.files import MetricsFiles
from braid.runtime.metrics.rows import row_of
from braid.runtime.rendezvous import ControlClient, JobEnvironment, Logged
from braid.runtime.store import Store

if TYPE_CHECKING:
    import psutil

__all__ = ["RunMetrics", "memory_bytes"]

LOG = logging.getLogger(__name__)

DIRECTORY = "metrics/directory"  # key of the directory's name in the store
PEAK_UNIT = 1 if sys.platform == "darwin" else 1024  # unit of getrusage's ru_maxrss


def memory_bytes() -> dict[str, int]:
    """Return the memory of this process, and of its GPU if one is in use, in bytes by name.

    The names are listed in `braid.runtime.metrics.rows`.
    """
    nbytes = {
        "rss_bytes": _process(os.getpid()).memory_info().rss,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * PEAK_UNIT,
    }
    torch = sys.modules.get("torch")  # a process without torch uses no GPU
    if torch is not None and torch.cuda.is_initialized():
        # one call for both numbers, since it takes half a millisecond
        allocated = torch.cuda.memory.memory_stats_as_nested_dict()["allocated_bytes"]["all"]
        nbytes |= {"cuda_bytes": allocated["current"], "cuda_peak_bytes": allocated["peak"]}
    return nbytes


@functools.cache  # a new one reads three files of /proc
def _process(pid: int) -> psutil.Process:
    import psutil  # noqa: PLC0415 - takes 8 ms to import

    return psutil.Process(pid)


class RunMetrics:
    """Logger of the numbers of one rank.

    Args:
        environment: Environment of the rank.
        control: Connection to braid's launcher; None without it.
        clock: Clock of the rank.
        events: Recorder of the rank, which gets an event for each row.
        store: Store of the job's ranks, through which they agree on a directory without a launcher.
    """

    def __init__(
        self,
        environment: JobEnvironment,
        control: ControlClient | None,
        clock: Clock,
        events: Recorder,
        store: Store,
    ) -> None:
        self._environment = environment
        self._control = control
        self._clock = clock
        self._events = events
        self._begin_ns = clock.now_ns()
        # now, since the store may have ended when a rank first logs
        self._own_name = _agreed_name(store) if control is None else ""
        self._files: MetricsFiles | None = None
        self._last_step = -1

    def log(self, step: int | None, values: Mapping[str, Any]) -> None:
        """Log numbers of one step.

        Args:
            step: Number of the step; None for the step after the last logged one.
            values: Numbers, or tensors of one element.

        Raises:
            ConfigError: A value is not a number, or the directory cannot be written.
        """
        measured = {
            "time_s": round((self._clock.now_ns() - self._begin_ns) / 1e9, 6),
            "unix_s": round(time.time(), 3),
            **memory_bytes(),
        }
        row = row_of(self._last_step + 1 if step is None else step, values, measured)
        self._last_step = int(row["step"] or 0)
        self._events.instant("log", seq=self._last_step)
        if self._control is not None:
            self._control.send(Logged(row))
            return
        try:
            if self._files is None:
                self._files = MetricsFiles(self._own_directory(), self._clock)
            self._files.append(self._environment.rank, row)
        except OSError as exc:
            msg = (
                f"cannot write numbers to {exc.filename}: {exc.strerror}; free some space, or "
                "choose another --log-dir"
            )
            raise ConfigError(msg) from exc

    def log_step(self, step: int, values: Mapping[str, float]) -> None:
        """Send the launcher, if there is one, a row with `values` when a step is finished.

        The row does not count as a call of `log`.

        Cost: some 10 microseconds.
        """
        if self._control is None:
            return
        time_s = round((self._clock.now_ns() - self._begin_ns) / 1e9, 6)
        self._events.instant("log", seq=step)
        measured = {"time_s": time_s, "unix_s": round(time.time(), 3)}
        self._control.send(Logged({"step": step, **measured, **values}))

    def close(self) -> None:
        """Close the files. Idempotent."""
        if self._files is not None:
            self._files.close()

    def _own_directory(self) -> Path:
        """Make the directory of a run without braid's launcher; all ranks of the run share it."""
        from braid.runtime.diagnose.run_record import RunRecord  # noqa: PLC0415 - seldom needed

        environment = self._environment
        directory = Path("runs") / self._own_name
        directory.mkdir(parents=True, exist_ok=True)
        LOG.info("braid.log writes to %s, as this process runs without braid's launcher", directory)
        record = directory / "run.json"
        if not record.exists():  # any rank would write the same
            text = msgspec.json.encode(
                RunRecord(
                    braid=__version__,
                    command=tuple(sys.argv),
                    num_ranks=environment.world_size,
                    run_id=environment.run_id,
                    started=datetime.now().astimezone().isoformat(timespec="seconds"),
                )
            )
            part = directory / f"run.json.part{environment.rank}"
            part.write_bytes(text + b"\n")
            part.replace(record)
        return directory


def _agreed_name(store: Store) -> str:
    """Return the name of the run's directory, which the first of its ranks chooses for all."""
    today = datetime.now().astimezone().date()
    proposal = f"{today.isoformat()}_{secrets.token_hex(3)}"
    return store.compare_set(DIRECTORY, b"", proposal.encode()).decode()
