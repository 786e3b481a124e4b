"""Programs executed on a few numbers, to see what they do; the engines use tensors.

>>> from braid.programs.schedule.collective.ring import all_gather
>>> carried_out(all_gather(2), [("a", None), (None, "b")])
[('a', 'b'), ('a', 'b')]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from braid.programs.schedule.collective.rounds import Rounds, program
from braid.programs.schedule.matching import Place, match, order
from braid.programs.schedule.program import RECEIVE, SEND

__all__ = ["carried_out"]


def carried_out(rounds: Rounds, buffers: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Return the buffers of all ranks after the algorithm.

    Args:
        rounds: Algorithm.
        buffers: Elements, by rank; the blocks are as equal as they can be. For all_to_all both
            buffers, one behind the other.
    """
    written = program(rounds)
    matching = match(written)
    moments, deadlock = order(written, matching, buffered=False)
    assert deadlock is None, deadlock
    holds = [list(buffer) for buffer in buffers]
    size, blocks = len(holds[0]), rounds.num_blocks
    bounds = [size * i // blocks for i in range(blocks + 1)]
    read: dict[Place, list[Any]] = {}
    for rank, positions, ended in moments:
        for position in positions:
            place, action = Place(rank, position), written.ranks[rank][position]
            role = written.vocabulary.role(action)
            if not ended and role != RECEIVE:
                block = action.unit if role == SEND else action.edge
                read[place] = holds[rank][bounds[block] : bounds[block + 1]]
            elif ended and role != SEND:
                values = read[matching.partner[place] if role == RECEIVE else place]
                part = slice(bounds[action.unit], bounds[action.unit + 1])
                there = holds[rank][part]
                if action.kind == "reduce":
                    values = [a + b for a, b in zip(there, values, strict=True)]
                holds[rank][part] = values
    return [tuple(buffer) for buffer in holds]
