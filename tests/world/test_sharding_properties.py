"""Random models, divided in random ways, train with the bits of one process."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from sharding_models import OPTIMIZERS, differing, values
from torch import nn

from braid.comm import Group
from braid.parallel.data_parallel.ddp.reference import accumulate
from braid.parallel.gradients.exact_norm import clip_pieces_
from braid.parallel.sharding import Sharding, ShardingOptions, attach
from support.seeded import filled
from support.worlds import run_threads


class Recipe(NamedTuple):
    """A random model.

    Attributes:
        widths: Widths of the layers.
        frozen: Layers that are frozen.
        path: Layers in the order in which they are used; some perhaps never, some twice.
        shared: Pairs of layers with one bias, where their widths are equal.
        double: Layers that compute in float64.
    """

    widths: list[int]
    frozen: set[int]
    path: list[int]
    shared: list[tuple[int, int]]
    double: set[int]


class Random(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.layers = nn.ModuleList(
            nn.utils.skip_init(nn.Linear, 8, width) for width in recipe.widths
        )
        for a, b in recipe.shared:
            if recipe.widths[a] == recipe.widths[b]:
                self.layers[b].bias = self.layers[a].bias
        self.scale = nn.Parameter(torch.ones(3))
        filled(self)
        for index in recipe.frozen:
            self.layers[index].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.recipe.path:
            layer = self.layers[index]
            y = layer(x.double().float() if index in self.recipe.double else x)
            x = torch.tanh(nn.functional.pad(y, (0, max(0, 8 - y.shape[-1])))[..., :8]) + x
        return x * self.scale.sum()


@st.composite
def recipes(draw: Any) -> Recipe:
    count = draw(st.integers(1, 5))
    indices = st.integers(0, count - 1)
    return Recipe(
        draw(st.lists(st.integers(1, 40), min_size=count, max_size=count)),
        draw(st.sets(indices, max_size=2)),
        draw(st.lists(indices, max_size=6)),
        draw(st.lists(st.tuples(indices, indices), max_size=2)),
        draw(st.sets(indices, max_size=2)),
    )


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * rank + step))
    value: torch.Tensor = model(x).square().mean()
    return value


def _train(group: Group, base: Random, name: str, options: dict[str, Any], inner: set[int]) -> Any:
    make, whole = OPTIMIZERS[name]
    model = copy.deepcopy(base)
    optimizer = make(model.parameters())
    units = [model.layers[i] for i in sorted(inner) if i < len(model.layers)] or None
    engine = Sharding(model, group, ShardingOptions(**{"whole": whole, "units": units} | options))
    attach(engine, optimizer)
    norms = []
    for step in range(2):
        loss(model, group.rank, step).backward()
        norms.append(engine.clip_grad_norm_(0.1).item())
        optimizer.step()
        engine.zero_grad()
    with engine.gathered():
        return values(model), norms


@given(
    recipe=recipes(),
    size=st.integers(1, 3),
    name=st.sampled_from(sorted(OPTIMIZERS)),
    options=st.fixed_dictionaries(
        {
            "stage": st.integers(1, 3),
            "reshard_after_forward": st.sampled_from([None, True, False]),
        },
        optional={"whole": st.just(True)},
    ),
    inner=st.sets(st.integers(0, 4)),
)
def test_random_models_divided_in_random_ways(recipe, size, name, options, inner):
    base = Random(recipe)
    model = copy.deepcopy(base)
    optimizer = OPTIMIZERS[name][0](model.parameters())
    norms = []
    for step in range(2):
        accumulate(model, [partial(loss, model, rank, step) for rank in range(size)])
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(clip_pieces_(grads, 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    for found, own in run_threads(size, _train, base, name, options, inner):
        assert differing(found, values(model)) == []
        assert own == norms


def _clipped(group: Group) -> tuple[torch.dtype, torch.Tensor]:
    grads = [torch.full((5,), 3.0)] + [torch.ones(2, dtype=torch.float64)] * (group.rank == 0)
    return clip_pieces_(grads, 0.1, [group]).dtype, grads[0]


def test_a_double_gradient_of_one_rank_makes_the_factor_double_on_all():
    whole = [torch.full((5,), 3.0) for _ in range(3)]
    clip_pieces_([*whole, torch.ones(2, dtype=torch.float64)], 0.1)
    for dtype, grad in run_threads(3, _clipped):
        assert dtype == torch.float64
        assert torch.equal(grad, whole[0])
