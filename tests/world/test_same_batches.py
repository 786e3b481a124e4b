"""Ranks that compute one batch together, and get different batches, say so."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import braid
from braid.comm import Group
from braid.errors import MismatchError
from braid.parallel import tensor_parallel
from braid.parallel.context_parallel import context_parallel
from braid.parallel.gradients.same_batches import SameBatches
from braid.parallel.hybrid import HybridParallel
from braid.parallel.pipeline.asynchronous import AsynchronousPipeline
from engine_habits import PLAN, Net
from support.worlds import run_threads

CALLS = 60  # the comparisons of calls 1, 2 and 50 are inside


def _differing(group: Group, values: list[Any]) -> list[int]:
    (others,) = SameBatches().differing(group, values[group.rank])
    return others


def are_same(one: Any, other: Any) -> bool:
    found, again = run_threads(2, _differing, [one, other])
    assert found == again
    return not found


def random(kind: str, shape: list[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "ids":
        return torch.randint(50_000, shape, generator=generator)
    if kind == "images":
        return torch.rand(shape, generator=generator)
    if kind == "bfloat16":
        return torch.randn(shape, generator=generator).bfloat16()
    if kind == "complex":
        return torch.randn(shape, generator=generator, dtype=torch.complex64)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


kinds = st.sampled_from(["ids", "images", "bfloat16", "complex", "float64"])
shapes = st.lists(st.integers(1, 24), min_size=1, max_size=3)


@given(kind=kinds, shape=shapes, seed=st.integers(0, 1000))
def test_equal_values_are_equal_and_rounding_counts_as_equal(kind, shape, seed):
    value = random(kind, shape, seed)
    assert are_same(value, value.clone())
    if kind == "float64":
        assert are_same(value, value * (1 + 1e-4 * random(kind, shape, seed + 1)))


@given(kind=kinds, shape=shapes, seed=st.integers(0, 50))
def test_different_batches_differ_in_one_of_two_comparisons(kind, shape, seed):
    shape = [4, *shape]
    pairs = [
        (random(kind, shape, 4 * seed + i), random(kind, shape, 4 * seed + i + 2)) for i in (0, 1)
    ]
    assert not all(are_same(*pair) for pair in pairs)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([1, 2]), torch.tensor([2, 1])),
        (torch.arange(12.0).view(3, 4), torch.arange(12.0).view(3, 4).flip(0)),
        ({"x": torch.ones(3)}, {"x": torch.ones(4)}),
        ([torch.ones(3)], [torch.ones(3), torch.ones(3)]),
        (torch.ones(3), torch.ones(3, dtype=torch.int32)),
        ([torch.ones(3), torch.zeros(3)], [torch.zeros(3), torch.ones(3)]),
        (torch.zeros(3), torch.tensor([0.0, 0.0, 1e-10])),
    ],
)
def test_small_differences_of_batches_count(one, other):
    assert not are_same(one, other)


@pytest.mark.parametrize(
    "value",
    [None, 3, torch.empty(0, 4), torch.tensor([float("nan"), 1.0]), torch.eye(3).to_sparse()],
)
def test_any_value_can_be_compared_with_itself(value):
    assert are_same(value, value)


@given(seed=st.integers(0, 100), count=st.integers(1, 400))
def test_rounding_errors_of_many_tensors_do_not_add_up(seed, count):
    generator = torch.Generator().manual_seed(seed)
    many = [torch.randn(7, generator=generator) for _ in range(count)]
    rounded = [x * (1 + 1e-3 * torch.randn(7, generator=generator)) for x in many]
    assert are_same(many, rounded)
    assert not are_same(many, [1.1 * x for x in many])


def values(number: int, *size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(*size, generator=generator, dtype=torch.float64)


def _batch(group: Group, differs: str, call: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets; rank 1 has others from call 40 on."""
    wrong = call >= 40 and group.rank == 1
    x = values(2 * call + 1000 * (wrong and differs in {"inputs", "both"}), 4, 4, 4)
    y = values(2 * call + 1 + 1000 * (wrong and differs in {"targets", "both"}), 4, 4, 4)
    return x, y


class Positions(nn.Module):
    """Takes inputs and their position ids."""

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return pair[0] + pair[1][..., None]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)[:, None]
        return functional.scaled_dot_product_attention(y, y, y, is_causal=True)


