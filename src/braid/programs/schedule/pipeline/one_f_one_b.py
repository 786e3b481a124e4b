"""1F1B and GPipe: pipelines of one stage per rank.

    GPipe, 3 stages, 4 micro-batches            1F1B: a backward that is possible comes first
    0  F0 F1 F2 F3          B0 B1 B2 B3         0  F0 F1 F2       B0 F3 B1    B2    B3
    1     F0 F1 F2 F3    B0 B1 B2 B3            1     F0 F1    B0 F2 B1 F3 B2    B3
    2        F0 F1 F2 F3 B0 B1 B2 B3            2        F0 B0 F1 B1 F2 B2 F3 B3

Both need (m + p - 1)(f + b): the bubble is (p-1)/m of the work. But GPipe holds the activations of
m micro-batches; 1F1B on rank r holds only min(m, p - r): further forwards in advance of the first
backward gain nothing.

Source: Y. Huang et al., GPipe, NeurIPS 2019; D. Narayanan et al., PipeDream, SOSP 2019, and (with
flushes) Memory-efficient pipeline-parallel DNN training, ICML 2021.
"""

from __future__ import annotations

from braid.programs.schedule.pipeline.linear import (
    Placement,
    StageWork,
    check_size,
    in_turns,
    looped,
    pipeline_program,
    rank_of,
)
from braid.programs.schedule.pipeline.vocabulary import INFER
from braid.programs.schedule.program import Program

__all__ = ["forward_only", "gpipe", "one_f_one_b"]


def one_f_one_b(num_stages: int, num_microbatches: int) -> Program:
    """Make a 1F1B program.

    With p stages and m micro-batches, stage r runs a warm-up of min(p-r-1, m) forwards. Then it
    runs one forward and one backward in turns, then the remaining backwards.
    """
    check_size(num_stages, num_microbatches)
    work = []
    for stage in range(num_stages):
        forwards = [StageWork("F", stage, i) for i in range(num_microbatches)]
        backwards = [StageWork("B", stage, i) for i in range(num_microbatches)]
        work.append(in_turns(forwards, backwards, min(num_stages - stage - 1, num_microbatches)))
    return pipeline_program("1f1b", work, looped(num_stages), num_microbatches)


def gpipe(num_stages: int, num_microbatches: int) -> Program:
    """Make a GPipe program: all forwards, then all backwards."""
    check_size(num_stages, num_microbatches)
    work = [
        [StageWork(kind, stage, i) for kind in "FB" for i in range(num_microbatches)]
        for stage in range(num_stages)
    ]
    return pipeline_program("gpipe", work, looped(num_stages), num_microbatches)


def forward_only(
    num_ranks: int, num_microbatches: int, placement: Placement | None = None
) -> Program:
    """Make a program without backwards: a rank runs all forwards of a stage, then its next stage.

    Args:
        num_ranks: Number of ranks.
        num_microbatches: Number of micro-batches.
        placement: Rank of each stage, or ranks that take turns; one stage per rank when None.
    """
    check_size(num_ranks, num_microbatches)
    placement = looped(num_ranks) if placement is None else placement
    work = [
        [
            StageWork("F", stage, i)
            for stage in range(len(placement))
            for i in range(num_microbatches)
            if rank_of(placement, stage, i) == rank
        ]
        for rank in range(num_ranks)
    ]
    return pipeline_program("forward", work, placement, num_microbatches, operation=INFER)
