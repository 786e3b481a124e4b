"""Weights and batches that are equal in all systems, since NumPy draws them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["LR", "batch", "weights"]

Array = npt.NDArray[np.float32]
SIZES = (16, 32, 4)
ROWS = 32  # rows of a batch over all workers
LR = 0.1


def weights() -> list[Array]:
    """Return the weights and biases of two layers, weights of shape [inputs, outputs]."""
    draws = np.random.default_rng(0)
    shapes = [(SIZES[0], SIZES[1]), (SIZES[1],), (SIZES[1], SIZES[2]), (SIZES[2],)]
    return [draws.normal(scale=0.3, size=shape).astype(np.float32) for shape in shapes]


def batch(step: int) -> tuple[Array, Array]:
    """Return the inputs and the targets of a step."""
    draws = np.random.default_rng(1000 + step)
    x = draws.normal(size=(ROWS, SIZES[0])).astype(np.float32)
    return x, np.tanh(x[:, : SIZES[2]] * 2).astype(np.float32)
