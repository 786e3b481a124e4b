"""Rewrites a checkpoint with the files that another number of ranks would write.

Loading does not require this, because any number of ranks can load a checkpoint. Use it to change
the size of the files, or to spread them over one disk per host.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from braid.checkpoint.loading import Checkpoint, open_last
from braid.checkpoint.saving import save_alone
from braid.checkpoint.snapshot import ReplicatedSnapshot, Slice, owner_of
from braid.errors import ConfigError

__all__ = ["reshard"]


def reshard(
    where: str | os.PathLike[str], directory: str | os.PathLike[str], num_ranks: int
) -> Path:
    """Copy a checkpoint to another directory, with one file for each of `num_ranks` ranks.

    Args:
        where: A checkpoint, a directory of checkpoints, or a run; the last checkpoint is used.
        directory: Directory of checkpoints to write to.
        num_ranks: Number of files.

    Returns:
        Path of the new checkpoint. Its tensors have the same bits.

    Raises:
        ConfigError: `num_ranks` is less than 1.
        CheckpointError: The checkpoint is damaged, or the new one exists or cannot be written.

    Cost: a pass over the bytes to verify them, and one to read and write for each rank; all tensors
        are in memory.
    """
    if num_ranks < 1:
        msg = f"a checkpoint needs files of at least 1 rank, got {num_ranks}"
        raise ConfigError(msg)
    checkpoint = open_last(where)
    manifest = checkpoint.manifest
    return save_alone(
        directory,
        [_Part(checkpoint, rank, num_ranks) for rank in range(num_ranks)],
        step=manifest.step,
        state=manifest.state,
        numerics=manifest.numerics,
    )


class _Part:
    """Snapshot of a new rank: its rows of shared tensors, and per-rank tensors of old ranks."""

    def __init__(self, checkpoint: Checkpoint, rank: int, num_ranks: int) -> None:
        self._checkpoint = checkpoint
        self._rank = rank
        self._num_ranks = num_ranks

    def pieces(self) -> Iterable[Slice]:
        """Yield the slices; each tensor is read when its slice is yielded."""
        checkpoint, rank = self._checkpoint, self._rank
        owned = {full: owner_of(full)[0] for full in checkpoint.manifest.tensors}
        shared = {name: checkpoint.read(name) for name, owner in owned.items() if owner is None}
        yield from ReplicatedSnapshot(shared, rank=rank, size=self._num_ranks).pieces()
        for full, owner in owned.items():
            if owner is not None and owner % self._num_ranks == rank:
                tensor = checkpoint.read(full)
                yield Slice(full, tuple(tensor.shape), (0,) * tensor.dim(), tensor)
