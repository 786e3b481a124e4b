"""Trainings that are saved by one engine and continued by another, against one process without a break.

A kind is a model or optimizer with something that a checkpoint could lose: a rate that is a tensor, an extra state of a
module, a frozen layer, tied weights, a scheduler. A training of this kind takes two steps under one engine, is saved, and
takes three more under another engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

import braid
from braid.comm import Group
from braid.parallel import sharding
from braid.parallel.hybrid import HybridParallel
from engine_habits import PLAN, Block, Net, batch, loss_of

BREAK, END = 2, 5
Load = Callable[[Any, torch.optim.Optimizer, dict[str, Any]], None]


class Scaled(Block):
    """A block with a factor for its output, which is an extra state."""

    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * super().forward(x)

    def get_extra_state(self) -> dict[str, Any]:
        return {"factor": self.factor, "more": torch.ones(2)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.factor = state["factor"]


def model_of(kind: str) -> Net:
    model = Net()
    if kind == "extra state":
        for block in model.blocks:
            block.__class__ = Scaled
    if kind == "buffer":
        for block in model.blocks:
            block.register_buffer("shift", torch.zeros((), dtype=torch.float64))
            block.up.register_forward_hook(lambda _m, _x, y, block=block: y + block.shift)
    if kind == "tied":
        model.blocks[3].up.weight = model.blocks[0].up.weight
    if kind == "unused":
        model.blocks[2].register_parameter("spare", nn.Parameter(torch.ones(3).double()))
    if "frozen" in kind:
        model.blocks[1].requires_grad_(requires_grad=False)
    return model


def optimizer_of(kind: str, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    params = dict(named)
    if kind == "frozen, left out":
        params = {name: param for name, param in params.items() if param.requires_grad}
    if kind == "two groups":
        biases = [param for name, param in params.items() if name.endswith("bias")]
        rest = [param for name, param in params.items() if not name.endswith("bias")]
        groups = [{"params": rest, "weight_decay": 0.1}, {"params": biases, "lr": 0.01}]
        return torch.optim.AdamW(groups, lr=0.05)
    if kind == "tensor as rate":
        return torch.optim.AdamW(params.values(), lr=torch.tensor(0.05), foreach=False)
    if kind == "extra state":
        return torch.optim.SGD(params.values(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(params.values(), lr=0.05, amsgrad=kind == "frozen")


KINDS = (
    *("two groups", "tensor as rate", "extra state", "buffer", "tied", "unused", "frozen"),
    *("frozen, left out", "scheduler"),
)


@dataclass
class Training:
    """A training under an engine.

    Attributes:
        model: The model of the program.
        optimizer: Its optimizer.
        saved: What `braid.save` takes as the model.
        backward: Computes the gradients of a step.
        zero: Drops gradients.
        weights: Returns the whole weights; the last call.
        parts: Further objects to save.
    """

    model: Net
    optimizer: torch.optim.Optimizer
    saved: Any
    backward: Callable[[int], object]
    zero: Callable[[], None]
    weights: Callable[[], dict[str, torch.Tensor]]
    parts: dict[str, Any] = field(default_factory=dict)

    def steps(self, kind: str, numbers: range) -> None:
        for number in numbers:
            if number == 1 and kind == "extra state":
                for block in self.model.blocks:
                    block.factor = 0.5
            if number == 1 and kind == "buffer":
                for block in self.model.blocks:
                    block.shift.add_(0.5)
            self.backward(number)
            self.optimizer.step()
            self.zero()
            for part in self.parts.values():
                part.step()


def _parts(kind: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    is_scheduled = kind == "scheduler"
    return {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)} if is_scheduled else {}


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def begin(engine: str, kind: str, group: Group | None, load: Load | None = None) -> Training:
    """Return a training; `load` gets its model, optimizer and parts at the place for the engine."""
    if group is not None and engine.startswith("mesh"):
        return _begin_on_mesh(*engine.split()[1:], kind, group, load)
    model = model_of(kind)
    call: Any = model
    if engine == "fsdp":
        call = braid.FullyShardedDataParallel(model, group, units=list(model.blocks))
    elif engine == "ddp":
        call = braid.DistributedDataParallel(model, process_group=group)
    optimizer = optimizer_of(kind, model.named_parameters())
    zero = optimizer.zero_grad
    if engine.startswith("stage"):
        stage = int(engine[-1])
        zero = sharding.shard_optimizer(
            optimizer, model, process_group=group, stage=stage
        ).zero_grad
    shards = [0, 1] if group is None else [group.rank]

    def backward(step: int) -> None:
        for shard in shards:
            (loss_of(call(batch(step, shard))) / len(shards)).backward()

    parts = _parts(kind, optimizer)
    if load is not None:
        load(call, optimizer, parts)

    def weights() -> dict[str, torch.Tensor]:
        sharded = sharding.sharding_of(model)
        with contextlib.nullcontext() if sharded is None else sharded.gathered():
            return _weights(model)

    return Training(model, optimizer, call, backward, zero, weights, parts)


def _begin_on_mesh(mesh: str, stage: str, kind: str, group: Group, load: Load | None) -> Training:
    model = model_of(kind)
    optimizer = optimizer_of(kind, model.named_parameters())
    parts = _parts(kind, optimizer)
    if load is not None and int(stage):  # later it would be sharded already
        load(model, optimizer, parts)
    hybrid = HybridParallel(
        *(model, mesh, group),
        layers=list(model.blocks),
        num_microbatches=2,
        plan=PLAN if "tp" in mesh else None,
        shard=int(stage),
    )
    hybrid.attach(optimizer)
    if load is not None and not int(stage):
        load(hybrid, optimizer, parts)
    replicas = hybrid.groups["dp"]
    places = [replicas.rank] if replicas.size > 1 else [0, 1]

    def backward(step: int) -> None:
        x = torch.cat([batch(step, place) for place in places])
        hybrid.step(x, x, loss=lambda y, _: loss_of(y))

    def weights() -> dict[str, torch.Tensor]:
        hybrid.make_whole()
        return _weights(model)

    return Training(model, optimizer, hybrid, backward, hybrid.zero_grad, weights, parts)


ENGINES = (
    *("ddp", "stage 1", "mesh pp=2 0", "stage 3", "mesh dp=2 1", "fsdp", "mesh tp=2 0"),
    *("mesh dp=2 3", "stage 2", "mesh pp=2 1", "mesh dp=2 0"),
)


def reference(kind: str) -> dict[str, torch.Tensor]:
    training = begin("one", kind, None)
    training.steps(kind, range(END))
    return training.weights()


def _load(
    where: str, group: Group, model: Any, optimizer: torch.optim.Optimizer, parts: dict[str, Any]
) -> None:
    assert braid.load(where, model=model, optimizer=optimizer, group=group, **parts) == BREAK


def problems(group: Group, kind: str, directory: str) -> list[str]:
    """Save under each engine, load under it and the next one; return what differs from one process."""
    torch.set_num_threads(1)
    expected, found = reference(kind), []
    for place, engine in enumerate(ENGINES):
        where = f"{directory}/{engine}".replace(" ", "-")
        training = begin(engine, kind, group)
        training.steps(kind, range(BREAK))
        braid.save(
            where,
            model=training.saved,
            optimizer=training.optimizer,
            step=BREAK - 1,
            group=group,
            **training.parts,
        )
        for other in (engine, ENGINES[(place + 1) % len(ENGINES)]):
            training = begin(other, kind, group, partial(_load, where, group))
            training.steps(kind, range(BREAK, END))
            weights = training.weights()
            wrong = [n for n, w in expected.items() if not torch.allclose(w, weights[n], atol=1e-9)]
            found += [f"{engine} -> {other}: {wrong}"] if wrong else []
    return found
