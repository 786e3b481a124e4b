"""Recomputed layers under engines: DDP, sharding and pipelines keep their bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from sharding_models import OPTIMIZERS, Model, differing, loss_of, reference, values
from test_pipeline_hard import SEED, assert_equal_to_reference, batch_of, model, state_of
from test_pipeline_hard import loss_of as pipeline_loss

import braid
from braid.comm import Group
from braid.comm.autograd import MATMULS, recompute_layers

SGD = OPTIMIZERS["sgd"][0]


def _train(group: Group, base: Model, strategy: Any, kind: str, wrapped_first: bool) -> Any:
    inner = copy.deepcopy(base)
    if not wrapped_first:
        recompute_layers(inner, strategy)
    if kind == "ddp":
        wrapped: Any = braid.DistributedDataParallel(inner, process_group=group)
    else:
        wrapped = braid.FullyShardedDataParallel(inner, group, reshard_after_forward=True)
    if wrapped_first:
        recompute_layers(inner, strategy)
    optimizer = SGD(wrapped.parameters())
    for step in range(3):
        loss_of(wrapped, group.rank, step).backward()
        if kind == "ddp":
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
    if kind == "ddp":
        return values(inner)
    return {name: value.clone() for name, value in wrapped.state_dict().items() if name != "steps"}


@pytest.mark.parametrize("strategy", ["memory", "speed", ["blocks.0", "blocks.2"], 4])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("wrapped_first", [False, True])
def test_engines_keep_the_bits_of_one_process(world, kind, strategy, wrapped_first):
    base = Model()
    expected, _ = reference(base, 2, SGD, max_norm=1e9)
    if kind == "fsdp":
        expected["head.weight"] = expected["embed.weight"]
    for found in world(2, _train, base, strategy, kind, wrapped_first):
        assert differing(found, expected) == []


def _pipeline(group: Group, recompute: str | int) -> Any:
    pipeline = braid.Pipeline(
        model(),
        num_microbatches=4,
        group=group,
        recompute=recompute,
        recompute_policy=MATMULS,
        seed=SEED,
    )
    loss = pipeline.step(*batch_of(11), loss=pipeline_loss).item()
    return state_of(pipeline), loss


@pytest.mark.parametrize("recompute", ["always", "except_last", 2])
def test_a_pipeline_with_kept_products_has_the_bits_of_one_process(world, recompute):
    assert_equal_to_reference(world(2, _pipeline, recompute), 11, 4)
