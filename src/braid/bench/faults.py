"""How often the launcher names the right rank: seeded faults in a real job.

Each trial starts the same program on a few ranks and lets one of them die, stop, raise or exit at a random step and inside a
random phase. The launcher is not told; it must find the culprit from what is left. A trial counts as correct when
exactly the struck rank is guilty, with certainty and for a fitting reason.

The program is any script that takes a fault as its last argument, `kill rank=1 step=7 in=backward` (the text form of a
scripted fault), and strikes itself accordingly. For deaths by signal the time between the rank's last event and the launcher's
knowledge of its end is measured; an exception or an exit takes the interpreter's teardown, which is not ours.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from braid.events import EventRing
from braid.launch import JobSpec, Outcome, Supervisor

__all__ = ["FaultReport", "Trial", "run_fault_trials"]

VERDICTS = {  # what may be said of each fault
    "kill": {"signal"},
    "segv": {"signal"},
    "stop": {"stopped"},
    "raise": {"exception"},
    "exit": {"exit"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One fault and what the launcher made of it.

    Attributes:
        fault: Its text.
        correct: Whether the struck rank, and it alone, was found guilty for the right reason.
        found: The verdict in words.
        noticed_s: From the rank's last event to the launcher's knowledge of its end; None for other faults than signals.
    """

    fault: str
    correct: bool
    found: str
    noticed_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultReport:
    """All trials of a seed.

    Attributes:
        trials: One by one.
        orphans: Processes left behind by all of them.
    """

    trials: tuple[Trial, ...]
    orphans: int

    @property
    def correct(self) -> int:
        """Trials in which the culprit was right."""
        return sum(trial.correct for trial in self.trials)

    @property
    def wrong(self) -> tuple[Trial, ...]:
        """Trials in which it was not."""
        return tuple(trial for trial in self.trials if not trial.correct)

    def noticed_s(self, quantile: float) -> float:
        """Time to notice a death by signal, at a quantile; nan when nothing was measured."""
        times = sorted(t.noticed_s for t in self.trials if t.noticed_s is not None)
        if len(times) < 2:
            return times[0] if times else float("nan")
        return statistics.quantiles(times, n=100, method="inclusive")[round(quantile * 100) - 1]

    def __str__(self) -> str:
        return (
            f"culprit right {self.correct}/{len(self.trials)}, orphans {self.orphans}, "
            f"killed noticed in p50 {self.noticed_s(0.5) * 1e3:.1f} ms, p95 {self.noticed_s(0.95) * 1e3:.1f} ms"
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
    """Run the job of `script` under `trials` seeded faults.

    Args:
        trials: Number of runs.
        seed: Determines ranks, steps, kinds and phases.
        script: Program to run; see the module.
        num_ranks: Ranks of each run.
        num_steps: Steps the program makes at least.
        spans: Spans at whose begin a fault may strike.
        stopped_limit_s: After how long a stopped rank is given up.

    Returns:
        What was found.
    """
    choose = random.Random(seed)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    results = []
    for _ in range(trials):
        kind = choose.choice(sorted(VERDICTS))
        rank, step = choose.randrange(num_ranks), choose.randrange(num_steps)
        fault = f"{kind} rank={rank} step={step} in={choose.choice(spans)}"
        with tempfile.TemporaryDirectory(prefix="braid-faults-") as log_dir:
            job = JobSpec(
                command=(str(script), fault),
                num_ranks=num_ranks,
                log_dir=log_dir,
                stopped_limit_s=stopped_limit_s,
            )
            outcome = Supervisor().run(job)
            results.append(_result(fault, kind, rank, outcome))
    left = {child.pid for child in psutil.Process().children(recursive=True)} - before
    return FaultReport(trials=tuple(results), orphans=len(left))


def _result(fault: str, kind: str, rank: int, outcome: Outcome) -> Trial:
    verdict = outcome.verdict
    right = [end.rank for end in verdict.guilty] == [rank] and verdict.kind in VERDICTS[kind]
    ring = Path(outcome.log_dir) / "events" / f"rank{rank}.ring"
    noticed_s = None
    if right and kind in {"kill", "segv"} and ring.exists():
        last = EventRing(ring.read_bytes()).tail(1)
        noticed_s = (verdict.guilty[0].ended_ns - last[0].t_ns) / 1e9 if last else None
    return Trial(
        fault=fault,
        correct=right and verdict.certain,
        found=str(outcome),
        noticed_s=noticed_s,
    )
