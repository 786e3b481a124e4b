"""Saving: every rank writes its pieces, the manifest comes last, a rename makes it a checkpoint.

    all ranks   prepare                rank 0 makes the hidden directory and reads the free space
    exchange    needs, problems        any problem: all raise the same error, nothing has changed
    all ranks   write, hash, fsync     one file each
    exchange    digests, problems
    rank 0      manifest, fsync, rename, remove older ones
    exchange    problem or none

Whatever fails, and whenever a process is killed, earlier checkpoints are untouched and no half
checkpoint can be seen.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from braid.checkpoint.agreement import R, RankReport, exchange, problem_of, raise_problems
from braid.checkpoint.directory import CheckpointDirectory
from braid.checkpoint.loading import read_manifest
from braid.checkpoint.manifest import (
    MANIFEST_NAME,
    MAX_STEP,
    FileEntry,
    Manifest,
    Origin,
    Piece,
    TensorEntry,
    encode_manifest,
)
from braid.checkpoint.snapshot import Slice, Snapshot
from braid.checkpoint.tensor_file import tensor_file_bytes, write_tensor_file
from braid.comm import Group
from braid.errors import CheckpointError, ConfigError
from braid.types import dtype_name

__all__ = ["REMEDY", "OnSaved", "Written", "publish", "save", "save_alone", "write_pieces"]

LOG = logging.getLogger(__name__)

OnSaved = Callable[[int, Path, bool], object]
# of files that have gone, or that another run puts there meanwhile
OF_OTHERS = {errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY}
MANIFEST_RESERVE_BYTES = 1 << 20
REMEDY = "Earlier checkpoints are untouched"


class _Plan(RankReport, frozen=True):
    need: int = 0
    free: int = 0
    writer: str = ""


class Written(RankReport, frozen=True):
    """Report of a rank whose file is written.

    Attributes:
        file: Entry of the file; None where it could not be written.
        tensors: Pieces in it, by name of the tensor.
    """

    file: FileEntry | None = None
    tensors: dict[str, TensorEntry] = msgspec.field(default_factory=dict)


def save(
    directory: str | os.PathLike[str],
    snapshot: Snapshot,
    *,
    step: int,
    group: Group,
    state: Mapping[str, Any] | None = None,
    numerics: Mapping[str, Any] | None = None,
    keep: int = 3,
    on_saved: OnSaved | None = None,
) -> Path:
    """Write a checkpoint; a collective.

    Args:
        directory: Directory of the run's checkpoints, on a file system that all ranks see.
        snapshot: Tensors that this rank owns.
        step: Number of completed steps.
        group: Ranks whose snapshots make up the checkpoint.
        state: Values that are no tensors, as JSON knows them; rank 0's are stored.
        numerics: Settings on which bits depend; rank 0's are stored.
        keep: Number of checkpoints to keep, this one included; older ones are removed after it is
            complete.
        on_saved: Called on every rank with step, path, and whether the files carry digests.

    Returns:
        Path of the checkpoint, `directory/step-00000200`.

    Raises:
        ConfigError: `keep` or `step` is out of range.
        CheckpointError: Saving failed, with the same message on every rank; nothing but the attempt
            is lost.
        PeerLostError: A rank died; its files are hidden, and removed by the next save.

    Cost: one pass over the owned bytes (hash and write), six small all_gathers.
    """
    if keep < 1 or not 0 <= step <= MAX_STEP:
        msg = (
            f"keep must be at least 1 and step from 0 to {MAX_STEP:,}, got keep={keep}, step={step}"
        )
        raise ConfigError(msg)
    home = CheckpointDirectory(directory)
    action = f"cannot save checkpoint {home.final(step)}"
    pieces: list[Slice] = []

    def prepare() -> _Plan:
        # wide dtypes first: every value is aligned
        pieces.extend(
            sorted(snapshot.pieces(), key=lambda p: (-p.tensor.element_size(), p.name, p.offset))
        )
        return _prepare(home, pieces, step, first=group.rank == 0)

    plans = exchange(group, _attempt(prepare, _Plan))
    need = sum(plan.need for plan in plans) + MANIFEST_RESERVE_BYTES
    space = ""
    if plans[0].free < need:
        space = (
            f"it needs {need:,} bytes, {plans[0].free:,} are free on this disk: remove something "
            "there, "
            "or choose another directory"
        )
    try:
        raise_problems(action, [p.problem for p in plans], size=group.size, remedy=REMEDY)
        raise_problems(action, [space], size=1, remedy=REMEDY)
        write = partial(write_pieces, home, pieces, step, group.rank, plans[0].writer)
        written = exchange(group, _attempt(write, Written))
        raise_problems(action, [w.problem for w in written], size=group.size, remedy=REMEDY)
        done = RankReport()
        if group.rank == 0:
            done = _attempt(
                lambda: publish(home, written, step, state or {}, numerics or {}), RankReport
            )
        reports = exchange(group, done)
        raise_problems(action, [r.problem for r in reports], size=group.size, remedy=REMEDY)
    except CheckpointError:
        if group.rank == 0:
            home.discard(step)
        raise
    if group.rank == 0:
        home.prune(keep, step)
    LOG.info("saved %s, %d bytes of this rank", home.final(step), plans[group.rank].need)
    if on_saved is not None:
        on_saved(step, home.final(step), True)
    return home.final(step)


def save_alone(
    directory: str | os.PathLike[str],
    parts: Sequence[Snapshot],
    *,
    step: int,
    state: Mapping[str, Any] | None = None,
    numerics: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Write a checkpoint of several files in one process.

    Args:
        directory: Directory of checkpoints.
        parts: Tensors of each file.
        step: Number of completed steps.
        state: Values that are no tensors, as JSON knows them.
        numerics: Settings on which bits depend.
        keep: Number of checkpoints to keep, this one included; all when None.

    Returns:
        Path of the checkpoint.

    Raises:
        CheckpointError: There is one of this step, or it cannot be written; nothing is left.
    """
    home = CheckpointDirectory(directory)
    action = f"cannot write {home.final(step)}"
    if step in home.steps():
        msg = f"{action}: it exists; choose another directory"
        raise CheckpointError(msg)
    began = False
    problems = []
    try:
        home.begin(step, this_process())
        began = True
        written = []
        for rank, part in enumerate(parts):
            pieces = sorted(
                part.pieces(), key=lambda p: (-p.tensor.element_size(), p.name, p.offset)
            )
            written.append(write_pieces(home, pieces, step, rank))
        problems = [report.problem for report in written if report.problem]
        if not problems:
            done = publish(home, written, step, state or {}, numerics or {})
            problems = [done.problem] if done.problem else []
    except OSError as exc:
        problems = [exc.strerror or errno.errorcode.get(exc.errno or 0, str(exc))]
    except Exception as exc:  # noqa: BLE001 - nothing is left, whatever it is
        problems = [problem_of(exc)]
    if problems:
        if began:  # else the hidden directory is that of another run
            home.discard(step)
        raise CheckpointError(f"{action}: {'; '.join(problems)}. {REMEDY}")
    if keep is not None:
        home.prune(keep, step)
    return home.final(step)


