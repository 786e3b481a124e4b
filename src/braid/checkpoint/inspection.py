"""Functions that list checkpoints and compare their bits, without a model."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple

import torch

from braid.checkpoint.directory import CheckpointDirectory
from braid.checkpoint.loading import Checkpoint, read_manifest
from braid.errors import CheckpointError
from braid.runtime.tensor_buffers import bytes_of

__all__ = ["CheckpointComparison", "Listed", "compare", "ls"]


class Listed(NamedTuple):
    """A checkpoint in the listing of a directory.

    Attributes:
        path: Path of the checkpoint.
        step: Step of the checkpoint.
        num_tensors: Number of tensors.
        nbytes: Total bytes of the files.
        world_size: Number of ranks that wrote it.
        problem: Reason why the checkpoint cannot be used; empty if it is complete.
    """

    path: str
    step: int
    num_tensors: int = 0
    nbytes: int = 0
    world_size: int = 0
    problem: str = ""


class CheckpointComparison(NamedTuple):
    """Differences between the tensors of two checkpoints.

    Attributes:
        num_tensors: Number of tensors that were compared.
        differing: Names of tensors with different bits, or in only one of the checkpoints.
        max_diff: Largest absolute difference of two elements; inf if a tensor is missing or an
            element is not finite.
    """

    num_tensors: int
    differing: tuple[str, ...]
    max_diff: float

    @property
    def equal(self) -> bool:
        """Whether all bits are the same."""
        return not self.differing


def ls(directory: str | os.PathLike[str]) -> list[Listed]:
    """Return the checkpoints in a directory by ascending step, without hashing files."""
    home = CheckpointDirectory(directory)
    lines = []
    for step in home.steps():
        path = home.locate(step)
        try:
            manifest = read_manifest(path)
        except CheckpointError as exc:
            lines.append(Listed(str(path), step, problem=str(exc)))
            continue
        present = {name for name in manifest.files if (path / name).is_file()}
        missing = sorted(manifest.files.keys() - present)
        lines.append(
            Listed(
                str(path),
                step,
                len(manifest.tensors),
                manifest.nbytes,
                len(manifest.files),
                f"missing {', '.join(missing)}" if missing else "",
            )
        )
    return lines


def compare(
    ours: str | os.PathLike[str], theirs: str | os.PathLike[str], *, prefix: str = ""
) -> CheckpointComparison:
    """Compare the tensors of two checkpoints bit by bit, independent of their sharding.

    Args:
        ours: Path of a checkpoint.
        theirs: Path of the other checkpoint.
        prefix: Prefix of the names of the tensors to compare.

    Raises:
        CheckpointError: One of the checkpoints cannot be read.
    """
    a, b = _open(ours), _open(theirs)
    names = {n for c in (a, b) for n in c.manifest.tensors if n.startswith(prefix)}
    differing, max_diff = [], 0.0
    for name in sorted(names):
        if name not in a.manifest.tensors or name not in b.manifest.tensors:
            differing.append(name)
            max_diff = math.inf
            continue
        x, y = a.read(name), b.read(name)
        if x.shape != y.shape or x.dtype != y.dtype or bytes_of(x) != bytes_of(y):
            differing.append(name)
            max_diff = max(max_diff, _distance(x, y))
    return CheckpointComparison(len(names), tuple(differing), max_diff)


def _open(path: str | os.PathLike[str]) -> Checkpoint:
    try:
        return Checkpoint(Path(path), read_manifest(path))
    except CheckpointError as exc:
        msg = f"{path} has no readable checkpoint: {exc}"
        raise CheckpointError(msg) from exc


def _distance(x: torch.Tensor, y: torch.Tensor) -> float:
    if x.shape != y.shape or not x.numel():
        return math.inf
    distance = (x.double() - y.double()).abs().max().item()
    return math.inf if math.isnan(distance) else distance
