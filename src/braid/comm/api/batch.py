"""Operations that are started together, or separately without a thread, and waited for later.

    with group.coalesce() as batch:
        batch.send(x, after)
        batch.recv(y, before)
    batch.work.wait()

Inside the block, operations are only recorded. At its end all are started, so messages in both
directions cannot deadlock, in whatever order they are recorded. Consecutive equal all-reduces of
small tensors are fused into one; such tensors may not share memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from braid.comm.api.face import Face, nbytes_of
from braid.comm.api.movements import Movements
from braid.comm.api.point_to_point import PointToPoint
from braid.comm.api.reductions import Reductions
from braid.comm.engines.collective import Collective
from braid.comm.engines.work import StepsBy, Work, Works
from braid.comm.tensors.arguments import overlap
from braid.comm.tensors.copies import Copies
from braid.errors import ConfigError, StaleError

__all__ = ["Batch", "Starter"]

FUSED_BYTES = 256 << 10  # fusing tensors up to this size is worth the copies


class _FaceOfGroup(Reductions, Movements, PointToPoint):
    """Base of classes that offer a group's calls, but submit them in another way."""

    def __init__(self, group: Face) -> None:
        self.rank = group.rank
        self.size = group.size
        self.devices = group.devices
        self._group = group

    def _device_types(self, x: torch.Tensor) -> frozenset[str]:
        return self._group._device_types(x)  # noqa: SLF001 - another face of the same group


class Starter(_FaceOfGroup):
    """Nonblocking operations of a group; each returns a Work; made by `Group.starting`.

    Args:
        group: The group.
        start: Function that starts a collective and returns its Work.
        steps_by: Thread that takes the operations' steps.
    """

    def __init__(
        self, group: Face, start: Callable[[Collective, StepsBy], Work], steps_by: StepsBy
    ) -> None:
        super().__init__(group)
        self._start, self._steps_by = start, steps_by
        if group._repeat is not None:  # noqa: SLF001 - another face of the same group
            self._repeat = partial(group._repeat, steps_by=steps_by)  # noqa: SLF001

    def _submit(self, collective: Collective) -> Any:
        collective.async_op = True
        return self._start(collective, self._steps_by)


class Batch(_FaceOfGroup):
    """Context manager that records operations and starts them together; see `Group.coalesce`.

    Calls return the object that will hold their result when `work` has ended. They do not accept
    `async_op`.

    Attributes:
        collectives: Recorded collectives.

    Args:
        group: The group.
        launch: Function that starts collectives and returns their Works.
    """

    def __init__(self, group: Face, launch: Callable[[Sequence[Collective]], list[Work]]) -> None:
        super().__init__(group)
        self._launch = launch
        self.collectives: list[Collective] = []
        self._work: Works | None = None

    @property
    def work(self) -> Works:
        """Works of all operations of the block.

        Raises:
            StaleError: The block has not ended.
        """
        if self._work is None:
            msg = (
                "batch.work was read inside the coalesce() block, before its operations were "
                "started: read it after the `with` block"
            )
            raise StaleError(msg)
        return self._work

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._work = Works(
                self._launch(fuse(self.collectives)), [c.result for c in self.collectives]
            )

    def _submit(self, collective: Collective) -> Any:
        if collective.async_op:
            msg = (
                "async_op=True has no meaning inside coalesce(): leave it out, "
                "and wait for batch.work after the block"
            )
            raise ConfigError(msg)
        self.collectives.append(collective)
        return collective.result


def fuse(collectives: Sequence[Collective]) -> list[Collective]:
    """Fuse consecutive all-reduces of small tensors with equal dtype and op.

    The result depends only on descriptions, so ranks that record the same calls fuse the same ones.

    Raises:
        ConfigError: Some tensors of the collectives share memory.
    """
    runs: list[list[Collective]] = []
    for collective in collectives:
        if runs and _fits(runs[-1][-1], collective):
            _check_apart(runs[-1], collective)
            runs[-1].append(collective)
        else:
            runs.append([collective])
    return [_joined(run) for run in runs]


def _fits(one: Collective, other: Collective) -> bool:
    """Return whether two small all-reduces differ only in their shapes."""
    alike = (one.dtype, one.op, one.wire) == (other.dtype, other.op, other.wire)
    if not (alike and _fusible(one) and _fusible(other)):
        return False
    return one.outs[0].device == other.outs[0].device


def _fusible(c: Collective) -> bool:
    """Return whether a collective is a small all-reduce without an explicit algorithm.

    An explicit algorithm is meant for the caller's tensors, not for a copy of them.
    """
    return 0 < c.nbytes <= FUSED_BYTES and c.kind == "all_reduce" and c.algorithm is None


def _check_apart(run: Sequence[Collective], collective: Collective) -> None:
    """Raise if an all-reduce uses a tensor that an earlier one of the fused run writes.

    Args:
        run: Collectives that are fused.
        collective: The next collective.

    Raises:
        ConfigError: Two of them share memory; the message contains both shapes.
    """
    for other in run:
        touched = (*collective.reads, *collective.writes)
        if any(overlap(x, y, exactly=True) for x in other.writes for y in touched):
            shapes = f"{list(other.shape or ())} and {list(collective.shape or ())}"
            msg = (
                "two neighbouring small all-reduces of a coalesced block share memory (shapes "
                f"{shapes}): "
                "put them into two blocks"
            )
            raise ConfigError(msg)


def _joined(run: Sequence[Collective]) -> Collective:
    if len(run) == 1:
        return run[0]
    outs = [c.outs[0] for c in run]
    copies = Copies(frozenset({outs[0].device.type}))
    flat = copies.packed(outs)
    copies.unpacked(flat, outs)
    position = 0
    for c in run:  # copies of the operations come first, in order
        if c.copies is not None:
            position = copies.include(c.copies, position=position)
    limits = [c.timeout_s for c in run if c.timeout_s is not None]
    return replace(
        run[0],
        shape=(flat.numel(),),
        ins=(flat,),
        outs=(flat,),
        copies=copies,
        nbytes=nbytes_of(flat),
        timeout_s=max(limits) if limits else None,
    )
