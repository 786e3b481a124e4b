"""Models and batches of the tests that compute on a device, and what one process gets from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from braid.train.models import gpt

__all__ = [
    "CONTEXT",
    "SIZE",
    "STEPS",
    "VOCABULARY",
    "language_model",
    "layers",
    "loss_of",
    "lost",
    "mlp",
    "rows",
    "tokens",
    "trained_alone",
]

VOCABULARY = 256
STEPS = 3
CONTEXT = {"cpu": 16, "cuda": 1024}
SIZE = {"cpu": "tiny", "cuda": "gpt2"}


def layers(device: str) -> list[nn.Module]:
    """Return the layers of a GPT: GPT-2 124M on a GPU, a tiny one on a CPU; the same in each process."""
    torch.manual_seed(0)
    return [layer for _, layer in gpt(SIZE[device], CONTEXT[device]).named]


def language_model(device: str) -> nn.Sequential:
    """Return the layers as one model, on the device."""
    return nn.Sequential(*layers(device)).to(device)


def tokens(device: str, rank: int, sequences: int = 4) -> torch.Tensor:
    """Return a batch of bytes [sequences, context]."""
    generator = torch.Generator().manual_seed(rank)
    shape = (sequences, CONTEXT[device])
    return torch.randint(VOCABULARY, shape, generator=generator).to(device)


def loss_of(model: nn.Module, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the mean loss of predicting each byte from those before, under autocast for a dtype."""
    with torch.autocast(x.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
        logits = model(x)[:, :-1]
    return cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten())


def mlp(device: str, width: int = 16) -> nn.Sequential:
    """Return a small model with layers of several shapes, and no dropout."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, width),
        nn.GELU(),
        nn.Linear(width, width),
        nn.LayerNorm(width),
        nn.Linear(width, 4),
    ).to(device)


def rows(device: str, rank: int, count: int = 6) -> torch.Tensor:
    """Return inputs [count, 8] of `mlp`."""
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(rank)).to(device)


def trained_alone(
    device: str, optimizer_of: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
) -> list[torch.Tensor]:
    """Return the parameters of `mlp` after `STEPS` steps of one process on the rows of two ranks."""
    model = mlp(device)
    optimizer = optimizer_of(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            (model(rows(device, 10 * step + rank)).square().mean() / 2).backward()
        optimizer.step()
    return [param.detach().cpu() for param in model.parameters()]


def lost(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest difference, as a part of the largest number of its tensor."""
    pairs = zip(found, expected, strict=True)
    return max(
        float((a.cpu() - b.cpu()).abs().max() / b.abs().max().cpu().clamp_min(1e-12))
        for a, b in pairs
    )
