"""Pictures of collectives: which blocks each rank holds before every round, and where they go.

A panel per round has a row per rank and a cell per block. A cell has the colours of the ranks whose
contributions its block contains, and the number of the block; arrows are the messages of the round.
The last panel is the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from braid.errors import ConfigError
from braid.programs.schedule.bars import COLOURS
from braid.programs.schedule.collective.contributions import held_by_round
from braid.programs.schedule.collective.vocabulary import Held
from braid.programs.schedule.matching import Place, match
from braid.programs.schedule.program import SEND, Program

__all__ = ["CELL", "blocks_svg", "row_of_blocks"]

CELL, ROW = 24, 34  # pixels of a cell, and between the tops of two rows
NAME, TITLE, GAP, HEAD = 50, 56, 20, 20  # pixels: names of ranks, titles, between and above panels
ARROW = "#222222"
MOST_BLOCKS = 28  # in a picture of 800 pixels


def blocks_svg(program: Program, width: int = 800) -> str:
    """Draw the rounds of a collective as SVG.

    Args:
        program: Valid program of a collective.
        width: Pixels; panels that do not fit continue on the next line.

    Raises:
        ConfigError: The ranks have too many blocks for a picture.
    """
    count = program.header.num_units
    if count > MOST_BLOCKS:
        msg = (
            f"a picture of rounds shows at most {MOST_BLOCKS} blocks per rank, got {count}: use "
            "fewer ranks"
        )
        raise ConfigError(msg)
    panels = held_by_round(program)
    messages = _messages(program)
    wide = max(count * CELL, TITLE) + GAP
    high = HEAD + program.num_ranks * ROW + 4
    across = max(1, (width - NAME) // wide)
    lines = -(-len(panels) // across)
    across = -(-len(panels) // lines)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" '
            f'width="{NAME + across * wide}" height="{lines * high}" '
            'font-family="sans-serif" font-size="12">'
        ),
        (
            '<marker id="to" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" '
            f'orient="auto"><path d="M0 0L6 3L0 6z" fill="{ARROW}"/></marker>'
        ),
    ]
    for number, held in enumerate(panels):
        x, y = NAME + number % across * wide, number // across * high + HEAD
        is_last = number == len(panels) - 1
        title = "result" if is_last else f"round {number}"
        parts.append(f'<text x="{x}" y="{y - 6}" font-weight="bold">{title}</text>')
        for rank in range(program.num_ranks):
            top = y + rank * ROW
            if number % across == 0:
                parts.append(f'<text x="4" y="{top + 16}">rank {rank}</text>')
            parts += row_of_blocks(x, top, held[rank], count, program.num_ranks)
        for source, target in messages.get(number, ()):
            parts.append(_arrow(x, y, source, target))
    return "\n".join([*parts, "</svg>"]) + "\n"


def row_of_blocks(
    x: int, y: int, held: Mapping[int, Held], count: int, num_ranks: int
) -> list[str]:
    """Draw the blocks of a rank's buffer as SVG cells, from left to right.

    Args:
        x: Left edge of the first cell.
        y: Top edge of the cells.
        held: Contents by index of the block; missing blocks are drawn empty.
        count: Number of blocks.
        num_ranks: World size.
    """
    parts = []
    for slot in range(count):
        corner = x + slot * CELL
        box = f'y="{y}" height="{CELL}"'
        parts.append(f'<rect x="{corner}" {box} width="{CELL}" fill="none" stroke="#bbbbbb"/>')
        content = held.get(slot)
        if content is None:
            continue
        ranks = [rank for rank in range(num_ranks) if content.ranks >> rank & 1]
        wide = CELL / len(ranks)
        block = content.block % num_ranks
        title = f"<title>block {block} of ranks {', '.join(map(str, ranks))}</title>"
        parts += [
            f'<rect x="{corner + i * wide:g}" {box} width="{wide:g}" '
            f'fill="{COLOURS[rank % len(COLOURS)]}">{title}</rect>'
            for i, rank in enumerate(ranks)
        ]
        parts.append(
            f'<text x="{corner + 8}" y="{y + 16}" text-anchor="middle" font-weight="bold" '
            f'stroke="white" stroke-width="4" paint-order="stroke">{block}</text>'
        )
    return parts


def _messages(program: Program) -> dict[int, list[tuple[tuple[int, int], tuple[int, int]]]]:
    """Return (rank, block) of both ends of all messages, by the round in which they are sent."""
    partner = match(program).partner
    messages: dict[int, list[tuple[tuple[int, int], tuple[int, int]]]] = {}
    for rank, actions in enumerate(program.ranks):
        for position, action in enumerate(actions):
            if program.vocabulary.role(action) == SEND:
                place = partner[Place(rank, position)]
                target = place.rank, program.ranks[place.rank][place.position].unit
                messages.setdefault(action.index, []).append(((rank, action.unit), target))
    return messages


def _arrow(x: int, y: int, source: Sequence[int], target: Sequence[int]) -> str:
    down = target[0] > source[0]
    shift = 20 if down else 15  # arrows up and down the same column stay apart
    edge = (CELL - 4, 4) if down else (4, CELL - 4)
    ends = [
        (x + block * CELL + shift, y + rank * ROW + high)
        for (rank, block), high in zip((source, target), edge, strict=True)
    ]
    path = f"M{ends[0][0]} {ends[0][1]}L{ends[1][0]} {ends[1][1]}"
    return (
        f'<path d="{path}" stroke="white" stroke-width="4"/>'
        f'<path d="{path}" stroke="{ARROW}" stroke-width="1.5" marker-end="url(#to)"/>'
    )
