"""Loading: find the last complete checkpoint, and read the tensors that a rank needs.

A checkpoint is verified before it is used: the manifest by the digest in it, and the files by the
digests in the manifest. Tensors are assembled from the pieces that overlap with the requested box,
so any number of ranks can load the checkpoint. A rank with sharded parameters takes its shard of
each tensor when it reads it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from braid.checkpoint.agreement import RankReport, exchange
from braid.checkpoint.directory import CheckpointDirectory
from braid.checkpoint.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    FileEntry,
    Manifest,
    Piece,
    TensorEntry,
    decode_manifest,
)
from braid.checkpoint.snapshot import own_name, owner_of
from braid.checkpoint.tensor_file import DTYPES, hash_file, read_piece
from braid.comm import Group
from braid.errors import CheckpointError, ConfigError, raise_all
from braid.types import TensorSpec, dtype_name

__all__ = [
    "Checkpoint",
    "PartedCheckpoint",
    "Parts",
    "Skipped",
    "load",
    "open_last",
    "read_manifest",
    "verify",
]

LOG = logging.getLogger(__name__)

MAX_ROWS = 10  # largest number of rows in the table of differences
NAMES = {dtype_name(dtype): dtype for dtype in DTYPES}


class Skipped(NamedTuple):
    """A damaged or incomplete checkpoint that loading has skipped.

    Attributes:
        path: Path of the checkpoint.
        reason: Reason why the checkpoint cannot be used.
    """

    path: str
    reason: str


class Checkpoint:
    """A verified checkpoint.

    Per-rank tensors are tensors with different values on each rank, such as local optimizer states.

    Attributes:
        path: Directory of the checkpoint.
        manifest: Contents of the checkpoint.
        skipped: Later checkpoints that could not be used, with reasons.
        own_of: Rank from which per-rank tensors are read; None to ignore per-rank tensors.

    Args:
        path: See above.
        manifest: See above.
        skipped: See above.
        own_of: See above.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        skipped: Sequence[Skipped] = (),
        *,
        own_of: int | None = None,
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.skipped = tuple(skipped)
        self.own_of = own_of

    def names(self) -> dict[str, str]:
        """Return a map from the names that `read` accepts to the names in the manifest.

        The two names differ for per-rank tensors only.
        """
        names = ((*owner_of(full), full) for full in self.manifest.tensors)
        return {name: full for rank, name, full in names if rank in {None, self.own_of}}

    def require_own(self, roots: Sequence[str]) -> None:
        """Check that `own_of` is set if the checkpoint has per-rank tensors.

        Args:
            roots: First parts of the names to check, such as `optimizer`.

        Raises:
            CheckpointError: The checkpoint has such tensors, and `own_of` is None because another
                number of ranks wrote it.
        """
        owned = [owner_of(full) for full in self.manifest.tensors]
        per_rank = {name for rank, name in owned if rank is not None}
        wanted = sorted(name for name in per_rank if name.partition("/")[0] in roots)
        if wanted and self.own_of is None:
            num_owners = _num_owners(self.manifest)
            msg = (
                f"{self.path} was written by {num_owners} ranks with different values of "
                f"{len(wanted)} tensors ({', '.join(wanted[:3])}, ...), and cannot be loaded "
                "by another number of ranks: choose the rank to read them from, such as "
                "load(..., own_of=0)"
            )
            raise CheckpointError(msg)

    def read(self, name: str, box: tuple[slice, ...] | None = None) -> torch.Tensor:
        """Return a tensor of the checkpoint, or the slices `box` of it.

        Args:
            name: Name of the tensor; for a per-rank tensor of `own_of`, without `own/` and rank.
            box: A slice per dim, step 1; None for the whole tensor.

        Returns:
            A new tensor.

        Raises:
            CheckpointError: The tensor does not exist, or a file does not match the manifest.

        Cost: reads the bytes of the box, from a memory-mapped file.
        """
        entry = self.manifest.tensors.get(name)
        if entry is None and self.own_of is not None:
            entry = self.manifest.tensors.get(own_name(self.own_of, name))
        if entry is None:
            msg = (
                f"{self.path} has no tensor {name!r}, only {len(self.manifest.tensors)} others: "
                "checkpoint.names() lists them"
            )
            raise CheckpointError(msg)
        dtype = NAMES.get(entry.dtype)
        if dtype is None:
            msg = (
                f"tensor {name!r} in {self.path} has the unknown dtype {entry.dtype!r}: use the "
                "version of torch that wrote it"
            )
            raise CheckpointError(msg)
        wanted = _ranges(entry, box)
        out = torch.empty([high - low for low, high in wanted], dtype=dtype)
        for piece in entry.pieces:
            self._copy(entry, piece, wanted, out)
        return out

    def require(self, expected: Mapping[str, TensorSpec]) -> None:
        """Check that the checkpoint has exactly these tensors under their roots.

        Args:
            expected: Shape and dtype by name. The root of a name is its first part, such as `model`
                in `model/weight`.

        Raises:
            CheckpointError: Tensors are missing or unexpected, or shapes or dtypes differ; the
                message has a table.
        """
        roots = {name.partition("/")[0] for name in expected}
        entries = {name: self.manifest.tensors[full] for name, full in self.names().items()}
        there = {
            name: TensorSpec(entry.shape, entry.dtype)
            for name, entry in entries.items()
            if name.partition("/")[0] in roots
        }
        rows = [
            (name, str(there.get(name, "-")), str(wanted.get(name, "-")))
            for wanted in [{k: TensorSpec(v.shape, v.dtype) for k, v in expected.items()}]
            for name in sorted(there.keys() | wanted.keys())
            if there.get(name) != wanted.get(name)
        ]
        if not rows:
            return
        width, stored_width = (max(len(row[i]) for row in rows[:MAX_ROWS]) for i in (0, 1))
        table = [
            f"  {name:<{width}}  {a:<{max(stored_width, 10)}}  {b}"
            for name, a, b in [("tensor", "checkpoint", "here"), *rows[:MAX_ROWS]]
        ]
        if len(rows) > MAX_ROWS:
            table.append(f"  ... and {len(rows) - MAX_ROWS} more")
        msg = (
            f"{self.path} is not a checkpoint of this model: {len(rows)} tensors differ:\n"
            + "\n".join(table)
        )
        raise CheckpointError(msg)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, step {self.manifest.step})"

    def _copy(
        self,
        entry: TensorEntry,
        piece: Piece,
        wanted: list[tuple[int, int]],
        out: torch.Tensor,
    ) -> None:
        source, target = [], []
        for (low, high), offset, extent in zip(wanted, piece.offset, piece.shape, strict=True):
            first, last = max(low, offset), min(high, offset + extent)
            if first >= last:
                return
            source.append(slice(first - offset, last - offset))
            target.append(slice(first - low, last - low))
        path = _file_in(self.path, piece.file)
        values = read_piece(path, piece.key, piece.shape, entry.dtype, tuple(source))
        out[tuple(target)].copy_(values)


