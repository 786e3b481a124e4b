"""Slicing: the part of a parameter on a rank, a slice of one dim in each of several packed blocks.

    blocks=1     0 0 1 1 2 2                     a rank's rows are contiguous
    blocks=3     0 1 2 | 0 1 2 | 0 1 2           packed query, key and value: heads stay whole

Source: M. Shoeybi et al., Megatron-LM (2019); the packed matrix is GPT-2's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, NoReturn

import torch

from braid.errors import ConfigError

__all__ = ["NotCopied", "Slicing"]


class Slicing(NamedTuple):
    """Slicing of a tensor over ranks.

    Attributes:
        dim: Dim that is sliced.
        blocks: Number of equal blocks in that dim; each block is sliced.
    """

    dim: int
    blocks: int = 1

    def check(self, name: str, length: int, size: int) -> None:
        """Raise ConfigError unless a dim of this length can be divided over `size` ranks.

        The message begins with `name`, the name of the tensor.
        """
        unit = length // self.blocks if length % self.blocks == 0 else 0
        if unit and unit % size == 0:
            return
        what = "" if self.blocks == 1 else f" for {self.blocks} equal blocks"
        valid = [n for n in range(1, max(unit, 1) + 1) if unit and unit % n == 0 and n <= 64]
        msg = (
            f"{name} has {length} entries in dim {self.dim}{what}, which cannot be divided over "
            f"{size} ranks; valid numbers of ranks: {', '.join(map(str, valid)) or 'none'}"
        )
        raise ConfigError(msg)

    def part_of(self, x: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """Return the shard of a rank, one of `size`, of the whole tensor `x`, as a copy."""
        blocks = x.chunk(self.blocks, self.dim)
        return torch.cat([block.chunk(size, self.dim)[rank] for block in blocks], self.dim)

    def whole_of(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return the whole tensor from all ranks' parts; inverse of `part_of`."""
        cut = [part.chunk(self.blocks, self.dim) for part in parts]
        return torch.cat(
            [part_blocks[b] for b in range(self.blocks) for part_blocks in cut], self.dim
        )

    def boxes(
        self, part: torch.Tensor, rank: int, size: int
    ) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yield (first index in the whole tensor, values) for each contiguous slice of `part`.

        Args:
            part: Shard of a rank.
            rank: The rank.
            size: Number of ranks.
        """
        for number, block in enumerate(part.chunk(self.blocks, self.dim)):
            offset = [0] * part.dim()
            offset[self.dim] = (number * size + rank) * block.shape[self.dim]
            yield tuple(offset), block

    def whole_shape(self, part: torch.Tensor, size: int) -> tuple[int, ...]:
        """Return the shape of the whole tensor, given the shard of one of `size` ranks."""
        shape = list(part.shape)
        shape[self.dim] *= size
        return tuple(shape)


class NotCopied:
    """Part of a sharded model, by which copies of the model raise an error."""

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Raise, because torch would copy parameters without their slicing."""
        msg = (
            "a sharded model cannot be copied: copy it before parallelize, or unshard it by "
            "undivide(model, group) first"
        )
        raise ConfigError(msg)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise, because a pickled shard does not know its group."""
        msg = (
            "a sharded model cannot be pickled: save its state_dict(), or unshard it by "
            "undivide(model, group) first"
        )
        raise ConfigError(msg)
