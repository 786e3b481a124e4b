"""The models of `braid bench ddp`, each with the inputs of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from braid.train.config import MODELS
from braid.train.gpt import GPT

__all__ = ["MODEL_NAMES", "Job", "job_of"]

WIDTH, DEPTH = 2048, 6  # 25.2 million parameters
CONTEXT = 64
CHANNELS = (64, 128, 256, 512)  # 11 million parameters, as a ResNet of 18 layers
IMAGE, CLASSES = 32, 10


class Job(NamedTuple):
    """A model and the data on which one rank trains it.

    Attributes:
        model: Model, the same on all ranks.
        inputs: Inputs of this rank.
        loss: Loss as a function of the model's output.
    """

    model: nn.Module
    inputs: torch.Tensor
    loss: Callable[[torch.Tensor], torch.Tensor]


class _Residual(nn.Module):
    """Two convolutions with a residual connection around them."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(width, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        same = width == out and stride == 1
        self.around = nn.Identity() if same else nn.Conv2d(width, out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = torch.relu(self.path(x) + self.around(x))
        return total


def job_of(name: str, batch: int, seed: int) -> Job:
    """Make a model and its inputs.

    Args:
        name: Name in `MODEL_NAMES`.
        batch: Number of samples, sequences or images.
        seed: Seed of the inputs.
    """
    generator = torch.Generator().manual_seed(seed)
    return _JOBS[name](batch, generator)


def _mlp(batch: int, generator: torch.Generator) -> Job:
    numbers = torch.Generator().manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layer = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            layer.weight.normal_(0.0, WIDTH**-0.5, generator=numbers)
        layers += [layer, nn.ReLU()]
    x, y = (torch.randn(batch, WIDTH, generator=generator) for _ in range(2))
    return Job(nn.Sequential(*layers[:-1]), x, lambda output: nn.functional.mse_loss(output, y))


def _gpt(batch: int, generator: torch.Generator) -> Job:
    tokens = torch.randint(0, 256, (batch, CONTEXT + 1), generator=generator)
    y = tokens[:, 1:].flatten()

    def loss(output: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), y)

    return Job(GPT(MODELS["medium"], CONTEXT), tokens[:, :-1], loss)


def _conv(batch: int, generator: torch.Generator) -> Job:
    widths = (CHANNELS[0], *CHANNELS)
    blocks: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)]
    for width, out in zip(widths, CHANNELS, strict=False):
        stride = 1 if width == out else 2
        blocks += [_Residual(width, out, stride), _Residual(out, out, 1)]
    blocks += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS[-1], CLASSES)]
    x = torch.randn(batch, 3, IMAGE, IMAGE, generator=generator)
    y = torch.randint(0, CLASSES, (batch,), generator=generator)
    return Job(nn.Sequential(*blocks), x, lambda output: nn.functional.cross_entropy(output, y))


_JOBS: dict[str, Callable[[int, torch.Generator], Job]] = {"mlp": _mlp, "gpt": _gpt, "conv": _conv}
MODEL_NAMES = tuple(_JOBS)
