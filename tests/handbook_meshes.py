"""Pictures of the pages on meshes and checkpoints: bytes of each axis by closed forms, and boxes of saved tensors."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable

from torch import nn

from braid.checkpoint import ReplicatedSnapshot, Snapshot, save, training_tensors
from braid.checkpoint.loading import open_last
from braid.comm import Group
from braid.parallel.context_parallel import ring_costs
from braid.parallel.hybrid import HybridParallel
from braid.programs.cost import form
from braid.programs.layout import Mesh
from braid.programs.schedule.bars import COLOURS
from handbook_servers import _svg
from support.worlds import run_threads

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


UNIT = 3  # pixels of an element
INPUT, INNER = 8, 24  # of the perceptrons in the picture of checkpoints
SAVED = {  # title -> mesh, shard
    "2 replicas": ("dp=2", 0),
    "dp=3, shard 3": ("dp=3", 3),
    "pp=2, tp=2": ("pp=2,tp=2", 0),
}


class Perceptrons(nn.Module):
    """Two perceptrons in a ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.utils.skip_init(nn.Linear, INPUT, INNER, bias=False),
                nn.Tanh(),
                nn.utils.skip_init(nn.Linear, INNER, INPUT, bias=False),
            )
            for _ in range(2)
        )
        for param in self.parameters():
            nn.init.constant_(param, 0.1)


def _save(group: Group, mesh: str, shard: int, directory: str) -> None:
    """Save a model that is divided over a mesh."""
    model = Perceptrons()
    rows = list(model.layers)
    plan = {r"\d\.0$": "column", r"\d\.2$": "row"}
    snapshot: Snapshot = ReplicatedSnapshot(
        training_tensors(model, None), rank=group.rank, size=group.size
    )
    if shard or "tp" in mesh:
        hybrid = HybridParallel(model, mesh, group, layers=rows, plan=plan, shard=shard)
        snapshot, _ = hybrid.checkpoint(None)
    save(directory, snapshot, step=1, group=group)


def boxes_of_checkpoints() -> str:
    """Boxes of a model's tensors, in the colour of the rank that has written them, on three meshes."""
    parts, top = [], 24
    for title, (mesh, shard) in SAVED.items():
        with tempfile.TemporaryDirectory() as directory:
            run_threads(Mesh.parse(mesh).size, _save, mesh, shard, directory)
            manifest = open_last(directory).manifest
        files = sorted(manifest.files)
        parts.append(f'<text x="4" y="{top + 40}" font-weight="bold">{title}</text>')
        left = 120
        for name, entry in manifest.tensors.items():
            if not shard and top == 24:
                parts.append(
                    f'<text x="{left}" y="{top - 10}">{name.removeprefix("model/")}</text>'
                )
            for piece in entry.pieces:
                rank = files.index(piece.file)
                x, y = left + UNIT * piece.offset[1], top + UNIT * piece.offset[0]
                high, wide = (UNIT * size for size in piece.shape)
                box = f'x="{x}" y="{y}" width="{wide}" height="{high}" fill="{COLOURS[rank]}"'
                about = f"{name} {list(piece.offset)} + {list(piece.shape)}: {piece.file}"
                parts.append(f'<rect {box} stroke="white"><title>{about}</title></rect>')
            left += UNIT * max(entry.shape[1], INNER) + 50
        top += UNIT * INNER + 26
    for rank in range(4):
        x = 120 + rank * 90
        parts.append(f'<rect x="{x}" y="{top - 8}" width="12" height="12" fill="{COLOURS[rank]}"/>')
        parts.append(f'<text x="{x + 17}" y="{top + 2}">rank {rank}</text>')
    return _svg(left, top + 12, parts)


MESHES: tuple[Callable[[], str], ...] = (which_axis, boxes_of_checkpoints)
