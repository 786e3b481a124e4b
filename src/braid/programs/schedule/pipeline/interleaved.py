"""Several stages per rank: looped breadth-first, and interleaved 1F1B.

With v stages on each of p ranks, stages go round: stage s is on rank s mod p. A stage is v times
shorter, so the pipeline fills v times faster, and the bubble is (p-1)/(v m) of the work. The price
is v times the number of messages.

    breadth-first   all forwards of a rank's first stage, then of its second one, ...; then back.
                    Holds the activations of m micro-batches. Parameters of a stage are needed once.
    interleaved     rounds of p micro-batches; after a warm-up of 2(p-r-1) + (v-1)p forwards, one
                    forward and one backward in turns. Rank 0 holds (v-1)p + 2(p-1) + 1 stages of v.

Source: J. Lamy-Poirier, Breadth-first pipeline parallelism, MLSys 2023; D. Narayanan et al.,
Efficient large-scale language model training on GPU clusters, SC 2021, section 2.2.
"""

from __future__ import annotations

from braid.errors import ConfigError
from braid.programs.schedule.pipeline.linear import (
    StageWork,
    check_size,
    in_turns,
    looped,
    pipeline_program,
)
from braid.programs.schedule.program import Program

__all__ = ["breadth_first", "interleaved"]


def breadth_first(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Program:
    """Make a breadth-first program: a rank runs all micro-batches of one stage, then the next.

    Each rank has `num_chunks` stages.
    """
    check_size(num_ranks, num_microbatches, num_chunks)
    work = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * num_chunks, num_ranks)
        items = [StageWork("F", stage, i) for stage in stages for i in range(num_microbatches)]
        items += [
            StageWork("B", stage, i) for stage in reversed(stages) for i in range(num_microbatches)
        ]
        work.append(items)
    placement = looped(num_ranks, num_chunks)
    return pipeline_program("breadth_first", work, placement, num_microbatches)


def interleaved(
    num_ranks: int, num_microbatches: int, num_chunks: int = 2, round_size: int | None = None
) -> Program:
    """Make an interleaved 1F1B program with `num_chunks` stages per rank.

    If the number of micro-batches is not a multiple of `round_size`, the last round omits the
    missing micro-batches. The order stays valid when work is omitted.

    Args:
        num_ranks: Number of ranks.
        num_microbatches: Number of micro-batches.
        num_chunks: Number of stages of each rank.
        round_size: Number of micro-batches that a rank runs on one stage before its next stage; at
            least the number of ranks, which is the default.

    Raises:
        ConfigError: A number is too small.
    """
    check_size(num_ranks, num_microbatches, num_chunks)
    per_round = num_ranks if round_size is None else round_size
    if per_round < num_ranks:
        msg = f"round_size must be at least the number of ranks, {num_ranks}, got {per_round}"
        raise ConfigError(msg)
    whole = -(-num_microbatches // per_round) * per_round
    rounds = [range(first, first + per_round) for first in range(0, whole, per_round)]
    chunks = range(num_chunks)
    turns = [(chunk, i) for group in rounds for chunk in chunks for i in group]
    back = [(chunk, i) for group in rounds for chunk in reversed(chunks) for i in group]
    work = []
    for rank in range(num_ranks):
        forwards = [StageWork("F", chunk * num_ranks + rank, i) for chunk, i in turns]
        backwards = [StageWork("B", chunk * num_ranks + rank, i) for chunk, i in back]
        ahead = 2 * (num_ranks - rank - 1) + (num_chunks - 1) * per_round
        items = in_turns(forwards, backwards, min(ahead, len(forwards)))
        work.append([item for item in items if item.microbatch < num_microbatches])
    placement = looped(num_ranks, num_chunks)
    return pipeline_program("interleaved", work, placement, num_microbatches)