class _Choice(RankReport, frozen=True):
    """Checkpoint that rank 0 has chosen."""

    path: str = ""
    skipped: tuple[Skipped, ...] = ()


def load(where: str | os.PathLike[str], *, group: Group, own_of: int | None = None) -> Checkpoint:
    """Open a checkpoint, or the last complete one in a directory; a collective.

    Rank 0 chooses and verifies; all ranks open the same checkpoint or raise the same error.

    Args:
        where: A checkpoint (`.../step-00000200`), or the directory of a run's checkpoints.
        group: The ranks that load together.
        own_of: Rank from which this rank reads per-rank tensors. None for the same rank, if the
            number of ranks is the same as when saving.

    Raises:
        CheckpointError: No checkpoint is complete; the message lists the incomplete ones with the
            reasons.
        ConfigError: Rank `own_of` did not write the checkpoint.

    Cost: rank 0 reads and hashes all files once.
    """
    choice = _Choice()
    if group.rank == 0:
        choice = _choose(Path(where))
    choice = exchange(group, choice)[0]
    if choice.problem:
        raise CheckpointError(choice.problem)
    for skipped in choice.skipped:
        LOG.info("skipped %s: %s", skipped.path, skipped.reason)
    path = Path(choice.path)
    LOG.info("opened %s", path)
    manifest = read_manifest(path)
    num_owners = _num_owners(manifest)
    if own_of is None and num_owners == group.size:
        own_of = group.rank
    if own_of is not None and num_owners and not 0 <= own_of < num_owners:
        msg = (
            f"own_of must be from 0 to {num_owners - 1}, the ranks that wrote {path}, got {own_of}"
        )
        raise ConfigError(msg)
    return Checkpoint(path, manifest, choice.skipped, own_of=own_of if num_owners else None)


def verify(path: str | os.PathLike[str]) -> Manifest:
    """Check the manifest and all files of a checkpoint; return the manifest.

    Raises:
        CheckpointError: Files are missing, truncated or altered; the message names every problem.
    """
    path = Path(path)
    manifest = read_manifest(path)
    problems = []
    named = CheckpointDirectory.step_of(path)
    if named is not None and named != manifest.step:
        problems.append(
            f"{MANIFEST_NAME} has step {manifest.step}, but its directory is named {path.name}: "
            "restore the directory's name"
        )
    for name, expected in sorted(manifest.files.items()):
        try:
            file = _file_in(path, name)
            nbytes = file.stat().st_size
            # a file with the wrong length is not hashed
            actual = FileEntry(nbytes, "") if nbytes != expected.nbytes else hash_file(file)
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except OSError as exc:
            problems.append(f"{name} cannot be read: {exc.strerror}")
        except CheckpointError as exc:
            problems.append(str(exc))
        else:
            if actual.nbytes != expected.nbytes:
                problems.append(
                    f"{name} is truncated or extended: {actual.nbytes:,} bytes, expected "
                    f"{expected.nbytes:,}"
                )
            elif actual.sha256 != expected.sha256:
                problems.append(f"sha256 mismatch in {name}")
    raise_all(problems, CheckpointError)
    return manifest


