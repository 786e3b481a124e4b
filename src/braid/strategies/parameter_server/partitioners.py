"""Partitioners: into how many shards of rows a variable is divided.

    13 rows over 5 shards      3 3 3 2 2       the first shards have one row more

A partitioner is a function of a shape and a dtype that returns the number of shards of each dim, as
TensorFlow's do; dim 0 alone is divided here.

Source: TensorFlow 2.21, `tf.distribute.experimental.partitioners`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from braid.errors import ConfigError

__all__ = [
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "Partitioner",
    "rows_of_shards",
]

Partitioner: TypeAlias = Callable[[torch.Size, torch.dtype], Sequence[int]]


class FixedShardsPartitioner:
    """Divides each variable into a fixed number of shards, or one per row if it has fewer rows.

    Args:
        num_shards: Number of shards.

    Raises:
        ConfigError: `num_shards` is less than 1.
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = _positive("num_shards", num_shards)

    def __call__(self, shape: torch.Size, dtype: torch.dtype) -> list[int]:
        """Return the number of shards of each dim."""
        del dtype
        return _over_rows(shape, self._num_shards)


class MinSizePartitioner:
    """Divides each variable into the largest number of shards that have a minimum size.

    Args:
        min_shard_bytes: Least number of bytes of a shard.
        max_shards: Largest number of shards.

    Raises:
        ConfigError: An argument is less than 1.
    """

    def __init__(self, min_shard_bytes: int = 256 << 10, max_shards: int = 1) -> None:
        self._min_bytes = _positive("min_shard_bytes", min_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards)

    def __call__(self, shape: torch.Size, dtype: torch.dtype) -> list[int]:
        """Return the number of shards of each dim."""
        count = shape.numel() * dtype.itemsize // self._min_bytes
        return _over_rows(shape, min(self._max_shards, count))


class MaxSizePartitioner:
    """Divides each variable into the smallest number of shards that do not exceed a size.

    A shard has at least one row, so rows that are larger than the limit exceed it.

    Args:
        max_shard_bytes: Largest number of bytes of a shard.
        max_shards: Largest number of shards; unlimited when None.

    Raises:
        ConfigError: An argument is less than 1.
    """

    def __init__(self, max_shard_bytes: int, max_shards: int | None = None) -> None:
        self._max_bytes = _positive("max_shard_bytes", max_shard_bytes)
        self._max_shards = None if max_shards is None else _positive("max_shards", max_shards)

    def __call__(self, shape: torch.Size, dtype: torch.dtype) -> list[int]:
        """Return the number of shards of each dim."""
        num_rows = shape[0] if shape else 1
        row_bytes = shape.numel() * dtype.itemsize // max(1, num_rows)
        rows = max(1, self._max_bytes // max(1, row_bytes))
        count = math.ceil(num_rows / rows)
        return _over_rows(
            shape, count if self._max_shards is None else min(self._max_shards, count)
        )


def rows_of_shards(
    partitioner: Partitioner | None, shape: torch.Size, dtype: torch.dtype, max_shards: int
) -> list[int]:
    """Return the number of rows of each shard of a variable; a scalar counts as one row.

    Args:
        partitioner: The partitioner; one shard when None.
        shape: Shape of the variable.
        dtype: Dtype of the variable.
        max_shards: Largest number of shards of a table.

    Raises:
        ConfigError: The partitioner divides a dim other than dim 0, or makes too many shards.
    """
    num_rows = shape[0] if shape else 1
    counts = [1] * max(1, len(shape)) if partitioner is None else list(partitioner(shape, dtype))
    count = counts[0] if counts else 1
    if len(counts) != max(1, len(shape)) or any(other != 1 for other in counts[1:]):
        msg = (
            f"the partitioner divides a variable of shape {list(shape)} into {counts} shards: "
            "return one number of shards per dim, above 1 for dim 0 only"
        )
        raise ConfigError(msg)
    if not 1 <= count <= min(max_shards, max(1, num_rows)):
        msg = (
            f"the partitioner divides the {num_rows} rows of a variable of shape {list(shape)} "
            f"into {count} shards: choose 1 to {min(max_shards, max(1, num_rows))}"
        )
        raise ConfigError(msg)
    base, longer = divmod(num_rows, count)
    return [base + (shard < longer) for shard in range(count)]


def _over_rows(shape: torch.Size, count: int) -> list[int]:
    """Return a number of shards of dim 0, at least 1 and at most its rows."""
    num_rows = shape[0] if shape else 1
    return [max(1, min(count, num_rows)), *[1] * (len(shape) - 1)]


def _positive(name: str, value: int) -> int:
    if value < 1:
        msg = f"{name} must be at least 1, got {value}"
        raise ConfigError(msg)
    return value
