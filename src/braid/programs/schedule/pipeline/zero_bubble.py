"""Zero bubble schedules: the weights' part of a backward fills what would be idle.

    1F1B     a rank waits for the whole backward of the next one
    ZB-H1    the next one sends its gradient after half of that; W of a micro-batch is r steps later
             on rank r, so that each rank holds p micro-batches. Bubble (p-1)(f + i - w).
    ZB-H2    2p - 1 micro-batches are held; ranks are idle only before their first and after their
             last work.
    ZBV      two stages per rank, to the last rank and back: the first rank has the loss, and every
             rank holds the same, 2p halves.

Source: P. Qi et al., Zero bubble pipeline parallelism, ICLR 2024.
"""

from __future__ import annotations

from braid.programs.schedule.pipeline.linear import (
    StageWork,
    check_size,
    looped,
    pipeline_program,
    vee,
)
from braid.programs.schedule.pipeline.list_schedule import list_schedule
from braid.programs.schedule.program import Program

__all__ = ["zb_h1", "zb_h2", "zbv"]


def zb_h1(num_stages: int, num_microbatches: int) -> Program:
    """Make a ZB-H1 program: a third of 1F1B's idle time, with the memory of 1F1B's first rank."""
    check_size(num_stages, num_microbatches)
    work = []
    for rank in range(num_stages):
        ahead = min(num_stages - rank - 1, num_microbatches)
        items = [StageWork("F", rank, i) for i in range(ahead)]
        for i in range(num_microbatches):
            if ahead + i < num_microbatches:
                items.append(StageWork("F", rank, ahead + i))
            items.append(StageWork("I", rank, i))
            if i >= rank:
                items.append(StageWork("W", rank, i - rank))
        late = max(0, num_microbatches - rank)
        items += [StageWork("W", rank, i) for i in range(late, num_microbatches)]
        work.append(items)
    return pipeline_program("zb_h1", work, looped(num_stages), num_microbatches)


def zb_h2(num_stages: int, num_microbatches: int) -> Program:
    """Make a ZB-H2 program: no idle time, but activations of 2 `num_stages` - 1 micro-batches."""
    check_size(num_stages, num_microbatches)
    limits = [2 * num_stages - 1] * num_stages
    return list_schedule(looped(num_stages), num_microbatches, limits, name="zb_h2")


def zbv(num_ranks: int, num_microbatches: int) -> Program:
    """Make a ZBV program (zero bubble, a V of stages), with two stages per rank."""
    check_size(num_ranks, num_microbatches)
    limits = [2 * num_ranks] * num_ranks
    return list_schedule(vee(num_ranks), num_microbatches, limits, name="zbv")