def _train(group: Group, engine: str, differs: str) -> list[str]:
    torch.set_num_threads(1)
    model = Net()
    loss = functional.mse_loss
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if engine == "tensor":
                braid.parallelize(model, group, PLAN)
                for call in range(CALLS):
                    x, y = _batch(group, differs, call)
                    loss(model(x), y).backward()
                    model.zero_grad()
            elif engine == "asynchronous":
                layers = nn.Sequential(*model.blocks)
                pipeline = AsynchronousPipeline(
                    layers, lambda params: torch.optim.SGD(params, 0.01), group=group
                )
                for call in range(CALLS):
                    pipeline.train_on([_batch(group, differs, call)] * 2, loss=loss)
            elif engine == "context":
                attention = Attention().double()
                context_parallel(attention, group, inputs={"x": 1})
                for call in range(CALLS):
                    x, y = _batch(group, differs, call)
                    attention(x).square().mean().backward()
            else:
                plan = PLAN if "tp" in engine else None
                layers = [Positions(), *model.blocks] if "cp" in engine else list(model.blocks)
                hybrid = HybridParallel(model, engine, group, layers=layers, plan=plan)
                for call in range(CALLS):
                    hybrid.step(*_batch(group, differs, call), loss=loss)
        except MismatchError as exc:
            return [str(exc)]
    return [str(warning.message) for warning in caught]


ENGINES = ("tensor", "tp=2", "pp=2", "cp=2", "context", "asynchronous")
SAID = {
    ("tensor", "inputs"): "the inputs on rank 1 are not the inputs on rank 0",
    ("tensor", "targets"): "the gradients of the outputs on rank 1 are not the gradients",
    ("tensor", "both"): "the inputs on rank 1 are not the inputs on rank 0",
    ("tp=2", "inputs"): "the inputs on rank 1 are not the inputs on rank 0",
    ("tp=2", "targets"): "the targets on rank 1 are not the targets on rank 0",
    ("tp=2", "both"): "the inputs on rank 1 are not the inputs on rank 0",
    ("cp=2", "inputs"): "the batches on rank 1 are not the batches on rank 0",
    ("cp=2", "targets"): "the batches on rank 1 are not the batches on rank 0",
    ("cp=2", "both"): "the batches on rank 1 are not the batches on rank 0",
    ("context", "inputs"): "the inputs on rank 1 are not the inputs on rank 0",
    ("context", "both"): "the inputs on rank 1 are not the inputs on rank 0",
    ("pp=2", "both"): "read batches on rank 0 and rank 1, which got different batches",
    ("asynchronous", "both"): "read batches on rank 0 and rank 1, which got different batches",
}


def _train_all(group: Group, differs: str) -> dict[str, list[str]]:
    return {engine: _train(group, engine, differs) for engine in ENGINES}


@pytest.mark.parametrize("differs", ["nothing", "inputs", "targets", "both"])
def test_ranks_with_another_batch_are_named(procs, differs):
    for rank in procs(2, _train_all, differs):
        for engine, texts in rank.items():
            expected = SAID.get((engine, differs))
            assert len(texts) == (expected is not None), (engine, texts)
            assert (expected or "") in "".join(texts), (engine, texts)


class Served(nn.Module):
    """Returns logits by class shards, and a cache of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor, cache: Any = None) -> Any:
        return self.net(x), self.scale, (x + dist_rank.value, cache)


dist_rank = threading.local()


def _serve(group: Group) -> list[str]:
    torch.set_num_threads(1)
    dist_rank.value = group.rank
    model = Served()
    braid.parallelize(model, group, PLAN)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = None
        for call in range(CALLS):
            output, _, cache = model(values(call, 4, 4, 4), cache)
            output.sum().backward()
    hooks = model.scale._backward_hooks or ()
    return [str(warning.message) for warning in caught] + [str(hook) for hook in hooks]


def test_caches_and_parameters_among_outputs_are_not_compared(procs):
    assert procs(2, _serve) == [[], []]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_does_not_matter(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert are_same(torch.ones(600), torch.ones(600))
        assert not are_same(torch.ones(600), torch.zeros(600))
    finally:
        torch.set_default_dtype(before)


def _evaluate_alone(group: Group) -> list[float]:
    model = Net()
    whole = model(values(0, 3, 4)).sum().item()
    braid.parallelize(model, group, PLAN)
    with torch.no_grad():
        shared = model(values(0, 3, 4)).sum().item()
    tensor_parallel.undivide(model, group)
    assert not model._forward_pre_hooks
    alone = model(values(0, 3, 4)).sum().item() if not group.rank else whole
    return [whole, shared, alone]


def test_a_model_that_is_whole_again_can_be_called_on_one_rank(procs):
    for whole, *others in procs(2, _evaluate_alone):
        assert others == pytest.approx([whole, whole])
