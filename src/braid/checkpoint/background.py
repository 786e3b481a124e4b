"""Saving in the background: a thread writes a copy of the state while training continues.

    training    step 200 │ copy │ step 201 │ step 202 │ step 203 ...
    thread                      └ write, hash, fsync, manifest, rename ┘

Training is blocked only while the state is copied. The write is as safe as `save`: it has the same
phases on all ranks, and the checkpoint is visible only after the rename. The memory of the copy is
reused by the next save, so it is allocated once.

Source: J. Mohan et al., CheckFreq: frequent, fine-grained DNN checkpointing, FAST 2021.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from braid.checkpoint.saving import OnSaved, save
from braid.checkpoint.snapshot import FailedSnapshot, Slice, Snapshot
from braid.comm import Group
from braid.runtime.closing import Closing

__all__ = ["BackgroundSaver", "Saving"]


class Saving:
    """Handle of a save in the background.

    Attributes:
        step: Number of completed steps.
        stall_s: Seconds for which the caller was blocked, by the previous save and by the copy.
        write_s: Seconds of the write; 0 until it is complete.
    """

    def __init__(self, step: int, stall_s: float) -> None:
        self.step = step
        self.stall_s = stall_s
        self.write_s = 0.0
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._done = threading.Event()

    def done(self) -> bool:
        """Return whether the save has ended, successfully or not."""
        return self._done.is_set()

    def wait(self) -> Path:
        """Wait until the save ends, and return the path of the checkpoint.

        Raises:
            CheckpointError: Saving failed, with the same message on every rank.
            PeerLostError: A rank died.
        """
        self._done.wait()
        if self._error is not None:
            raise self._error
        assert self._path is not None, "a save without an error has a path"
        return self._path

    def finish(self, path: Path | None, error: BaseException | None, write_s: float) -> None:
        """Record the path or error of the save, and wake waiting threads; called by the writer."""
        self._path, self._error, self.write_s = path, error, write_s
        self._done.set()


class BackgroundSaver(Closing):
    """Saves checkpoints while ranks train, one at a time; constructing it is a collective.

    Args:
        group: Ranks that write a checkpoint. The saver splits off another group with the same
            ranks, so that messages of saves and of the training are separate.
    """

    def __init__(self, group: Group) -> None:
        save_group = group.split(0)
        assert save_group is not None, "every rank has a color"
        self._group = save_group
        self._last: Saving | None = None
        self._copies: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def save(
        self,
        directory: str | os.PathLike[str],
        snapshot: Snapshot,
        *,
        step: int,
        state: Mapping[str, Any] | None = None,
        numerics: Mapping[str, Any] | None = None,
        keep: int = 3,
        on_saved: OnSaved | None = None,
    ) -> Saving:
        """Copy the snapshot and start to write it; see `braid.checkpoint.save`.

        Waits for the previous save first, and raises its error if it failed.

        Args:
            directory: Directory of the run's checkpoints.
            snapshot: Tensors that this rank owns; they may change after this returns.
            step: Number of completed steps.
            state: Values that are not tensors.
            numerics: Settings that affect the bits of the result.
            keep: Number of checkpoints to keep.
            on_saved: Function to call in the background thread after the save; see `save`.

        Raises:
            CheckpointError: The previous save failed; this one was not started.

        Cost: a copy of the owned bytes, in host memory.
        """
        began = time.perf_counter()
        self.wait()
        copies: Snapshot
        values: dict[str, Any] = {}
        facts: dict[str, Any] = {}
        try:
            copies = _Copies(self._copied(snapshot))
            values, facts = copy.deepcopy(dict(state or {})), copy.deepcopy(dict(numerics or {}))
        except Exception as exc:  # noqa: BLE001 - reported to all ranks by the save
            copies = FailedSnapshot(exc)
        saving = Saving(step, time.perf_counter() - began)

        def write() -> None:
            start = time.perf_counter()
            path, error = None, None
            try:
                path = save(
                    directory,
                    copies,
                    step=step,
                    group=self._group,
                    state=values,
                    numerics=facts,
                    keep=keep,
                    on_saved=on_saved,
                )
            except BaseException as exc:  # noqa: BLE001 - raised by `Saving.wait`
                error = exc
            saving.finish(path, error, time.perf_counter() - start)

        self._last = saving
        # not a daemon: the process completes its checkpoint before it exits
        threading.Thread(target=write, name="braid-checkpoint").start()
        return saving

    def wait(self) -> Path | None:
        """Wait for the last save, and return its path; None if there is none.

        Raises:
            CheckpointError: The save failed, with the same message on every rank.
        """
        last, self._last = self._last, None
        return None if last is None else last.wait()

    def close(self) -> None:
        """Wait for the last save, and free the copy."""
        self._copies.clear()
        self.wait()

    def _copied(self, snapshot: Snapshot) -> list[Slice]:
        """Copy the pieces to host memory, reusing the memory of the last copies if sizes match.

        All copies from a GPU are queued first; then the host waits once.
        """
        pieces, devices = [], set()
        for piece in snapshot.pieces():
            # torch would conjugate or negate the copy on the CPU before the transfer is complete
            source = piece.tensor.detach().resolve_conj().resolve_neg()
            key = piece.name, piece.offset
            kept = self._copies.get(key)
            if kept is None or kept.shape != source.shape or kept.dtype != source.dtype:
                kept = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
                self._copies[key] = kept
            kept.copy_(source, non_blocking=source.is_cuda)
            if source.is_cuda:
                devices.add(source.device)
            pieces.append(piece._replace(tensor=kept))
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return pieces


class _Copies:
    """Snapshot of copied pieces."""

    def __init__(self, pieces: list[Slice]) -> None:
        self._pieces = pieces

    def pieces(self) -> Iterable[Slice]:
        """Return this rank's slices of tensors; see `Snapshot.pieces`."""
        return self._pieces