def _attempt(action: Callable[[], R], failed: Callable[[str], R]) -> R:
    """Return the report of an action, or one of any exception: the other ranks wait for it."""
    try:
        return action()
    except Exception as exc:  # noqa: BLE001 - see above
        # as text: a record that keeps the traceback would keep its frames, and all that they hold
        text = traceback.format_exc().encode(errors="backslashreplace").decode()
        LOG.warning("saving failed on this rank:\n%s", text)
        return failed(problem_of(exc))


def _prepare(home: CheckpointDirectory, pieces: list[Slice], step: int, *, first: bool) -> _Plan:
    try:
        need = tensor_file_bytes(_named(pieces))
        if first:
            writer = this_process()
            home.begin(step, writer)
            return _Plan(need=need, free=home.free_bytes(), writer=writer)
        return _Plan(need=need)
    except OSError as exc:
        return _Plan(f"{exc.strerror or exc} ({home.path}){_other_run(home, exc, this_process())}")
    except CheckpointError as exc:
        return _Plan(str(exc))


def write_pieces(
    home: CheckpointDirectory, pieces: list[Slice], step: int, rank: int, writer: str = ""
) -> Written:
    """Write the file of a rank; the report has its entry, or the problem."""
    tensors = _named(pieces)
    name = f"rank-{rank:05d}.safetensors"
    try:
        file = write_tensor_file(home.partial(step) / name, tensors)
    except OSError as exc:
        problem = f"{exc.strerror or exc} while writing {name}"
        if exc.errno in {errno.ENOSPC, errno.EDQUOT}:
            free = -1
            with contextlib.suppress(OSError):
                free = home.free_bytes()
            problem += (
                f", which needs {tensor_file_bytes(tensors):,} bytes; {free:,} are left on "
                "this disk"
            )
        return Written(problem + _other_run(home, exc, writer))
    entries: dict[str, TensorEntry] = {}
    for key, piece in zip(tensors, pieces, strict=True):
        dtype = dtype_name(piece.tensor.dtype)
        box = Piece(name, key, piece.offset, tuple(piece.tensor.shape))
        before = entries[piece.name].pieces if piece.name in entries else ()
        entries[piece.name] = TensorEntry(piece.global_shape, dtype, (*before, box))
    return Written(file=file, tensors=entries)


