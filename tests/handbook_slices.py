"""Pictures of the pages on divided layers, each drawn from layouts, plans, groups or the pass that divides models."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional

from braid.comm.redistribute import plan
from braid.parallel.tensor_parallel import Shard
from braid.parallel.tensor_parallel.insertion import strategies_in
from braid.parallel.tensor_parallel.insertion.annotations import annotated
from braid.parallel.tensor_parallel.insertion.by_graph import AXIS
from braid.parallel.tensor_parallel.insertion.capture import capture
from braid.parallel.tensor_parallel.insertion.divided import insert
from braid.parallel.tensor_parallel.insertion.pairing import pair
from braid.parallel.tensor_parallel.insertion.records import (
    ExplanationRow,
    InsertionOptions,
    Scheme,
)
from braid.programs.layout import Layout, Mesh, place
from braid.programs.layout.placement import PlacedAxis
from braid.programs.schedule.bars import COLOURS
from braid.programs.topology import Cluster, Level
from handbook_servers import _svg

RANKS, LAYERS = 4, 4
SIDE, GAP, NAME = 88, 74, 110  # pixels: a matrix, between two, a way's name


def cuts_of_a_model() -> str:
    """Four matrices on four ranks, cut four ways; between them what is sent forward."""
    mesh = Mesh({AXIS: RANKS})
    column, row, whole = "- | tp", "tp | -", "- | -"
    ways = {
        "layers": [whole] * LAYERS,
        "columns": [column] * LAYERS,
        "rows": [row] * LAYERS,
        "columns, rows": [column, row] * (LAYERS // 2),
    }
    parts, top = [], 24
    for name, layouts in ways.items():
        parts.append(f'<text x="4" y="{top + SIDE / 2:.0f}" font-weight="bold">{name}</text>')
        for index, text in enumerate(layouts):
            left = NAME + index * (SIDE + GAP)
            ranks = [index * RANKS // LAYERS] if name == "layers" else range(RANKS)
            parts += _matrix(left, top, Layout.parse(mesh, text), ranks)
            following = layouts[index + 1] if index + 1 < LAYERS else None
            sent = _sent_after(mesh, text, following) if name != "layers" else "send"
            if sent and (name != "layers" or following):
                parts += _arrow(left + SIDE, top + SIDE // 2, sent)
        top += SIDE + 26
    legend = [
        f'<rect x="{NAME + rank * 90}" y="{top - 8}" width="12" height="12" fill="{COLOURS[rank]}"/>'
        f'<text x="{NAME + rank * 90 + 17}" y="{top + 2}">rank {rank}</text>'
        for rank in range(RANKS)
    ]
    return _svg(NAME + LAYERS * (SIDE + GAP), top + 12, [*parts, *legend])


def _matrix(left: int, top: int, layout: Layout, ranks: Sequence[int]) -> list[str]:
    """Draw a matrix [in, out], each part in the colour of its rank."""
    drawn = []
    for rank in ranks:
        (y0, y1), (x0, x1) = layout.box((SIDE, SIDE), rank)
        place_at = f'x="{left + x0}" y="{top + y0}" width="{x1 - x0}" height="{y1 - y0}"'
        title = f"<title>rank {rank}: {layout}</title>"
        drawn.append(f'<rect {place_at} fill="{COLOURS[rank]}" stroke="white">{title}</rect>')
    return drawn


def _sent_after(mesh: Mesh, weight: str, following: str | None) -> str:
    """The planner's collectives from the output of a layer to the input of the next; tanh needs sums."""
    output = Layout.parse(mesh, "- | tp" if weight == "- | tp" else "- | - ; partial tp")
    wanted = Layout.parse(
        mesh, "- | tp" if (weight, following) == ("- | tp", "tp | -") else "- | -"
    )
    return ", ".join(step.move for step in plan((64, 64), 4, output, wanted).steps)


def _arrow(x: int, y: int, label: str) -> list[str]:
    path = f'<path d="M {x + 6} {y} H {x + GAP - 6}" stroke="#c33" stroke-width="2"/>'
    return [path, f'<text x="{x + GAP // 2}" y="{y - 6}" text-anchor="middle" fill="#c33" font-size="11">{label}</text>']  # fmt: skip


