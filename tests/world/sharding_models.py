"""Models for tests of sharding: tied weights, frozen ones, dropout, checkpoints; and their reference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from braid.parallel.data_parallel.ddp.reference import accumulate
from braid.parallel.gradients.exact_norm import clip_pieces_
from support.seeded import filled

WIDTH, VOCABULARY, LAYERS = 24, 20, 4
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Values = dict[str, torch.Tensor]


class Dropout(nn.Module):
    """Dropout with a generator of its own, since ranks on threads share torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return x * (torch.rand(x.shape, generator=generator) > 0.2).to(x.dtype)


class Block(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.utils.skip_init(nn.Linear, WIDTH, 2 * WIDTH)
        self.drop = Dropout()
        self.down = nn.utils.skip_init(nn.Linear, 2 * WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None or not self.training:
            return x + self.mlp(x)
        y: torch.Tensor = checkpoint(self.mlp, x, use_reentrant=self.reentrant)
        return x + y

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.drop(torch.relu(self.up(self.norm(x)))))
        return y


class Model(nn.Module):
    """A small language model with a tied head.

    Args:
        frozen: Whether the second block and the last norm's bias are frozen.
        unused: Whether there is a block that is never used, and one that odd ranks skip, both in the root.
        reentrant: How blocks are checkpointed; not at all when None.
    """

    def __init__(
        self,
        *,
        frozen: bool = False,
        unused: bool = False,
        reentrant: bool | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.embed = nn.utils.skip_init(nn.Embedding, VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(reentrant) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.utils.skip_init(nn.Linear, WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.spare = nn.Sequential(*(Block() for _ in range(2 if unused else 0)))
        self.skips = False
        self.register_buffer("steps", torch.zeros(()))
        filled(self)
        self.to(dtype)
        if frozen:
            self.blocks[1].requires_grad_(False)
            self.norm.bias.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        if len(self.spare) and not self.skips:
            x = self.spare[0](x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def tokens(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randint(VOCABULARY, (3, 5), generator=generator)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inner = getattr(model, "module", model)
    inner.skips = rank % 2 == 1
    for index, module in enumerate(m for m in inner.modules() if isinstance(m, Dropout)):
        module.seed = 100 * rank + 10 * step + index
    ids = tokens(rank, step)
    return functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


def reference(
    base: nn.Module, size: int, make: MakeOptimizer, steps: int = 3, max_norm: float = 0.5
) -> tuple[Values, list[float]]:
    """Train in one process that runs the ranks' samples in turn."""
    model = copy.deepcopy(base)
    optimizer = make(p for p in model.parameters() if p.requires_grad)
    norms = []
    for step in range(steps):
        accumulate(model, [partial(loss_of, model, rank, step) for rank in range(size)])
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(clip_pieces_(grads, max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return values(model), norms


def values(model: nn.Module) -> Values:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def differing(found: Values, expected: Values) -> list[str]:
    """Names of parameters with other bits."""
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


OPTIMIZERS: dict[str, tuple[MakeOptimizer, bool]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01), False),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=0.01, fused=True), False),
    "adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.05), False),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True), False),
    "adafactor": (lambda p: torch.optim.Adafactor(p, lr=0.01), True),
}


def plain(value: Any) -> Any:
    """A value that travels between processes."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
