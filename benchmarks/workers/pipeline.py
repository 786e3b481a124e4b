"""One rank of `pipeline`: steps of one model by several engines, in turns.

    compute      only this rank's forwards and backwards, while the other ranks run theirs
    gloo         torch's pipelining over Gloo
    torch        the same over the backend "braid"
    braid        braid's pipeline

A step without any cost of messages and engine takes (1 + overhead) x compute, where the closed form
of the schedule gives the overhead, such as (p - 1) / m. The rest of a step is exposed. Each engine
has a separate copy of the model. In every round each takes one step, in random order.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator

import msgspec
from torch import distributed as dist

from benchmarks.workers.pipeline_models import (
    MODEL_NAMES,
    NUM_BLOCKS,
    TORCH_SCHEDULES,
    Compute,
    Job,
    closed_form,
    job_of,
)
from benchmarks.workers.pipeline_parts import Held, Swept, measure_held, measure_sweep
from braid.cli.bench.harness.report import unknown
from braid.cli.bench.harness.rounds import in_rounds, median_ratio
from braid.comm import Group
from braid.context import init, shutdown
from braid.programs.schedule.pipeline import SCHEDULES

__all__ = ["VARIANTS", "Case", "Figures", "Measured", "Plan", "main"]

VARIANTS = ("compute", "gloo", "torch", "braid")
WARM_UP = 3  # steps in which shapes are exchanged and memory is allocated


class Case(msgspec.Struct, frozen=True):
    """One model with one schedule.

    Attributes:
        model: Name out of `pipeline_models.MODEL_NAMES`.
        schedule: Name out of `pipeline_models.TORCH_SCHEDULES`.
        num_microbatches: Number of micro-batches.
    """

    model: str
    schedule: str
    num_microbatches: int

    @property
    def label(self) -> str:
        """Model and schedule, for tables and verdicts."""
        return f"{self.model}, {self.schedule}"

    def problems(self, ranks: int) -> Iterator[str]:
        """Yield reasons why the case cannot be measured on `ranks` ranks."""
        yield from unknown("model", [self.model], MODEL_NAMES)
        if self.schedule not in TORCH_SCHEDULES:
            names = ", ".join(TORCH_SCHEDULES)
            yield f"{self.schedule} cannot be compared: choose a schedule out of {names}"
        elif ranks > 1 and self.num_microbatches >= 1:  # smaller numbers are refused anyway
            stages = SCHEDULES[self.schedule](ranks, self.num_microbatches).header.num_units
            if NUM_BLOCKS % stages:
                yield (
                    f"{self.schedule} on {ranks} ranks has {stages} stages, among which the "
                    f"{NUM_BLOCKS} blocks of {self.model} cannot be shared: use 2 or "
                    f"{NUM_BLOCKS} ranks"
                )
            elif self.schedule == "interleaved" and self.num_microbatches % ranks:
                yield (
                    f"{self.num_microbatches} micro-batches are not a multiple of {ranks} ranks, "
                    "which torch's interleaved schedule requires"
                )


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements to make.

    Attributes:
        rounds: Largest number of steps of each engine.
        budget_s: Approximate seconds for a case.
        cases: Models and schedules.
        held: Schedules with a mode of recomputation, to measure their live bytes.
        sweep: Case in which the number of micro-batches is varied; None for none.
        numbers: Numbers of micro-batches of the sweep.
    """

    rounds: int
    budget_s: float
    cases: tuple[Case, ...] = ()
    held: tuple[tuple[str, str], ...] = ()
    sweep: Case | None = None
    numbers: tuple[int, ...] = ()


class Measured(msgspec.Struct, kw_only=True):
    """Figures of one case.

    Attributes:
        case: Model and schedule.
        ranks: World size.
        overhead: Overhead of the schedule relative to its work, by its closed form.
        num_actions: Largest number of actions of a rank in a step.
        boundary_bytes: Bytes of a micro-batch at a boundary.
        step_s: Median seconds of a step on the slowest rank, by variant.
        speedup: Ratio of Gloo's step to the variant's, median of the rounds.
        efficiency: Fraction of a step that its work and the schedule's bubble explain, by engine;
            median of the rounds.
        action_s: Overhead of an action in braid's engine in seconds, including messages; from the
            fastest steps, since longer ones are due to other programs.
        rounds_s: Seconds of every step, by variant, from which the other figures are computed.
    """

    case: Case
    ranks: int
    overhead: float
    num_actions: int
    boundary_bytes: int
    step_s: dict[str, float]
    speedup: dict[str, float]
    efficiency: dict[str, float]
    action_s: float
    rounds_s: dict[str, list[float]]

    @property
    def bubble(self) -> float:
        """Bubble of the schedule as a fraction of a step of only work and bubble."""
        return self.overhead / (1 + self.overhead)


class Figures(msgspec.Struct, kw_only=True):
    """All figures of a run."""

    measured: list[Measured]
    held: list[Held]
    swept: list[Swept]


def main(plan: Plan) -> Figures | None:
    """Measure everything; rank 0 returns the figures."""
    warnings.simplefilter("ignore")  # torch's pipelining warns when it is imported
    group = init()
    dist.init_process_group("gloo")
    over_braid = dist.new_group(backend="braid")
    figures = Figures(
        measured=[_measure(group, over_braid, case, plan) for case in plan.cases],
        held=[measure_held(group, *which) for which in plan.held],
        swept=[],
    )
    if plan.sweep is not None:
        case = plan.sweep
        figures.swept += measure_sweep(group, case.model, case.schedule, plan.numbers, plan.rounds)
    dist.destroy_process_group()
    shutdown()
    return figures if group.rank == 0 else None


def _measure(
    group: Group, over_braid: dist.ProcessGroup | None, case: Case, plan: Plan
) -> Measured:
    _, schedule, m = msgspec.structs.astuple(case)
    job = job_of(case.model, m)
    program = SCHEDULES[schedule](group.size, m)
    torchs: dict[str, Job] = {name: job.copy() for name in ("gloo", "torch")}
    steps: dict[str, Callable[[], object]] = {
        "compute": Compute(program, group.rank, job.copy()),
        "gloo": torchs["gloo"].step_of_torch(None, schedule, m),
        "torch": torchs["torch"].step_of_torch(over_braid, schedule, m),
        "braid": job.step_of_braid(job.by_braid(group, schedule, m)),
    }
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    times = in_rounds(group, steps, rounds=plan.rounds, budget_s=plan.budget_s)
    overhead = closed_form(program)
    num_actions = max(map(len, program.ranks))
    least_ideal_s = (1 + overhead) * min(times["compute"])
    return Measured(
        case=case,
        ranks=group.size,
        overhead=overhead,
        num_actions=num_actions,
        boundary_bytes=job.batch[: len(job.batch) // m].nbytes,
        step_s={name: statistics.median(seconds) for name, seconds in times.items()},
        speedup={name: median_ratio(times["gloo"], times[name]) for name in ("torch", "braid")},
        efficiency={
            name: (1 + overhead) * median_ratio(times["compute"], times[name])
            for name in VARIANTS[1:]
        },
        action_s=(min(times["braid"]) - least_ideal_s) / num_actions,
        rounds_s=times,
    )
