"""One rank of `ps`, which measures one part of the plan."""

from __future__ import annotations

from benchmarks.workers.ps_failover import fail_over
from benchmarks.workers.ps_plan import Failover, Measured, Plan, Ratio
from benchmarks.workers.ps_stragglers import straggle
from benchmarks.workers.ps_training import train
from benchmarks.workers.ps_transfer import transfer
from braid.context import init, shutdown

__all__ = ["main"]


def main(plan: Plan) -> list[Measured] | Ratio | Failover | None:
    """Measure; the rank that has the figures returns them."""
    group = init()
    figures: list[Measured] | Ratio | Failover | None
    if "step" in plan.parts:
        figures = train(group, plan)
    elif "stragglers" in plan.parts:
        figures = straggle(group, plan)
    elif "failover" in plan.parts:
        figures = fail_over(plan)
    else:
        figures = transfer(group, plan)
    shutdown()
    return figures
