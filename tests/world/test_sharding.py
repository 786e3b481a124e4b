"""Sharded training has the bits of one process, at every stage, for every optimizer that can be sharded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from sharding_models import OPTIMIZERS, Model, differing, loss_of, reference, values

from braid.comm import Group
from braid.parallel.sharding import Sharding, ShardingOptions, attach

SIZES = [1, 2, 3]


def _train(group: Group, base: Model, name: str, options: dict[str, Any]) -> Any:
    make, whole = OPTIMIZERS[name]
    model = copy.deepcopy(base)
    optimizer = make(p for p in model.parameters() if p.requires_grad)
    sharding = Sharding(model, group, ShardingOptions(**{"whole": whole} | options))
    attach(sharding, optimizer)
    norms = []
    for step in range(3):
        loss_of(model, group.rank, step).backward()
        norms.append(sharding.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    with sharding.gathered():
        return values(model), norms


def check(world, base: Model, size: int, name: str, **options: Any) -> None:
    expected, norms = reference(base, size, OPTIMIZERS[name][0])
    for found, own in world(size, _train, base, name, options):
        assert differing(found, expected) == []
        assert own == norms


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("size", SIZES)
def test_every_stage_has_the_bits_of_one_process(world, stage, size):
    check(world, Model(frozen=True), size, "adamw", stage=stage)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("stage", [2, 3])
def test_every_optimizer_has_the_bits_of_one_process(world, name, stage):
    check(world, Model(), 2, name, stage=stage)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_unused_parameters_keep_no_gradient(world, stage, whole):
    """Weight decay would change them otherwise."""
    check(world, Model(unused=True), 3, "adamw", stage=stage, whole=whole)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("reshard", [None, True, False])
def test_checkpointed_blocks_are_gathered_again(world, reentrant, reshard):
    base = Model(reentrant=reentrant)
    check(world, base, 2, "sgd", stage=3, reshard_after_forward=reshard)