def publish(
    home: CheckpointDirectory,
    written: list[Written],
    step: int,
    state: Mapping[str, Any],
    numerics: Mapping[str, Any],
) -> RankReport:
    """Write the manifest of all ranks' files, and make the checkpoint visible."""
    tensors: dict[str, TensorEntry] = {}
    files: dict[str, FileEntry] = {}
    for rank, part in enumerate(written):
        if part.file is not None:
            files[f"rank-{rank:05d}.safetensors"] = part.file
        for name, entry in part.tensors.items():
            known = tensors.setdefault(name, TensorEntry(entry.shape, entry.dtype, ()))
            if (known.shape, known.dtype) != (entry.shape, entry.dtype):
                return RankReport(
                    f"ranks disagree about {name!r}: {known.dtype}{list(known.shape)} and, on "
                    f"rank {rank}, "
                    f"{entry.dtype}{list(entry.shape)}"
                )
            tensors[name] = TensorEntry(entry.shape, entry.dtype, (*known.pieces, *entry.pieces))
    writer = this_process()
    manifest = Manifest(
        step,
        dict(sorted(tensors.items())),
        files,
        dict(state),
        dict(numerics),
        Origin(writer=writer),
    )
    try:
        data = encode_manifest(manifest)
        with (home.partial(step) / MANIFEST_NAME).open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        home.publish(step)
    except OSError as exc:
        problem = f"{exc.strerror or exc} while writing {MANIFEST_NAME}"
        return RankReport(problem + _other_run(home, exc, writer))
    except CheckpointError as exc:
        return RankReport(str(exc))
    return RankReport()


def this_process() -> str:
    """Return the name of this process for other runs, such as `pid 812 on host a`."""
    return f"pid {os.getpid()} on host {socket.gethostname()}"


def _other_run(home: CheckpointDirectory, exc: OSError, writer: str) -> str:
    """Return a clause that names the other run that uses this directory; empty if there is none."""
    if exc.errno not in OF_OTHERS:
        return ""
    others = [other for other in home.writers() if other != writer]
    for step in reversed(home.steps()) if not others else ():
        with contextlib.suppress(CheckpointError):
            others = [read_manifest(home.locate(step)).braid.writer]
            break
    others = [other for other in others if other not in {"", writer}]
    if not others:
        return ""
    return (
        f": another run ({others[0]}) saves to this directory, too: give each run a directory of "
        "its own"
    )


def _named(pieces: list[Slice]) -> dict[str, torch.Tensor]:
    """Return key in the file -> values; a tensor with several boxes here has a key for each."""
    keys: dict[str, torch.Tensor] = {}
    for piece in pieces:
        key, number = piece.name, 1
        while key in keys:
            number += 1
            key = f"{piece.name}#{number}"
        keys[key] = piece.tensor
    return keys
