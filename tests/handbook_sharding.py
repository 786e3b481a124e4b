"""Pictures of the pages on sharding, drawn from layouts, from a recorded step and from cuts of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn

from braid.comm import Group
from braid.parallel.sharding import Bytes, Sharding, ShardingOptions, layouts_of
from braid.parallel.sharding.flat_gradients import FlatGradients
from braid.parallel.sharding.flat_shard import FlatShard
from braid.parallel.sharding.layouts import SHARD, STAGES
from braid.parallel.sharding.partition import assign_owners, by_elements, by_owners
from braid.parallel.sharding.residency import Residency, Unit
from braid.programs.layout import Layout, Mesh
from braid.programs.schedule.bars import (
    BACKWARD,
    COLOURS,
    FORWARD,
    RECEIVE,
    RECOMPUTE,
    REDUCE,
    Bar,
    draw,
)
from handbook_servers import _svg
from support.worlds import run_threads

RANKS = 4
MIXED = Bytes(2, 2, 0, 12)  # bfloat16 with float32 masters and Adam, as the paper counts
PIXELS = 24  # of a byte of each parameter
ROW, LEFT, BETWEEN = 16, 70, 50
WHOLE = "#dddddd"


def zero_memory() -> str:
    """Bytes of each parameter on four ranks, at each stage."""
    mesh = Mesh({SHARD: RANKS})
    everything = Layout(mesh, ((),))
    kinds = {"parameters": MIXED.param, "gradients": MIXED.gradient, "optimizer": MIXED.states}
    parts, top = [], 34
    left = LEFT
    for name, nbytes in kinds.items():
        parts.append(f'<text x="{left}" y="14">{name}, {nbytes:g}</text>')
        left += round(nbytes * PIXELS) + BETWEEN
    for stage in (0, *STAGES):
        layouts = [everything] * 3
        if stage:
            cut = layouts_of(stage, mesh)
            layouts = [cut.storage, cut.gradient, cut.optimizer]
        parts.append(
            f'<text x="4" y="{top + RANKS * ROW / 2 + 4:g}" font-weight="bold">stage {stage}</text>'
        )
        for rank in range(RANKS):
            left = LEFT
            for layout, nbytes in zip(layouts, kinds.values(), strict=True):
                wide = round(nbytes * PIXELS)
                ((begin, end),) = layout.box((wide,), rank)
                colour = WHOLE if begin == 0 and end == wide else COLOURS[rank]
                parts.append(_box(left, top + rank * ROW, wide, "none", f"rank {rank}"))
                parts.append(
                    _box(
                        left + begin,
                        top + rank * ROW,
                        end - begin,
                        colour,
                        f"rank {rank}: {layout}",
                    )
                )
                left += wide + BETWEEN
        live = MIXED.live(stage, RANKS) if stage else sum(MIXED)
        parts.append(
            f'<text x="{left + 4}" y="{top + RANKS * ROW / 2 + 4:g}">{live:g} bytes</text>'
        )
        top += RANKS * ROW + 14
    return _svg(left + 80, top, parts)


def _box(left: int, top: int, wide: int, colour: str, title: str) -> str:
    place = f'x="{left}" y="{top}" width="{wide}" height="{ROW - 2}"'
    return f'<rect {place} fill="{colour}" stroke="#bbbbbb"><title>{title}</title></rect>'


LAYERS, WIDTH = 4, 32
SECONDS = {"F": 1e-3, "B": 2e-3, "gather": 0.7e-3, "reduce": 0.7e-3}  # of a layer
OF_ROOT = 0.5  # of the root's two layers, beside the others


class Event(NamedTuple):
    """What a rank did.

    Attributes:
        kind: F or B of a module, gather or reduce (started), wait (for a gather) or free.
        unit: Name of the unit, or of the module that computes.
        slot: Memory in which the unit is whole.
    """

    kind: str
    unit: str
    slot: str = ""


class Chain(nn.Module):
    """Layers in a ModuleList, which are units, between two that belong to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.utils.skip_init(nn.Linear, WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.utils.skip_init(nn.Linear, WIDTH, WIDTH) for _ in range(LAYERS)
        )
        self.head = nn.utils.skip_init(nn.Linear, WIDTH, WIDTH)
        for param in self.parameters():
            nn.init.constant_(param, 0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        y: torch.Tensor = self.head(x)
        return y


def recorded_step(group: Group) -> list[Event]:
    """Train for two steps at stage 3, and return what this rank did in the second one."""
    model, events = Chain(), list[Event]()
    engine = Sharding(model, group, ShardingOptions(stage=3))
    names = {id(flat): unit.name or "root" for unit in engine.units for flat in unit.flats}
    slots = list({id(flat.slot): None for flat in engine.flats})

    def note(kind: str, flat: FlatShard) -> None:
        slot = "" if flat.slot is None else "abcdef"[slots.index(id(flat.slot))]
        events.append(Event(kind, names[id(flat)], slot))

    def before(name: str) -> Any:
        return lambda _module, _args: events.append(Event("F", name))

    def on_embedded(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda _grad: events.append(Event("B", "embed")))  # type: ignore[no-untyped-call]

    model.embed.register_forward_pre_hook(before("embed"))
    model.embed.register_forward_hook(on_embedded)
    model.head.register_forward_pre_hook(before("head"))
    for unit in engine.units[1:]:
        unit.module.register_forward_pre_hook(before(unit.name))
    for number in range(2):
        if number:
            events.clear()
        with _noting(names, note, events):
            model(torch.ones(2, WIDTH)).square().mean().backward()
        engine.zero_grad()
    return events


@contextmanager
def _noting(
    names: dict[int, str], note: Callable[[str, FlatShard], None], events: list[Event]
) -> Iterator[None]:
    """Note gathers, sums and frees of one rank's vectors."""
    start, finish, release = FlatShard.start_gather, FlatShard.finish_gather, FlatShard.release
    launch, backward = FlatGradients.launch, Residency._before_backward

    def started(flat: FlatShard) -> None:
        if id(flat) in names and flat.full is None:
            note("gather", flat)
        start(flat)

    def waited(flat: FlatShard) -> None:
        if id(flat) in names and not flat.is_whole:
            note("wait", flat)
        finish(flat)

    def freed(flat: FlatShard) -> None:
        if id(flat) in names and flat.full is not None:
            note("free", flat)
        release(flat)

    def summed(gradients: FlatGradients) -> None:
        if id(gradients.flat) in names:
            note("reduce", gradients.flat)
        launch(gradients)

    def entered(residency: Residency, unit: Unit, *call: Any) -> None:
        backward(residency, unit, *call)
        if id(unit.flats[0]) in names:
            events.append(Event("B", unit.name or "head"))

    with (
        patch.object(FlatShard, "start_gather", started),
        patch.object(FlatShard, "finish_gather", waited),
        patch.object(FlatShard, "release", freed),
        patch.object(FlatGradients, "launch", summed),
        patch.object(Residency, "_before_backward", entered),
    ):
        yield


def fsdp_step() -> str:
    """One step at stage 3: what is computed and sent, and which unit is whole; times are assumed."""
    (events,) = run_threads(1, recorded_step)
    units = ["root", *(f"layers.{index}" for index in range(LAYERS))]
    lanes = ["compute", "network", *units]
    bars: list[Bar] = []
    now_s = free_s = 0.0  # of the computation, of the network
    arrives: dict[str, float] = {}
    holds: dict[str, tuple[float, str]] = {}
    for event in events:
        kind, unit = event.kind, event.unit
        if kind in {"gather", "reduce"}:
            begin_s = max(now_s, free_s)
            free_s = begin_s + SECONDS[kind]
            short = unit.removeprefix("layers.")
            colour = RECEIVE if kind == "gather" else REDUCE
            bars.append(Bar(1, begin_s, free_s, colour, f"{kind} {unit}", short))
            if kind == "gather":
                arrives[unit], holds[unit] = free_s, (now_s, event.slot)
        elif kind == "wait":
            now_s = max(now_s, arrives[unit])
        elif kind == "free":
            begin_s, slot = holds.pop(unit)
            lane, whole_s = lanes.index(unit), min(arrives[unit], now_s)
            title = f"{unit} in slot {slot}"
            bars.append(Bar(lane, begin_s, whole_s, RECEIVE, f"{title}: on its way"))
            bars.append(Bar(lane, whole_s, now_s, RECOMPUTE, f"{title}: whole", slot))
        else:
            seconds = SECONDS[kind] * (1 if unit.startswith("layers") else OF_ROOT)
            colour = FORWARD if kind == "F" else BACKWARD
            short = unit.removeprefix("layers.")[:1]
            bars.append(Bar(0, now_s, now_s + seconds, colour, f"{kind} {unit}", kind + short))
            now_s += seconds
    legend = {
        "forward": FORWARD,
        "backward": BACKWARD,
        "gather": RECEIVE,
        "whole": RECOMPUTE,
        "sum": REDUCE,
    }
    return draw(lanes, bars, max(bar.end_s for bar in bars), legend=legend)


BLOCK = {  # parameters of a transformer's block -> shape
    "attend": (96, 32),
    "project": (32, 32),
    "up": (128, 32),
    "up.bias": (128,),
    "down": (32, 128),
    "down.bias": (32,),
}
WIDE, MARGIN = 690, 100  # pixels of a flat vector, and before it


def pieces_of_optimizers() -> str:
    """A block as a flat vector on four ranks, cut by elements and by whole parameters."""
    numels = [math.prod(shape) for shape in BLOCK.values()]
    cuts = {
        "by elements": by_elements(numels, RANKS),
        "whole": by_owners(numels, assign_owners(numels, RANKS), RANKS),
    }
    parts, top = [], 34
    for name, partition in cuts.items():
        scale = WIDE / partition.length
        parts.append(f'<text x="4" y="{top + 20}" font-weight="bold">{name}</text>')
        for rank, (low, high) in enumerate(pairwise(partition.bounds)):
            box = f'x="{MARGIN + low * scale:.1f}" y="{top}" width="{(high - low) * scale:.1f}"'
            title = f"<title>rank {rank}: elements {low} to {high}</title>"
            parts.append(f'<rect {box} height="28" fill="{COLOURS[rank]}">{title}</rect>')
            middle = MARGIN + (low + high) / 2 * scale
            parts.append(f'<text x="{middle:.1f}" y="{top + 19}" text-anchor="middle" fill="white">{high - low}</text>')  # fmt: skip
        for param, start, numel in zip(BLOCK, partition.starts, numels, strict=True):
            x = MARGIN + start * scale
            parts.append(
                f'<path d="M{x:.1f} {top - 4}V{top + 32}" stroke="black"><title>{param}</title></path>'
            )
            if numel * scale > 7 * len(param):
                parts.append(f'<text x="{x + 3:.1f}" y="{top - 6}">{param}</text>')
        top += 74
    for rank in range(RANKS):
        x = MARGIN + rank * 90
        parts.append(
            f'<rect x="{x}" y="{top - 18}" width="12" height="12" fill="{COLOURS[rank]}"/>'
        )
        parts.append(f'<text x="{x + 17}" y="{top - 8}">rank {rank}</text>')
    return _svg(WIDE + MARGIN + 10, top + 4, parts)


SHARDING: tuple[Callable[[], str], ...] = (zero_memory, fsdp_step, pieces_of_optimizers)
