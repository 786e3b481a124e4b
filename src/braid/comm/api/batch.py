"""Operations that are started together, or one by one without a thread, and waited for later.

    with group.coalesce() as batch:
        batch.send(x, after)
        batch.recv(y, before)
    batch.work.wait()

Inside the block operations are only written down. At its end they are all started, so messages both
ways cannot deadlock, whatever the order in which they are written down. Neighbours that are the
same all-reduce on small tensors are fused into one; such tensors may not share memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from braid.comm.api.face import Face, nbytes_of
from braid.comm.api.movements import Movements
from braid.comm.api.point_to_point import PointToPoint
from braid.comm.api.reductions import Reductions
from braid.comm.engines.collective import Collective
from braid.comm.engines.work import Work, Works
from braid.comm.tensors.arguments import overlap
from braid.comm.tensors.copies import Copies
from braid.errors import ConfigError, StaleError

__all__ = ["Batch", "Starter"]

FUSED_BYTES = 256 << 10  # tensors up to this size are worth copying together


class _FaceOfGroup(Reductions, Movements, PointToPoint):
    """Another face of a group, for calls that are submitted in another way."""

    def __init__(self, group: Face) -> None:
        self.rank = group.rank
        self.size = group.size
        self.devices = group.devices
        self._group = group

    def _device_types(self, x: torch.Tensor) -> frozenset[str]:
        return self._group._device_types(x)  # noqa: SLF001 - another face of the same group


class Starter(_FaceOfGroup):
    """The operations of a group, each of which returns a Work at once; made by `Group.starting`.

    Args:
        group: The group.
        start: Starts a collective.
    """

    def __init__(self, group: Face, start: Callable[[Collective], Work]) -> None:
        super().__init__(group)
        self._start = start

    def _submit(self, collective: Collective) -> Any:
        collective.async_op = True
        return self._start(collective)


class Batch(_FaceOfGroup):
    """Collects operations and starts them together; a context manager, made by `Group.coalesce`.

    Calls return what they will return when `work` has ended. They do not accept `async_op`.

    Attributes:
        collectives: Collectives that have been written down.

    Args:
        group: The group.
        launch: Starts collectives and returns their Works.
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
                "the work of a coalesced block was asked for inside the block, before its "
                "operations have been started: ask after the `with`"
            )
            raise StaleError(msg)
        return self._work

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
    """Join neighbouring all-reduces of small tensors of one dtype and op into one each.

    Ranks that write down the same calls fuse them alike, since it depends on their descriptions
    only.

    Raises:
        ConfigError: Some of them share memory.
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
    """Return whether two small all-reduces differ in their shapes only."""
    alike = (one.dtype, one.op, one.wire) == (other.dtype, other.op, other.wire)
    if not (alike and _fusible(one) and _fusible(other)):
        return False
    return one.outs[0].device == other.outs[0].device


def _fusible(c: Collective) -> bool:
    """Return whether a collective is a small all-reduce whose algorithm was left to braid.

    An algorithm that the caller names is meant for these tensors, not for a copy of them.
    """
    return 0 < c.nbytes <= FUSED_BYTES and c.kind == "all_reduce" and c.algorithm is None


def _check_apart(run: Sequence[Collective], collective: Collective) -> None:
    """Refuse to fuse an all-reduce with an earlier one that writes its tensors.

    Args:
        run: Collectives that are fused.
        collective: The next collective.

    Raises:
        ConfigError: Two of them share memory; names both shapes.
    """
    for other in run:
        touched = (*collective.reads, *collective.writes)
        if any(overlap(x, y, exactly=True) for x in other.writes for y in touched):
            shapes = f"{list(other.shape or ())} and {list(collective.shape or ())}"
            msg = (
                "two neighbouring small all-reduces of a coalesced block share memory (shapes "
                f"{shapes}): "
                "make them one after the other, in two blocks"
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
    for c in run:  # their own loads come first, in order
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