def open_last(where: str | os.PathLike[str]) -> Checkpoint:
    """Verify and return a checkpoint, or the last one in a directory.

    Raises:
        CheckpointError: The checkpoint does not exist or is damaged.
    """
    path = Path(where)
    if not path.is_dir():
        msg = (
            f"{path} is not a checkpoint or a directory of checkpoints: pass a path that "
            "braid.save has written"
        )
        raise CheckpointError(msg)
    inner = path / "checkpoints"
    path = inner if inner.is_dir() else path
    directory = CheckpointDirectory(path)
    steps = directory.steps()
    if steps:
        path = directory.locate(steps[-1])
    try:
        return Checkpoint(path, verify(path))
    except CheckpointError as exc:
        msg = f"{path} cannot be used: {exc}"
        if len(steps) > 1:
            msg += f": name an earlier one, such as {directory.locate(steps[-2])}"
        raise CheckpointError(msg) from exc


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Return a checkpoint's manifest after a check of its digest, without checking files.

    Raises:
        CheckpointError: The manifest does not exist or is damaged.
    """
    try:
        with _file_in(Path(path), MANIFEST_NAME).open("rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)  # one more byte shows that it is too large
    except FileNotFoundError as exc:
        msg = f"incomplete: no {MANIFEST_NAME}" if Path(path).is_dir() else "does not exist"
        raise CheckpointError(msg) from exc
    except OSError as exc:
        msg = f"{MANIFEST_NAME} cannot be read: {exc.strerror}"
        raise CheckpointError(msg) from exc
    return decode_manifest(data)


def _num_owners(manifest: Manifest) -> int:
    """Return the number of ranks that wrote per-rank tensors."""
    return len({rank for rank, _ in map(owner_of, manifest.tensors) if rank is not None})


def _choose(where: Path) -> _Choice:
    steps = CheckpointDirectory(where).steps()
    if not steps:
        try:
            verify(where)
        except CheckpointError as exc:
            problem = f"{where} has no readable checkpoint: {exc}"
            return _Choice(problem=problem)
        return _Choice(path=str(where))
    skipped: list[Skipped] = []
    for step in reversed(steps):
        path = CheckpointDirectory(where).locate(step)
        try:
            verify(path)
        except CheckpointError as exc:
            skipped.append(Skipped(str(path), str(exc)))
        else:
            return _Choice(path=str(path), skipped=tuple(skipped))
    listed = "\n".join(f"  {path}: {reason}" for path, reason in skipped)
    return _Choice(problem=(f"{where} has no complete checkpoint:\n{listed}"))


def _ranges(entry: TensorEntry, box: tuple[slice, ...] | None) -> list[tuple[int, int]]:
    if box is None:
        return [(0, extent) for extent in entry.shape]
    if len(box) != len(entry.shape) or any(s.step not in {None, 1} for s in box):
        msg = (
            f"a tensor of shape {list(entry.shape)} needs {len(entry.shape)} slices of step 1, "
            f"one per dim, got {box}"
        )
        raise CheckpointError(msg)
    ranges = [s.indices(extent)[:2] for s, extent in zip(box, entry.shape, strict=True)]
    return [(low, max(low, high)) for low, high in ranges]


def _file_in(directory: Path, name: str) -> Path:
    """Return a file of the checkpoint; raise if it is a link or not a regular file."""
    path = directory / name
    if path.is_symlink():
        msg = f"{name} is a symbolic link; a checkpoint's files are in its directory"
        raise CheckpointError(msg)
    if path.exists() and not path.is_file():
        msg = f"{name} is not a regular file"
        raise CheckpointError(msg)
    return path


class Parts(Protocol):
    """Interface of engines that shard tensors: returns this rank's shard of a tensor."""

    def whole_shape(self, name: str, part: tuple[int, ...]) -> tuple[int, ...]:
        """Return the global shape of the tensor `name`, whose shard here has the shape `part`."""

    def part_of(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of the tensor `name`, from the whole tensor `whole`."""


class PartedCheckpoint(Checkpoint):
    """A checkpoint that returns this rank's shard of each tensor.

    Args:
        checkpoint: The checkpoint, with whole tensors.
        parts: Object that cuts this rank's shards out of whole tensors.
    """

    def __init__(self, checkpoint: Checkpoint, parts: Parts) -> None:
        super().__init__(
            checkpoint.path, checkpoint.manifest, checkpoint.skipped, own_of=checkpoint.own_of
        )
        self._parts = parts

    def read(self, name: str, box: tuple[slice, ...] | None = None) -> torch.Tensor:
        """Return this rank's shard of a tensor, or a box of the whole tensor."""
        tensor = super().read(name, box)
        return tensor if box is not None else self._parts.part_of(name, tensor)

    def require(self, expected: Mapping[str, TensorSpec]) -> None:
        """Check that the checkpoint has exactly the tensors that have these shards.

        Args:
            expected: Shape and dtype of each shard by tensor name; see `Checkpoint.require`.
        """
        super().require(
            {
                name: spec._replace(shape=self._parts.whole_shape(name, spec.shape))
                for name, spec in expected.items()
            }
        )
