"""Both parts of a split backward give the gradients of a whole one, and each does its own only."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from braid.parallel.pipeline.split_backward import SplitBackward


class Twice(nn.Module):
    """Uses one weight in two places of the path."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.tanh(self.linear(x)))


class Beside(nn.Module):
    """Has weights that only meet the path at its end, and some that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.position = nn.Embedding(8, 4)
        self.scale = nn.Parameter(torch.full((4,), 1.5))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        beside = torch.sigmoid(self.position(torch.arange(len(x))) * self.scale)
        return self.linear(x) + beside


class Parts(nn.Module):
    """Takes a fused projection apart, as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(4, 12)
        self.out = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.fused(x).chunk(3, dim=-1)
        mixed = functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        return self.out(mixed) + x


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return y


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 4),
    "layers": lambda: nn.Sequential(
        nn.Linear(4, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 4), nn.BatchNorm1d(4)
    ),
    "twice": Twice,
    "beside": Beside,
    "parts": Parts,
    "no weights": nn.Tanh,
    "checkpointed": Checkpointed,
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(8, 4)
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("has_input", [True, False])
def test_both_parts_give_the_gradients_of_a_whole_backward(name: str, has_input: bool):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS[name]().double()
        x, grad = torch.randn(6, 4).double(), torch.randn(6, 4).double()
    whole = copy.deepcopy(model)
    x_whole = x.clone().requires_grad_(has_input)
    y_whole = whole(x_whole)
    if y_whole.requires_grad:
        y_whole.backward(grad)
    own = x.clone().requires_grad_(has_input)
    y = model(own)
    params = list(model.parameters())
    outputs, inputs = ([y] if y.requires_grad else []), ([own] if has_input else [])
    split = SplitBackward(outputs, inputs, params)
    given = split.to_inputs([grad] if outputs else [])
    assert all(param.grad is None for param in params)
    if has_input:
        assert x_whole.grad is not None
        torch.testing.assert_close(given, [x_whole.grad])
    split.to_weights()
    for (key, param), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(param.grad, expected.grad, msg=key)


def test_gradients_are_added_to_those_that_are_there():
    model = nn.Linear(3, 2)
    for times in (1, 2):
        x = torch.ones(1, 3, requires_grad=True)
        split = SplitBackward([model(x)], [x], list(model.parameters()))
        split.to_inputs([torch.ones(1, 2)])
        split.to_weights()
        assert torch.equal(model.weight.grad, torch.full((2, 3), float(times)))
