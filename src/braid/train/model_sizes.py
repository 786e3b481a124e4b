"""Sizes of the models that `braid train` knows by name."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MODELS", "ModelSize"]


class ModelSize(NamedTuple):
    """Size of a GPT.

    Attributes:
        layers: Number of blocks.
        width: Width of the residual stream.
        heads: Number of attention heads; divides the width.
    """

    layers: int
    width: int
    heads: int


# The tables of GPT-2 (Radford et al., 2019), and smaller ones that a laptop trains in
# minutes. The vocabulary is bytes, so the embedding has 256 rows and "gpt2" has 86 million
# parameters instead of 124.
MODELS = {
    "tiny": ModelSize(2, 64, 4),
    "mini": ModelSize(4, 128, 4),
    "small": ModelSize(6, 256, 8),
    "medium": ModelSize(8, 512, 8),
    "gpt2": ModelSize(12, 768, 12),
    "gpt2-medium": ModelSize(24, 1024, 16),
    "gpt2-large": ModelSize(36, 1280, 20),
}
