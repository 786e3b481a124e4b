"""Measure how often the launcher names the right rank: seeded faults in a real job.

Each trial starts the same program on a few ranks. One of them dies, stops, raises or exits at a
random step and inside a random phase. The launcher does not know the fault; it must infer the cause
from the remaining evidence. A trial is correct if the verdict names exactly the faulty rank, with
certainty and with a fitting reason.

The program is any script that takes a fault as its last argument, such as `kill rank=1 step=7
in=backward` (the text form of a scripted fault), and causes it on itself. For deaths by signal the
trial measures the time from the rank's last event until the launcher notices its end. Exceptions
and exits include the interpreter's teardown, so their time is not measured.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from braid.launch import JobSpec, Outcome, Supervisor
from braid.runtime.diagnose.last_events import last_operation_end
from braid.runtime.events import EventRing

__all__ = ["FaultReport", "Trial", "run_fault_trials", "shared_memory"]

VERDICTS = {  # fitting reasons for each fault
    "kill": {"signal"},
    "segv": {"signal"},
    "stop": {"stopped"},
    "raise": {"exception"},
    "exit": {"exit"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One fault and the launcher's verdict.

    Attributes:
        fault: Text of the fault.
        correct: Whether only the faulty rank was named as the cause, with the right reason.
        verdict: The launcher's outcome as text.
        noticed_s: Seconds from the rank's last event until the launcher noticed its end; None
            for other faults than signals.
        survived_s: Seconds from the rank's last event until the last survivor had left its
            collective with an error; None for other faults than signals, and for jobs without
            collectives.
    """

    fault: str
    correct: bool
    verdict: str
    noticed_s: float | None
    survived_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultReport:
    """All trials of a seed.

    Attributes:
        trials: The trials, in order.
        orphans: Number of processes that the trials left behind.
        ports_held: Number of trials after which the run's MASTER_PORT was still in use.
        memory_held: Number of new in-memory files that other processes still map, and of new names
            in /dev/shm.
    """

    trials: tuple[Trial, ...]
    orphans: int
    ports_held: int
    memory_held: int

    @property
    def left_behind(self) -> dict[str, int]:
        """Number of processes, ports and files that were left behind."""
        return {
            "processes": self.orphans,
            "ports": self.ports_held,
            "shared memory": self.memory_held,
        }

    @property
    def correct(self) -> int:
        """Number of trials in which the launcher named the right rank."""
        return sum(trial.correct for trial in self.trials)

    @property
    def wrong(self) -> tuple[Trial, ...]:
        """Trials in which the launcher named a wrong rank, or none."""
        return tuple(trial for trial in self.trials if not trial.correct)

    def noticed_s(self, quantile: float) -> float:
        """Return a quantile of the time until the launcher noticed a death by signal."""
        return _quantile([t.noticed_s for t in self.trials], quantile)

    def survived_s(self, quantile: float) -> float:
        """Return a quantile of the time until the survivors noticed a death by signal."""
        return _quantile([t.survived_s for t in self.trials], quantile)

    def __str__(self) -> str:
        launcher, survivors = (
            f"p50 {at(0.5) * 1e3:.0f} ms, p95 {at(0.95) * 1e3:.0f} ms"
            for at in (self.noticed_s, self.survived_s)
        )
        return (
            f"culprit right {self.correct}/{len(self.trials)}, left behind {self.left_behind}; "
            "death by signal known to "
            f"the launcher in {launcher}, to the survivors in {survivors}"
        )


def run_fault_trials(
    trials: int,
    seed: int,
    script: Path,
    *,
    num_ranks: int = 3,
    num_steps: int = 20,
    spans: tuple[str, ...] = ("step", "forward", "backward", "bucket", "optimizer"),
    stopped_limit_s: float = 0.3,
) -> FaultReport:
    """Run `script` under `trials` seeded faults.

    Args:
        trials: Number of runs.
        seed: Seed of ranks, steps, kinds and phases.
        script: Program to run; see the module.
        num_ranks: Number of ranks of each run.
        num_steps: Smallest number of steps that the program takes.
        spans: Spans at the beginning of which a fault may occur.
        stopped_limit_s: Seconds after which a stopped rank is killed.

    Returns:
        The report of all trials.
    """
    choose = random.Random(seed)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    memory = shared_memory()
    results = []
    ports_held = 0
    for _ in range(trials):
        kind = choose.choice(sorted(VERDICTS))
        rank, step = choose.randrange(num_ranks), choose.randrange(num_steps)
        fault = f"{kind} rank={rank} step={step} in={choose.choice(spans)}"
        with tempfile.TemporaryDirectory(prefix="braid-faults-") as log_dir:
            port = _free_port()
            job = JobSpec(
                command=(str(script), fault),
                num_ranks=num_ranks,
                port=port,
                log_dir=log_dir,
                stopped_limit_s=stopped_limit_s,
            )
            outcome = Supervisor().run(job)
            results.append(_result(fault, kind, rank, outcome))
            ports_held += not _can_listen(port)
    orphans = {child.pid for child in psutil.Process().children(recursive=True)} - before
    return FaultReport(
        trials=tuple(results),
        orphans=len(orphans),
        ports_held=ports_held,
        memory_held=len(shared_memory() - memory),
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _can_listen(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def shared_memory() -> set[str]:
    """Return names in /dev/shm that no process uses, and braid's in-memory files that are mapped.

    Shared memory of other programs on this host is not counted.
    """
    unused = {entry.name for entry in Path("/dev/shm").glob("*")}  # noqa: S108 - looked at only
    mapped = set()
    ours = f"BRAID_LAUNCHER_PID={os.getpid()}".encode()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            files = {m.split()[-1] for m in _maps(process.pid) if "/dev/shm/" in m}  # noqa: S108
            unused -= {Path(name).name for name in files}
            if ours in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                mapped |= {f"{process.pid} {m}" for m in _maps(process.pid) if "/memfd:braid" in m}
    return unused | mapped


def _maps(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text().splitlines()


def _quantile(times: list[float | None], quantile: float) -> float:
    measured = sorted(t for t in times if t is not None)
    if len(measured) < 2:
        return measured[0] if measured else float("nan")
    return statistics.quantiles(measured, n=100, method="inclusive")[round(quantile * 100) - 1]


def _result(fault: str, kind: str, rank: int, outcome: Outcome) -> Trial:
    verdict = outcome.verdict
    right = [end.rank for end in verdict.cause] == [rank] and verdict.kind in VERDICTS[kind]
    noticed_s = survived_s = None
    rings = _rings(Path(outcome.log_dir) / "events")
    last = rings[rank].tail(1) if rank in rings else []
    if right and kind in {"kill", "segv"} and last:
        struck_ns = last[0].t_ns
        noticed_s = (verdict.cause[0].ended_ns - struck_ns) / 1e9
        knew_ns = max(
            (last_operation_end(ring) for r, ring in rings.items() if r != rank), default=0
        )
        survived_s = (knew_ns - struck_ns) / 1e9 if knew_ns > struck_ns else None
    return Trial(
        fault=fault,
        correct=right and verdict.certain,
        verdict=str(outcome),
        noticed_s=noticed_s,
        survived_s=survived_s,
    )


def _rings(directory: Path) -> dict[int, EventRing]:
    files = directory.glob("rank*.ring")
    return {ring.rank: ring for ring in (EventRing(file.read_bytes()) for file in files)}
