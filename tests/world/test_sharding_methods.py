"""Methods other than forward of sharded models: with whole parameters where registered, else refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from sharding_models import OPTIMIZERS, accumulate, differing, values
from torch import nn
from training import linear, said_by

from braid import FullyShardedDataParallel
from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.sharding import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

ADAMW = OPTIMIZERS["adamw"][0]
REFUSED = "register_fsdp_forward_method(model, "


class Scorer(nn.Module):
    """Layers, and methods beside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(linear(4, 4) for _ in range(2))
        self.head = linear(4, 2)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x

    def score(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.encode(x))
        return scores

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(x).softmax(1)


def sharded(group: Group, face: str) -> Any:
    model = Scorer()
    if face == "wrapper":
        return FullyShardedDataParallel(model, group)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model, process_group=group)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: Any, rank: int, step: int) -> torch.Tensor:
    part: torch.Tensor = (model.score if step % 2 else model)(batch(rank, step)).square().mean()
    return part


def _trained(group: Group, face: str) -> dict[str, torch.Tensor]:
    model = sharded(group, face)
    register_fsdp_forward_method(model, "score")
    optimizer = ADAMW(model.parameters())
    for step in (1, 0, 3):  # the first one divides a model of fully_shard
        loss_of(model, group.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    with model.gathered():
        return values(model)


@pytest.mark.parametrize("face", ["wrapper", "fully_shard"])
def test_a_registered_method_trains_with_the_bits_of_one_process(world, face):
    model = Scorer()
    optimizer = ADAMW(model.parameters())
    for step in (1, 0, 3):
        accumulate(model, [lambda r=rank, s=step: loss_of(model, r, s) for rank in range(2)])
        optimizer.step()
        optimizer.zero_grad()
    for found in world(2, _trained, face):
        own = {name.removeprefix("module."): x for name, x in found.items()}
        assert differing(own, values(model)) == []


def _refused(group: Group, face: str) -> list[str]:
    model = sharded(group, face)
    said = [said_by(lambda: model.score(batch(0, 0)), ConfigError)]
    inner = model.module if face == "wrapper" else model
    said.append(said_by(lambda: inner.head(batch(0, 0)), ConfigError))
    said.append(said_by(lambda: register_fsdp_forward_method(model, "rate"), ConfigError))
    if face == "wrapper":
        said.append(said_by(lambda: register_fsdp_forward_method(inner.head, "forward")))
    model(batch(group.rank, 0)).sum().backward()  # goes on
    with model.gathered(), torch.no_grad():
        assert torch.equal(model.score(batch(0, 0)), Scorer().score(batch(0, 0)))
    return said


@pytest.mark.parametrize("face", ["wrapper", "fully_shard"])
def test_a_layer_does_not_compute_with_a_piece(world, face):
    for first, second, missing, *others in world(2, _refused, face):
        assert first.startswith("ConfigError: Linear uses 'head.")
        assert REFUSED in first
        assert second == first
        assert "has no method 'rate'" in missing
        assert all("is not a sharding unit of the model" in text for text in others)


def _units(group: Group) -> Any:
    model = sharded(group, "fully_shard")
    x = batch(0, 0)
    before = model.encode(x)  # which runs units only
    names = [unit.name for unit in model.sharding.units]
    return before.detach().clone(), names


def test_a_block_that_runs_first_is_still_a_unit_of_its_model(world):
    for encoded, names in world(2, _units):
        assert torch.equal(encoded, Scorer().encode(batch(0, 0)))
        assert names == ["", "blocks.0", "blocks.1"]


def _after_a_step(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = FullyShardedDataParallel(Scorer(), group, mp_policy=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.encode(batch(0, 0)).sum().backward()
    optimizer.step()
    alone = model.module.blocks[1](batch(0, 0)).detach().clone()
    whole = model.state_dict()
    layer = copy.deepcopy(linear(4, 4))
    layer.load_state_dict({name: whole[f"blocks.1.{name}"] for name in ("weight", "bias")})
    return alone, layer.bfloat16()(batch(0, 0).bfloat16())


def test_a_unit_outside_of_the_models_forward_has_the_newest_values(world):
    for alone, expected in world(2, _after_a_step):
        assert torch.equal(alone, expected)


def test_a_module_that_is_not_sharded_stays_as_it_is():
    model = Scorer()
    register_fsdp_forward_method(model, "score")
    assert "score" not in vars(model)
