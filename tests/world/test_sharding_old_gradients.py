"""Gradients that parameters have when they are sharded, or made whole again."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from training import linear

from braid.comm import Group
from braid.parallel.sharding import Sharding, ShardingOptions

SIZE = 2


def _gradients(group: Group, stage: int) -> tuple[list[torch.Tensor], ...]:
    model = nn.Sequential(linear(4, 4), linear(4, 2))
    x = torch.ones(3, 4)
    model(x).sum().backward()
    expected = [torch.clone(param.grad) for param in model.parameters() if param.grad is not None]
    sharding = Sharding(model, group, ShardingOptions(stage=stage))
    model(x).sum().backward()
    pieces = [grad.clone() for grad in sharding.pieces()]
    sharding.undo()
    model(x).sum().backward()
    whole = [torch.clone(param.grad) for param in model.parameters() if param.grad is not None]
    return expected, pieces, whole


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_of_before_are_dropped(world, stage):
    ranks = world(SIZE, _gradients, stage)
    for expected, _, whole in ranks:
        torch.testing.assert_close(whole, expected)
    parts = [piece.flatten() for _, pieces, _ in ranks for piece in pieces]
    total = sum(float(grad.sum()) for grad in ranks[0][0])
    assert float(torch.cat(parts).sum()) == pytest.approx(total)