class TransformerLayer(nn.Module):
    """A layer of attention and a perceptron, which knows nothing of ranks."""

    def __init__(self, width: int = 1024, heads: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


SUBLAYERS = {  # name in the picture, and the value of the graph whose layout it shows
    "attention": {
        "norm": "parts_layer_norm_f",
        "qkv": "linear",
        "attention": "scaled_dot_product_attention",
        "out": "linear_1",
        "all-reduce": "parts_linear_1_all_reduce",
    },
    "perceptron": {
        "norm": "parts_layer_norm_1_f",
        "up": "linear_2",
        "gelu": "gelu",
        "down": "linear_3",
        "all-reduce": "parts_linear_3_all_reduce",
    },
}
HOLDS = {
    "norm": "whole on all ranks",
    "qkv": "columns",
    "attention": "4 heads each",
    "out": "rows: partial sums",
    "up": "columns",
    "gelu": "4 parts",
    "down": "rows: partial sums",
    "all-reduce": "whole on all ranks",
}
BOX, BETWEEN, PART = 96, 32, 22  # pixels: a step, between two, a rank's part of it


def megatron_layer() -> str:
    """A layer of a transformer on four ranks, as the pass divides it: boxes have a stripe per rank."""
    with torch.device("meta"):
        model, x = TransformerLayer(), torch.empty(8, 512, 1024, requires_grad=True)
    rows = {row.node: row for row in rows_of(model, x, RANKS)}
    parts, top = [], 46
    for name, steps in SUBLAYERS.items():
        parts += _sublayer(top, name, [(text, rows[node]) for text, node in steps.items()])
        top += 190
    for rank in range(RANKS):
        x_at = 60 + rank * 90
        box = f'x="{x_at}" y="{top - 46}" width="12" height="12"'
        parts.append(f'<rect {box} fill="{COLOURS[rank]}"/>')
        parts.append(f'<text x="{x_at + 17}" y="{top - 36}">rank {rank}</text>')
    return _svg(60 + 5 * (BOX + BETWEEN) + 60, top - 20, parts)


def _sublayer(top: int, name: str, steps: Sequence[tuple[str, ExplanationRow]]) -> list[str]:
    """Draw the steps of a sub-layer, its sum with the input above them, and its messages below."""
    middle, end = top + 2 * PART, 60 + len(steps) * (BOX + BETWEEN)
    parts = [f'<text x="4" y="{top - 26}" font-weight="bold">{name}</text>']
    parts.append(f'<text x="14" y="{middle + 4}">{"x" if name == "attention" else "y"}</text>')
    grey = 'stroke="#777" stroke-width="1.5" fill="none"'
    parts.append(
        f'<path d="M26 {middle}H60M44 {middle}V{top - 14}H{end + 12}V{middle - 12}" {grey}/>'
    )
    for number, (text, row) in enumerate(steps):
        x = 60 + number * (BOX + BETWEEN)
        is_whole = not any(row.layout.dims) and text in {"norm", "all-reduce"}
        for rank in range(1 if is_whole else RANKS):
            high = RANKS * PART if is_whole else PART
            colour = "#dddddd" if is_whole else COLOURS[rank]
            pale = ' fill-opacity="0.5"' if "partial" in HOLDS[text] else ""
            box = f'x="{x}" y="{top + rank * PART}" width="{BOX}" height="{high}"'
            parts.append(f'<rect {box} fill="{colour}" stroke="white"{pale}/>')
        label = f'x="{x + BOX // 2}" text-anchor="middle"'
        halo = 'stroke="white" stroke-width="4" paint-order="stroke"'
        parts.append(f'<text {label} y="{middle + 4}" font-weight="bold" {halo}>{text}</text>')
        parts.append(
            f'<text {label} y="{top + RANKS * PART + 14}" font-size="11">{HOLDS[text]}</text>'
        )
        for sent in row.collectives:
            way = (
                "all-reduce of gradients, in backward"
                if sent.backward
                else "all-reduce, in forward"
            )
            parts.append(
                f'<text {label} y="{top + RANKS * PART + 32}" font-size="11" fill="#c33">{way}</text>'
            )
        parts.append(f'<path d="M{x + BOX} {middle}h{BETWEEN}" {grey}/>')
    parts.append(f'<circle cx="{end + 12}" cy="{middle}" r="12" {grey}/>')
    parts.append(
        f'<text x="{end + 12}" y="{middle + 5}" text-anchor="middle" font-size="16">+</text>'
    )
    parts.append(f'<path d="M{end + 24} {middle}h20" {grey}/>')
    return parts


def rows_of(model: nn.Module, x: torch.Tensor, ranks: int) -> list[ExplanationRow]:
    """Values and collectives of a model that is divided by its graph, without its ranks."""
    captured = capture(model, (x,), {}, {})
    mesh, options = Mesh({AXIS: ranks}), InsertionOptions()
    layouts, _ = pair(captured.module.graph, mesh, AXIS, options)
    return insert(captured, Scheme(mesh, layouts, options, {})).rows


HOSTS = Cluster(  # of 8 GPUs with NVLink, each with one card of 400 Gbit/s
    [
        Level(name="host", size=8, latency_s=2e-6, bytes_per_s=450e9),
        Level(name="rack", size=2, latency_s=5e-6, bytes_per_s=50e9),
    ]
)
CELL = 28  # pixels of a rank


def groups_on_hosts() -> str:
    """Groups of 16 ranks on two hosts, in the best order of axes and in the worst."""
    placement = place(Mesh({"tp": 4, "dp": 2, "pp": 2}), HOSTS)
    parts, top = [], 20
    for name, order in (("best", placement.best), ("worst", placement.worst)):
        ms = f"{order.seconds * 1e3:.4g} ms a step"
        parts.append(f'<text x="4" y="{top}" font-weight="bold">{name}: {order.mesh}, {ms}</text>')
        for axis, cost in reversed(list(order.axes.items())):
            top += CELL + 6
            parts.append(f'<text x="4" y="{top}">{axis}</text>')
            parts += _ranks(top - CELL + 10, order.mesh, axis)
            parts.append(f'<text x="{_place(16) + 8}" y="{top}" fill="#c33">{_spread(cost)}</text>')
        top += 40
    return _svg(_place(16) + 250, top - 20, parts)


def _place(rank: int) -> int:
    """Left edge of a rank; hosts stand apart."""
    return 40 + rank * CELL + rank // HOSTS.levels[0].size * 16


def _ranks(top: int, mesh: Mesh, axis: str) -> list[str]:
    """Draw the ranks of a row, each with the colour and the number of its group along an axis."""
    groups = sorted({mesh.peers(axis, rank) for rank in range(mesh.size)})
    drawn = []
    for number, ranks in enumerate(groups):
        colour = COLOURS[number % len(COLOURS)]
        for rank in ranks:
            box = f'x="{_place(rank)}" y="{top}" width="{CELL - 2}" height="{CELL - 2}"'
            title = f"<title>rank {rank}, {axis} {list(ranks)}</title>"
            drawn.append(f'<rect {box} fill="{colour}" fill-opacity="0.6">{title}</rect>')
            drawn.append(f'<text x="{_place(rank) + CELL // 2 - 1}" y="{top + 19}" text-anchor="middle">{number}</text>')  # fmt: skip
    return drawn


def _spread(cost: PlacedAxis) -> str:
    return f"{' x '.join(cost.spread)}: {cost.traffic.operation}, {cost.seconds * 1e3:.4g} ms"


class TwoProducts(nn.Module):
    """Y = X W with rows of X in four parts, then Z = Y V with columns of V in four parts."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = Shard(torch.matmul, ((4, 1), (1, 1)))
        self.second = Shard(torch.matmul, ((1, 1), (1, 4)))
        self.w = nn.Parameter(torch.empty(width, width))
        self.v = nn.Parameter(torch.empty(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, self.w), self.v)


def one_gather() -> str:
    """Two products with different splits, and what the pass inserts between them."""
    with torch.device("meta"):
        model, x = TwoProducts(), torch.empty(64, 64, requires_grad=True)
    captured, strategies = capture(model, (x,), {}, {}), strategies_in(model, None)
    mesh, _ = annotated(captured.module.graph, strategies, RANKS)
    scheme = Scheme(mesh, {}, InsertionOptions(gather_outputs=False), strategies)
    rows = insert(captured, scheme).rows
    gap, left, top = 43, 10, 46
    parts = []
    for name, sign, row in zip("XWYYVZ", ("x", "=", "", "x", "=", ""), rows, strict=True):
        whole = not any(row.layout.dims)
        parts += _matrix(left, top, row.layout, range(1 if whole else RANKS))
        if whole:
            parts[-1] = parts[-1].replace(COLOURS[0], "#dddddd").replace("rank 0", "all ranks")
        parts.append(f'<text x="{left}" y="{top - 6}" font-weight="bold">{name}</text>')
        parts.append(f'<text x="{left}" y="{top + SIDE + 16}">{row.layout}</text>')
        for number, sent in enumerate(row.collectives):
            colour, way = ("#777", "backward: ") if sent.backward else ("#c33", "")
            parts.append(f'<text x="{left}" y="{top + SIDE + 32 + 16 * number}" fill="{colour}">{way}{sent.name}</text>')  # fmt: skip
        parts.append(f'<text x="{left + SIDE + gap / 2 - 4:.0f}" y="{top + SIDE / 2:.0f}" font-size="18">{sign}</text>')  # fmt: skip
        left += SIDE + gap
    return _svg(left, top + SIDE + 60, parts)


SLICES: tuple[Callable[[], str], ...] = (
    cuts_of_a_model,
    megatron_layer,
    groups_on_hosts,
    one_gather,
)
