"""Pictures of the pages on meshes and checkpoints: bytes of each axis by closed forms, and boxes of saved tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from braid.context_parallel import ring_costs
from braid.cost import form
from braid.schedule.bars import COLOURS

TEXT = 'font-family="sans-serif" font-size="12"'
LAYERS, WIDTH, NUMBER = 32, 4096, 2  # of a model with 6.4 billion parameters, in bfloat16
QUERIES_PER_KEY = 4  # heads of queries that share one of keys
RANKS = 8
PARAMETERS = 12 * LAYERS * WIDTH**2
TOKENS = [1 << exponent for exponent in range(10, 23)]
HIGH, WIDE, LEFT, TOP = 320, 620, 70, 20  # pixels
LEAST, MOST = 1e7, 1e13  # bytes

AxisBytes = Callable[[int], float]


def sent_by_axis(ranks: int = RANKS) -> dict[str, AxisBytes]:
    """Bytes that a rank sends in a step for the given tokens of all ranks, if all are along one axis."""
    params = float(NUMBER * PARAMETERS)

    def once(operation: str, nbytes: float) -> float:
        return form("ring", operation, ranks, nbytes).nbytes

    def tp(tokens: int) -> float:
        return 4 * LAYERS * once("all_reduce", NUMBER * tokens * WIDTH)

    def cp(tokens: int) -> float:
        kv_bytes = 2 * NUMBER * tokens // ranks * WIDTH // QUERIES_PER_KEY
        both = ring_costs(ranks, kv_bytes, wide=2)
        return LAYERS * sum(cost.nbytes for cost in both) + once("all_reduce", params)

    return {
        "dp": lambda _tokens: once("all_reduce", params),
        "dp, shard 3": lambda _tokens: (
            2 * once("all_gather", params) + once("reduce_scatter", params)
        ),
        "tp": tp,
        "cp": cp,
        "pp": lambda tokens: 2 * NUMBER * tokens * WIDTH,
    }


def which_axis() -> str:
    """Bytes that a rank sends in a step over the tokens of the step, along each axis alone."""
    parts = []
    for exponent in range(round(math.log10(LEAST)), round(math.log10(MOST)) + 1):
        y = _y(10.0**exponent)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{LEFT + WIDE}" stroke="#dddddd"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_size(10.0**exponent)}</text>'
        )
    for tokens in TOKENS[::2]:
        text = f"{tokens >> 10} Ki" if tokens < 1 << 20 else f"{tokens >> 20} Mi"
        parts.append(f'<path d="M{_x(tokens):.1f} {TOP}V{TOP + HIGH}" stroke="#dddddd"/>')
        parts.append(
            f'<text x="{_x(tokens):.1f}" y="{TOP + HIGH + 16}" text-anchor="middle">{text}</text>'
        )
    parts.append(f'<text x="{LEFT + WIDE}" y="{TOP + HIGH + 34}" text-anchor="end">tokens of a step, on {RANKS} ranks</text>')  # fmt: skip
    for colour, (axis, nbytes) in zip(COLOURS, sent_by_axis().items(), strict=False):
        points = [(_x(tokens), _y(nbytes(tokens))) for tokens in TOKENS]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2.5"/>'
        )
        x, y = points[-1]
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 4:.1f}" fill="{colour}">{axis}</text>')
    return _svg(LEFT + WIDE + 90, TOP + HIGH + 44, parts)


def _x(tokens: float) -> float:
    first, last = math.log2(TOKENS[0]), math.log2(TOKENS[-1])
    return LEFT + WIDE * (math.log2(tokens) - first) / (last - first)


def _y(nbytes: float) -> float:
    share = math.log(nbytes / LEAST) / math.log(MOST / LEAST)
    return TOP + HIGH * (1 - share)


def _size(nbytes: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if nbytes >= scale:
            return f"{nbytes / scale:g} {unit}"
    return f"{nbytes:g} bytes"


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {TEXT}>'
    return "\n".join([head, *parts, "</svg>"]) + "\n"


MESHES: tuple[Callable[[], str], ...] = (which_axis,)
