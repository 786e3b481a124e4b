"""Picture of the page on the parts of an optimizer: bytes that ranks of real trainings have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from braid.comm import Group
from braid.parallel.data_parallel import DiLoCo, DistributedDataParallel
from braid.parallel.sharding import live_bytes, shard_optimizer
from braid.programs.schedule.bars import COLOURS
from handbook_servers import GREY, _line, _svg, _text
from support.worlds import run_threads

METHODS = ("one process", "DDP", "DiLoCo", "ZeRO 1", "ZeRO 2", "ZeRO 3")
PARTS = ("parameters", "gradients", "state", "copies")
NUM_RANKS, WIDTH = 4, 64


def _bytes_of_parts(group: Group, method: str) -> list[float]:
    """Train Adam for four steps; return bytes per parameter of each part on this rank."""
    model = nn.Sequential(
        *(nn.utils.skip_init(nn.Linear, WIDTH, WIDTH, bias=False) for _ in range(2))
    )
    for param in model.parameters():
        nn.init.constant_(param, 0.01)
    net: nn.Module = model
    optimizer: Any = torch.optim.Adam(model.parameters(), foreach=False)
    sharding = None
    if method == "DDP":
        net = DistributedDataParallel(model, process_group=group)
    elif method == "DiLoCo":
        optimizer = DiLoCo(optimizer, period=2, process_group=group)
    elif method.startswith("ZeRO"):
        stage = int(method[-1])
        sharding = shard_optimizer(optimizer, model, stage=stage, process_group=group)
    for _ in range(4):
        optimizer.zero_grad()
        net(torch.ones(2, WIDTH) * (group.rank + 1)).sum().backward()
        optimizer.step()
    num_params = 2 * WIDTH**2
    if sharding is not None:
        held = live_bytes(sharding, optimizer)
        return [n / num_params for n in (held.parameters, held.gradients, held.states, 0)]
    params = [param.data for param in model.parameters()]
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    state = _tensors(dict(optimizer.state))
    known = _memory((*params, *gradients, *state)).keys()
    copies = [n for at, n in _memory(_tensors(vars(optimizer))).items() if at not in known]
    sizes = (*(_memory(tensors).values() for tensors in (params, gradients, state)), copies)
    return [sum(nbytes) / num_params for nbytes in sizes]


def _memory(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return addresses and bytes of the memory of tensors."""
    memory = [x.untyped_storage() for x in tensors]
    return {each.data_ptr(): each.nbytes() for each in memory}


def _tensors(value: Any, depth: int = 6) -> list[torch.Tensor]:
    """Return the tensors in containers and objects of braid."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        inside: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple):
        inside = value
    elif type(value).__module__.startswith("braid.parallel"):
        inside = vars(value).values() if hasattr(value, "__dict__") else ()
    else:
        return []
    return [x for each in inside for x in _tensors(each, depth - 1)] if depth else []


def parts_of_optimizers() -> str:
    """Bytes per parameter of the parts of Adam on each of four ranks."""
    wide, lane, left, top = 560, 30, 90, 34
    most = 28.0

    def x(nbytes: float) -> float:
        return left + wide * nbytes / most

    parts, at = [], float(left)
    for colour, name in zip(COLOURS, PARTS, strict=False):
        parts.append(f'<rect x="{at}" y="8" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(at + 17, 18, name))
        at += 110
    bottom = top + lane * len(METHODS)
    for tick in range(0, 29, 4):
        parts.append(_line(f"M{x(tick):.1f} {top}V{bottom}", GREY))
        parts.append(_text(x(tick), bottom + 16, str(tick), "middle"))
    parts.append(_text(x(most), bottom + 34, "bytes per parameter, on one rank", "end"))
    for row, method in enumerate(METHODS):
        y = top + lane * row
        ranks = 1 if method == "one process" else NUM_RANKS
        held = run_threads(ranks, _bytes_of_parts, method)[0]
        parts.append(_text(left - 8, y + 20, method, "end"))
        begin = 0.0
        for colour, name, nbytes in zip(COLOURS, PARTS, held, strict=False):
            parts.append(
                f'<rect x="{x(begin):.1f}" y="{y + 5}" width="{x(nbytes) - left:.1f}" '
                f'height="{lane - 10}" fill="{colour}"><title>{name}: {nbytes:.2f}</title></rect>'
            )
            begin += nbytes
        parts.append(_text(x(begin) + 6, y + 20, f"{begin:.0f}"))
    return _svg(left + wide + 50, bottom + 44, parts)
