"""Pictures of the page on sequences and experts, each drawn from the blocks that ring attention computes."""

from __future__ import annotations

from collections.abc import Callable

from braid.parallel.context_parallel.blocks import block_of
from braid.programs.schedule.bars import COLOURS, Bar, draw

RANKS, LENGTH = 4, 64
FULL_S = 1.0  # of a block of all queries and keys of two ranks
SEND_S = 0.3  # of a rank's keys and values to the next rank


def ring_steps() -> str:
    """Causal attention of four ranks: pieces in their order, and the balanced cut."""
    bars: list[Bar] = []
    lanes: list[str] = []
    notes: list[str] = []
    for name, balanced in (("in order", False), ("balanced", True)):
        own, idle = _ring(len(lanes), balanced=balanced)
        bars += own
        lanes += [f"{name} {rank}" for rank in range(RANKS)]
        notes += [f"idle {share:.0%}" for share in idle]
    legend = {
        "keys of this rank": COLOURS[0],
        "of an earlier one": COLOURS[2],
        "of a later one": COLOURS[1],
    }
    end_s = max(bar.end_s for bar in bars)
    return draw(lanes, bars, end_s, legend=legend, notes=notes)


def _ring(first_lane: int, *, balanced: bool) -> tuple[list[Bar], list[float]]:
    """Bars of all steps, and the share of time in which a rank waits; keys come while a block is computed."""
    bars: list[Bar] = []
    arrived = [0.0] * RANKS
    free = [0.0] * RANKS
    busy = [0.0] * RANKS
    for step in range(RANKS):
        starts = [max(free[rank], arrived[rank]) for rank in range(RANKS)]
        for rank in range(RANKS):
            source = (rank - step) % RANKS
            block = block_of(rank, source, LENGTH, causal=True, balanced=balanced)
            free[rank] = starts[rank]
            if block is None:
                continue
            products = len(range(LENGTH)[block.queries]) * len(range(LENGTH)[block.keys])
            seconds = FULL_S * products / LENGTH**2 / (2 if block.is_causal else 1)
            free[rank] += seconds
            busy[rank] += seconds
            colour = COLOURS[0 if source == rank else 2 if source < rank else 1]
            title = f"step {step}: queries of rank {rank}, keys of rank {source}"
            bars.append(
                Bar(first_lane + rank, starts[rank], free[rank], colour, title, f"k{source}")
            )
        # a rank sends what it has got when its step begins
        arrived = [starts[(rank - 1) % RANKS] + SEND_S for rank in range(RANKS)]
    end_s = max(bar.end_s for bar in bars)
    return bars, [1 - seconds / end_s for seconds in busy]


SEQUENCES: tuple[Callable[[], str], ...] = (ring_steps,)
