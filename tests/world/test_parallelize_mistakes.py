"""Wrong calls of parallelize are named in the user's words, on all ranks, all problems at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from training import said_by

from braid.comm import Group
from braid.context import mesh
from braid.parallel.tensor_parallel import Shard, parallelize, slicing_of
from braid.programs.layout import Layout, Mesh


class Tied(nn.Module):
    def __init__(self, width: int = 6, hidden: int = 8, rows: int = 12) -> None:
        super().__init__()
        self.embed = nn.utils.skip_init(nn.Embedding, rows, width)
        self.up = nn.utils.skip_init(nn.Linear, width, hidden)
        self.down = nn.utils.skip_init(nn.Linear, hidden, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.utils.skip_init(nn.Linear, width, rows, bias=False)
        self.head.weight = self.embed.weight
        for param in self.parameters():
            nn.init.constant_(param, 0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.down(self.up(self.embed(ids)).relu())))


IDS = torch.zeros(2, 3, dtype=torch.long)
MLP: dict[str, Any] = {"up": "column", "down": "row"}


def _calls(group: Group) -> list[str]:
    axes = mesh("tp=2", group)

    def refused(plan: Any = None, model: Any = None, along: Any = group, **options: Any) -> str:
        model = Tied() if model is None else model
        said = said_by(lambda: parallelize(model, along, plan, **options))
        if isinstance(model, nn.Module):
            assert all(slicing_of(param) is None for param in model.parameters())
        return said

    return [
        refused({"^embed$": "vocab", **MLP}),
        refused({"embed": "column", "norm": "row", "up": "vocab", "down": "slice:3"}),
        refused({"^(up|down)$": "row", "up": "column"}),
        refused({"(": "row", "ups": "colum", "downs": "row"}),
        refused({"up": 3}),
        refused({"up": Layout.parse(Mesh({"tp": 4}), "tp | -")}),
        refused(["up"], model="gpt", along=axes),
        refused({**MLP, "norm": ((1, 1, 1),)}, inputs=IDS),
        refused(inputs=(IDS, IDS)),
        refused(inputs=IDS, model=Tied(3, 9, 5)),
    ]


def test_each_mistake_is_named_before_anything_is_changed(world):
    tied, kinds, order, expressions, number, parts, types, both, inputs, odd = world(2, _calls)[0]
    assert "head shares the weight of embed, which is sharded: add it to the plan" in tied
    assert "embed (Embedding) cannot be sharded as 'column': use vocab or slice:1" in kinds
    assert "norm has a weight of 1 dims, but the plan shards its dim 1" in kinds
    assert "up (Linear) cannot be sharded as 'vocab': use column, row or head" in kinds
    assert "down has a weight of 2 dims, but the plan shards its dim 3" in kinds
    assert "'up' matches only modules that an earlier expression decides" in order
    assert "'(' is not a regular expression" in expressions
    assert "'ups' matches no module" in expressions
    assert "'colum' is not a way to shard a layer" in expressions
    assert "values of a plan must be a kind (column, row, " in number
    assert "the layout tp | - of a weight has 4 shards, but the group has 2 ranks" in parts
    assert "model must be a torch.nn.Module, got str" in types
    assert 'a braid.Group, such as braid.mesh("dp=2,tp=2")["tp"], got MeshGroups' in types
    assert "plan must be a dict of regular expressions to kinds" in types
    assert "('up', 'down') cannot be combined with annotations of operators (norm)" in both
    assert "the inputs do not match Tied.forward(ids)" in inputs
    assert "up.weight: 9 outputs do not divide; valid: 1, 3, 9" in odd


def _ranks(group: Group) -> list[str]:
    shapes = Tied(hidden=8 if group.rank else 4)
    values = Tied()
    with torch.no_grad():
        values.up.weight += group.rank
    plan = MLP if group.rank else {"up": "head", "down": "row"}
    inputs = IDS[: 1 + group.rank]
    return [
        said_by(lambda: parallelize(shapes, group, MLP)),
        said_by(lambda: parallelize(values, group, MLP)),
        said_by(lambda: parallelize(Tied(), group, plan)),
        said_by(lambda: parallelize(Tied(), group, inputs=inputs)),
    ]


def test_ranks_with_different_models_plans_or_inputs_all_learn_what_differs(world):
    for shapes, values, plans, inputs in world(2, _ranks):
        assert "rank 0  up.weight float32[4, 6]" in shapes
        assert "rank 1  up.weight float32[8, 6]" in shapes
        assert "1 of 7 parameters differ between ranks when the model is divided" in values
        assert "up.weight on rank 1" in values
        assert "torch.manual_seed" in values
        assert "rank 0  plan={'up': 'head', 'down': 'row'}" in plans
        assert "rank 1  inputs=([2, 3], 'torch.int64')" in inputs


def _annotated_model_with_kinds(group: Group) -> str:
    class Annotated(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.product = Shard(torch.matmul, ((1, 1), (1, 2)))

    return said_by(lambda: parallelize(Annotated(), group, MLP, inputs=IDS))


def test_kinds_are_not_ignored_in_an_annotated_model(world):
    assert "annotations of operators (product)" in world(2, _annotated_model_with_kinds)[0]
