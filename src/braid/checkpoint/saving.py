"""Saving: every rank writes its pieces, rank 0 writes the manifest and renames the directory.

    all ranks   prepare                rank 0 makes the hidden directory and reads the free space
    exchange    needs, problems        any problem: all ranks raise the same error
    all ranks   write, hash, fsync     one file each
    exchange    digests, problems
    rank 0      manifest, fsync, rename, remove older ones
    exchange    problem or none

If anything fails, or a process is killed at any time, earlier checkpoints are untouched and no
incomplete checkpoint is visible.
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

__all__ = ["OnSaved", "Written", "publish", "save", "save_alone", "write_pieces"]

LOG = logging.getLogger(__name__)

OnSaved = Callable[[int, Path, bool], object]
# errors if another run removes or creates files in the same directory
OF_OTHERS = {errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY}
MANIFEST_RESERVE_BYTES = 1 << 20


class _Plan(RankReport, frozen=True):
    need: int = 0
    free: int = 0
    writer: str = ""


class Written(RankReport, frozen=True):
    """Report of a rank after it wrote its file.

    Attributes:
        file: Entry of the file; None if it could not be written.
        tensors: Pieces in the file, by tensor name.
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
        directory: Directory of the run's checkpoints, on a file system shared by all ranks.
        snapshot: Tensors that this rank owns.
        step: Number of completed steps.
        group: Ranks that write the checkpoint.
        state: Values that are not tensors, as JSON values; rank 0's are stored.
        numerics: Settings that affect the bits of the result; rank 0's are stored.
        keep: Number of checkpoints to keep, this one included; older ones are removed after it is
            complete.
        on_saved: Called on every rank with step, path, and whether the files carry digests.

    Returns:
        Path of the checkpoint, `directory/step-00000200`.

    Raises:
        ConfigError: `keep` or `step` is out of range.
        CheckpointError: Saving failed, with the same message on every rank; earlier checkpoints are
            untouched.
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
        # wide dtypes first, which aligns every value
        pieces.extend(
            sorted(snapshot.pieces(), key=lambda p: (-p.tensor.element_size(), p.name, p.offset))
        )
        return _prepare(home, pieces, step, first=group.rank == 0)

    plans = exchange(group, _attempt(prepare, _Plan))
    need = sum(plan.need for plan in plans) + MANIFEST_RESERVE_BYTES
    space = ""
    if plans[0].free < need:
        space = (
            f"it needs {need:,} bytes, {plans[0].free:,} are free on this disk: remove files "
            "there, "
            "or choose another directory"
        )
    try:
        raise_problems(action, [p.problem for p in plans], size=group.size)
        raise_problems(action, [space], size=1)
        write = partial(write_pieces, home, pieces, step, group.rank, plans[0].writer)
        written = exchange(group, _attempt(write, Written))
        raise_problems(action, [w.problem for w in written], size=group.size)
        report = RankReport()
        if group.rank == 0:
            report = _attempt(
                lambda: publish(home, written, step, state or {}, numerics or {}), RankReport
            )
        reports = exchange(group, report)
        raise_problems(action, [r.problem for r in reports], size=group.size)
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
        state: Values that are not tensors, as JSON values.
        numerics: Settings that affect the bits of the result.
        keep: Number of checkpoints to keep, this one included; all when None.

    Returns:
        Path of the checkpoint.

    Raises:
        CheckpointError: A checkpoint of this step exists, or it cannot be written; no part of it
            remains.
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
            report = publish(home, written, step, state or {}, numerics or {})
            problems = [report.problem] if report.problem else []
    except OSError as exc:
        problems = [exc.strerror or errno.errorcode.get(exc.errno or 0, str(exc))]
    except Exception as exc:  # noqa: BLE001 - clean up after any error
        problems = [problem_of(exc)]
    if problems and began:  # else the hidden directory belongs to another run
        home.discard(step)
    raise_problems(action, problems, size=1)
    if keep is not None:
        home.prune(keep, step)
    return home.final(step)


def _attempt(action: Callable[[], R], failed: Callable[[str], R]) -> R:
    """Return the report of an action, or a report of its exception for the other ranks."""
    try:
        return action()
    except Exception as exc:  # noqa: BLE001 - see above
        # as text, because a log record with the traceback would keep its frames alive
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
    """Write a rank's file; return a report with the file's manifest entry, or the problem.

    `writer` is the process that began this save; the problem names other processes that save here.
    """
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
    """Write the manifest for all ranks' files, and rename the directory to its final name.

    Args:
        home: Directory of the run's checkpoints.
        written: Report of each rank on its file.
        step: Number of completed steps.
        state: As for `save`.
        numerics: As for `save`.

    Returns:
        Report with the reason of a failure, if any.
    """
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
    """Return a name of this process for messages of other runs, such as `pid 812 on host a`."""
    return f"pid {os.getpid()} on host {socket.gethostname()}"


def _other_run(home: CheckpointDirectory, exc: OSError, writer: str) -> str:
    """Return a clause that names another run that uses this directory, if there is one."""
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
        f": another run ({others[0]}) also saves to this directory: give each run a separate "
        "directory"
    )


def _named(pieces: list[Slice]) -> dict[str, torch.Tensor]:
    """Return values by key in the file, with one key for each box of a tensor."""
    keys: dict[str, torch.Tensor] = {}
    for piece in pieces:
        key, number = piece.name, 1
        while key in keys:
            number += 1
            key = f"{piece.name}#{number}"
        keys[key] = piece.tensor
    return keys
