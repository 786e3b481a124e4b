"""V-Half and V-Min: pipelines with a half and a third of the activations of 1F1B.

The two stages of each rank lie on a V: the activations of a rank far from the turn are held long by
its first stage and briefly by its second one, so all ranks hold the same. How much depends on the
speed at which a micro-batch goes through the V: a slow one leaves room for other work.

    a building block: the steps of micro-batch 0, one for each work; the next follows 6 steps later

    rank 0   F0                   F1 I1                   I0     V-Min: one step per rank, down and
    rank 1      F0             F1       I1             I0        up; activations are held about 4p
    rank 2         F0       F1             I1       I0           steps, so 4p/6 half stages' worth
    rank 3            F0 F1                   I1 I0              at a time

V-Half goes down in 2 steps per rank and up in 1, both forwards and backwards: about 6p/6. The waits
at the turns are the smallest with which no two works of a rank fall on the same of 6 steps. In this
order of F and I, W fills the steps in which a rank waits, or frees memory for a forward.

                 activations, of 2p stages of 1F1B    bubble, of p - 1 of 1F1B
    V-Half       p + 2                                about 1/2
    V-Min        2 floor((p+1)/3) + 2                 about 2/3

List scheduling within the same memory has a smaller bubble on few ranks, so the faster of both is
returned. Measured with f = i = w, as bubble over work, on 4 ranks with 8 micro-batches and on 8
with 16: V-Half 10.4 % and 19.8 %, V-Min 22.9 % and 28.1 %, 1F1B 37.5 % and 43.8 %.

Source: P. Qi et al., Pipeline parallelism with controllable memory, NeurIPS 2024. Its weights stay
where the block has them; here they move, which saves up to 40 % of the bubble of V-Half.
"""

from __future__ import annotations

from typing import NamedTuple

from braid.programs.schedule.pipeline.linear import StageWork, check_size, pipeline_program, vee
from braid.programs.schedule.pipeline.list_schedule import StageCosts, listed_work
from braid.programs.schedule.program import Program

__all__ = ["v_half", "v_min"]

PERIOD = 6  # steps of a rank's work on a micro-batch: F, I and W of two stages
MOST_LISTED = 6  # ranks; on 7 to 16 the building blocks are as fast as list schedules, or faster


class _Block(NamedTuple):
    """Steps of a micro-batch through the V.

    Attributes:
        down: Steps from a rank to the next one.
        up: Steps from a rank to the one before.
        waits: Steps that a micro-batch waits before its second forward on the last rank, its first
            backward on rank 0, and its second backward on the last rank.
    """

    down: int
    up: int
    waits: tuple[int, int, int]


def v_half(num_ranks: int, num_microbatches: int) -> Program:
    """Make a V-Half program with two stages per rank.

    A rank stores the activations of at most `num_ranks` + 2 pairs of stage and micro-batch.
    """
    block = _Block(2, 1, (0, 1, 0) if num_ranks % 2 else (3, 0, 4))
    return _program("v_half", block, num_ranks, num_microbatches, num_ranks + 2)


def v_min(num_ranks: int, num_microbatches: int) -> Program:
    """Make a V-Min program with two stages per rank.

    With p ranks, a rank stores the activations of at most 2 floor((p+1)/3) + 2 pairs of stage and
    micro-batch.
    """
    block = _Block(1, 1, (0, 0, 0) if num_ranks % 3 else (2, 0, 2))
    limit = 2 * ((num_ranks + 1) // 3) + 2
    return _program("v_min", block, num_ranks, num_microbatches, limit)


def _program(
    name: str, block: _Block, num_ranks: int, num_microbatches: int, limit: int
) -> Program:
    check_size(num_ranks, num_microbatches)
    placement = vee(num_ranks)
    seconds, work = _filled(_orders(block, num_ranks, num_microbatches), limit)
    if num_ranks <= MOST_LISTED:
        costs = [StageCosts()] * len(placement)
        listed = listed_work(placement, num_microbatches, [limit] * num_ranks, costs)
        seconds, work = min((seconds, work), listed, key=lambda timed: timed[0])
    return pipeline_program(name, work, placement, num_microbatches)


def _orders(block: _Block, num_ranks: int, num_microbatches: int) -> list[list[StageWork]]:
    """Return forwards and backwards to inputs of each rank, in the order of repeated blocks."""
    last = 2 * num_ranks - 1
    down, up = block.down * (num_ranks - 1) + 1, block.up * (num_ranks - 1) + 1
    first_up = down + block.waits[0]
    second_down = first_up + up + block.waits[1]
    second_up = second_down + down + block.waits[2]
    orders = []
    for rank in range(num_ranks):
        below, above = block.down * rank, block.up * (num_ranks - 1 - rank)
        starts = {
            ("F", rank): below,
            ("F", last - rank): first_up + above,
            ("I", last - rank): second_down + below,
            ("I", rank): second_up + above,
        }
        assert len({start % PERIOD for start in starts.values()}) == len(starts)
        timed = [
            (start + PERIOD * i, StageWork(kind, stage, i))
            for (kind, stage), start in starts.items()
            for i in range(num_microbatches)
        ]
        orders.append([item for _, item in sorted(timed)])
    return orders


def _filled(orders: list[list[StageWork]], limit: int) -> tuple[float, list[list[StageWork]]]:
    """Return the steps and the work of each rank: its order, with W where it would wait."""
    last = 2 * len(orders) - 1
    work: list[list[StageWork]] = [[] for _ in orders]
    waiting: list[list[StageWork]] = [[] for _ in orders]  # W that can run: their I has ended
    held, position = [0] * len(orders), [0] * len(orders)
    ended: dict[tuple[str, int, int], int] = {}  # step after each work
    step = 0
    while any(len(items) * 2 < len(order) * 3 for items, order in zip(work, orders, strict=True)):
        for rank, order in enumerate(orders):
            item = order[position[rank]] if position[rank] < len(order) else None
            if item is None or not _can(item, last, ended, step, has_room=held[rank] < limit):
                if not waiting[rank]:
                    continue
                item = waiting[rank].pop(0)
            else:
                position[rank] += 1
            work[rank].append(item)
            held[rank] += (item.kind == "F") - (item.kind == "W")
            if item.kind == "I":
                waiting[rank].append(item._replace(kind="W"))
            ended[item.kind, item.stage, item.microbatch] = step + 1
        step += 1
    return step, work


def _can(
    item: StageWork,
    last: int,
    finished: dict[tuple[str, int, int], int],
    step: int,
    *,
    has_room: bool,
) -> bool:
    """Return whether F or I can begin in a step."""
    kind, stage, i = item[:3]
    if kind == "F":
        return has_room and (stage == 0 or finished.get(("F", stage - 1, i), step + 1) <= step)
    return finished.get(("F", stage, i), step + 1) <= step and (
        stage == last or finished.get(("I", stage + 1, i), step + 1) <= step
    )
