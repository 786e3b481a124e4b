"""Set-up of tests that train: modules, batches and comparisons that leave torch's default generator alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from braid.errors import BraidError
from support.seeded import filled

PAIRS = 32 / (1 << 20)  # MiB: two parameters of 4 numbers in a bucket
SMALL = 1e-5  # MiB: every parameter in a bucket of its own
Gradients = list["torch.Tensor | None"]


def linear(width: int, out: int) -> nn.Linear:
    return filled(nn.utils.skip_init(nn.Linear, width, out), width * out)


class Net(nn.Module):
    """Layers that can be used twice, checkpointed, and in an order other than that of registration."""

    def __init__(self, *, swapped: bool = False) -> None:
        super().__init__()
        self.first = linear(4, 6)
        self.second = linear(6, 6)
        self.third = linear(6, 2)
        self.swapped = swapped
        self.scale = 2.0

    def forward(
        self, x: torch.Tensor, *, reentrant: bool | None = None, twice: bool = False
    ) -> torch.Tensor:
        def run(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            if reentrant is None:
                return torch.tanh(layer(x))
            found: torch.Tensor = checkpoint(
                lambda x: torch.tanh(layer(x)), x, use_reentrant=reentrant
            )
            return found

        hidden = run(self.second, run(self.first, x))
        if twice:
            hidden = run(self.second, hidden)
        return self.third(hidden)


def batch(rank: int, step: int, rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(50 * rank + step))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def grads(module: nn.Module) -> Gradients:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def values(module: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in module.parameters()]


def assert_same(
    found: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None]
) -> None:
    """Fail unless the tensors have the same bits."""
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert torch.equal(a, b), (a, b)


def said_by(
    call: Callable[[], object],
    kind: type[BaseException] | tuple[type[BaseException], ...] = BraidError,
) -> str:
    try:
        call()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    return "nothing happened"
