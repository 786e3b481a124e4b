"""Writes a checkpoint anew, as another number of ranks would have written it.

Any number of ranks reads what any number wrote, so nobody has to: it helps where files are to have
another size, or to lie on as many disks as there will be hosts.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from braid.checkpoint.directory import CheckpointDirectory
from braid.checkpoint.loading import Checkpoint, open_last
from braid.checkpoint.saving import REMEDY, publish, write_pieces
from braid.checkpoint.snapshot import ReplicatedSnapshot, Slice, owner_of
from braid.errors import CheckpointError, ConfigError

__all__ = ["reshard"]


def reshard(
    where: str | os.PathLike[str], directory: str | os.PathLike[str], num_ranks: int
) -> Path:
    """Write a checkpoint into another directory, as files of this many ranks.

    Args:
        where: A checkpoint, a directory of checkpoints, or a run; the last one is taken.
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
        msg = f"a checkpoint has files of at least 1 rank, got {num_ranks}"
        raise ConfigError(msg)
    checkpoint = open_last(where)
    step = checkpoint.manifest.step
    home = CheckpointDirectory(directory)
    action = f"cannot write {home.final(step)}"
    if step in home.steps():
        msg = f"{action}: it exists; choose another directory"
        raise CheckpointError(msg)
    try:
        home.begin(step)
        written = [
            write_pieces(home, _pieces(checkpoint, rank, num_ranks), step, rank)
            for rank in range(num_ranks)
        ]
        manifest = checkpoint.manifest
        reports = [*written, publish(home, written, step, manifest.state, manifest.numerics)]
        problems = [report.problem for report in reports if report.problem]
    except OSError as exc:
        problems = [exc.strerror or errno.errorcode.get(exc.errno or 0, str(exc))]
    if problems:
        home.discard(step)
        raise CheckpointError(f"{action}: {'; '.join(problems)}. {REMEDY}")
    return home.final(step)


def _pieces(checkpoint: Checkpoint, rank: int, num_ranks: int) -> list[Slice]:
    """Return what a rank writes: its rows of shared tensors, and the own tensors of some ranks."""
    owned = {full: owner_of(full)[0] for full in checkpoint.manifest.tensors}
    shared = {name: checkpoint.read(name) for name, owner in owned.items() if owner is None}
    pieces = list(ReplicatedSnapshot(shared, rank=rank, size=num_ranks).pieces())
    for full, owner in owned.items():
        if owner is not None and owner % num_ranks == rank:
            tensor = checkpoint.read(full)
            pieces.append(Slice(full, tuple(tensor.shape), (0,) * tensor.dim(), tensor))
    return sorted(pieces, key=lambda p: (-p.tensor.element_size(), p.name, p.offset))
