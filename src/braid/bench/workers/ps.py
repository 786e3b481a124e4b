"""One rank of `braid bench ps`: measures one part, as the plan says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import torch

from braid.bench.workers.ps_failover import fail_over
from braid.bench.workers.ps_plan import Failover, Measured, Plan, Ratio
from braid.bench.workers.ps_stragglers import straggle
from braid.bench.workers.ps_training import train
from braid.bench.workers.ps_transfer import transfer
from braid.context import init, shutdown

__all__ = ["main"]


def main(plan: Plan) -> None:
    """Measure; the rank that has the figures writes them."""
    torch.set_num_threads(1)
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
    if figures is not None:
        Path(plan.out).write_bytes(msgspec.json.encode(figures))
    shutdown()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(msgspec.json.decode(sys.argv[1], type=Plan))
