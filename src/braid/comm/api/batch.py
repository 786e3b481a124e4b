"""Several operations launched as one: messages both ways without deadlock, many small tensors without many steps.

    with group.coalesce() as batch:
        batch.send(x, after)
        batch.recv(y, before)
    batch.work.wait()

Inside the block operations are only written down. At its end they are all started, so it does not matter in which order
messages are written down; neighbours that are the same all-reduce on small tensors are fused into one, so these may not
share memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from braid.comm.api.call import Order, nbytes_of
from braid.comm.api.movements import Moving
from braid.comm.api.point_to_point import Messaging
from braid.comm.api.reductions import Reducing
from braid.comm.engines.work import Work
from braid.comm.tensors.arguments import Data, overlap
from braid.comm.tensors.copies import Copies
from braid.errors import ConfigError, StaleError

__all__ = ["Batch", "Works"]

FUSED_BYTES = 256 << 10  # tensors up to this size are worth copying together


class Works:
    """Several Works as one.

    Args:
        works: In the order in which they were started.
        results: What the calls returned.
    """

    def __init__(self, works: Sequence[Work], results: Sequence[Any]) -> None:
        self._works = works
        self.result = list(results)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when all have ended; raises the error of the first that failed."""
        for work in self._works:
            work.wait(timeout_s)

    def done(self) -> bool:
        """Whether all have ended."""
        states = [work.done() for work in self._works]  # each takes the steps that it can
        return all(states)

    def exception(self) -> BaseException | None:
        """What stopped the first that failed."""
        return next((error for work in self._works if (error := work.exception())), None)

    def add_done_callback(self, call: Callable[[Works], None]) -> None:
        """Have `call(self)` called once when all have ended."""
        left = [len(self._works)]
        counting = threading.Lock()  # works end in several threads
        if not left[0]:
            call(self)

        def ended(_work: Work) -> None:
            with counting:
                left[0] -= 1
                last = not left[0]
            if last:
                call(self)

        for work in self._works:
            work.add_done_callback(ended)

    def __repr__(self) -> str:
        return f"Works({list(self._works)})"


class Batch(Reducing, Moving, Messaging):
    """Writes operations down and starts them together; made by `Group.coalesce`, a context manager.

    Calls return what they will return when `work` has ended; `async_op` makes no sense here.

    Attributes:
        orders: What has been written down.

    Args:
        rank: Of the group.
        size: Of the group.
        device_types: The group's.
        launch: Starts orders and returns their Works.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device_types: Callable[[torch.Tensor], frozenset[str]],
        launch: Callable[[Sequence[Order]], list[Work]],
    ) -> None:
        self.rank = rank
        self.size = size
        self._types = device_types
        self._launch = launch
        self.orders: list[Order] = []
        self._work: Works | None = None

    @property
    def work(self) -> Works:
        """Stands for all operations.

        Raises:
            StaleError: The block has not ended.
        """
        if self._work is None:
            msg = "expected the coalesced block to have ended, found that its operations have not been started"
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
            self._work = Works(self._launch(fuse(self.orders)), [o.returned for o in self.orders])

    def one(
        self, kind: str, x: Data, *, out: Data | None, op: str, root: int, wire: str | None
    ) -> Order:
        """Write down the operation called `kind` and return its order."""
        if kind == "all_reduce":
            self.all_reduce(x, op, wire=wire)
        elif kind == "broadcast":
            self.broadcast(x, root)
        elif kind == "all_gather":
            self.all_gather(x, out=out)
        elif kind == "reduce_scatter":
            self.reduce_scatter(x, op, out=out)
        else:
            self.all_to_all(x, out=out)
        return self.orders[-1]

    def _submit(self, order: Order) -> Any:
        if order.async_op:
            msg = "expected calls without async_op inside coalesce(), found one with it: wait for batch.work instead"
            raise ConfigError(msg)
        self.orders.append(order)
        return order.returned

    def _device_types(self, x: torch.Tensor) -> frozenset[str]:
        return self._types(x)


def fuse(orders: Sequence[Order]) -> list[Order]:
    """Join neighbouring all-reduces of small tensors of one dtype and op into one each.

    Ranks that write down the same calls fuse them alike, since it depends on their descriptions only.

    Raises:
        ConfigError: Some of them share memory.
    """
    runs: list[list[Order]] = []
    for order in orders:
        if runs and _alike(runs[-1][-1], order):
            _check_apart(runs[-1], order)
            runs[-1].append(order)
        else:
            runs.append([order])
    return [_joined(run) for run in runs]


def _alike(one: Order, other: Order) -> bool:
    alike = one.key._replace(shape=None) == other.key._replace(shape=None)
    return alike and _fusible(one) and _fusible(other)


def _fusible(order: Order) -> bool:
    """An algorithm that was asked for by name is asked for these tensors, not for a copy of them."""
    key = order.key
    small = 0 < order.nbytes <= FUSED_BYTES
    return small and key.kind == "all_reduce" and key.algorithm is None


def _check_apart(run: Sequence[Order], order: Order) -> None:
    """Refuse to fuse an all-reduce with one of what it writes: the later one would not see what the earlier one has done.

    Args:
        run: Orders that are fused.
        order: One more.

    Raises:
        ConfigError: Names both.
    """
    for other in run:
        touched = (*order.reads, *order.writes)
        if any(overlap(x, y, exactly=True) for x in other.writes for y in touched):
            shapes = f"{list(other.key.shape or ())} and {list(order.key.shape or ())}"
            msg = (
                "expected tensors of their own for neighbouring small all-reduces of a coalesced block, found two that "
                f"share memory (shapes {shapes}): make them one after the other, in two blocks"
            )
            raise ConfigError(msg)


def _joined(run: Sequence[Order]) -> Order:
    if len(run) == 1:
        return run[0]
    outs = [order.outs[0] for order in run]
    copies = Copies(frozenset({outs[0].device.type}))
    flat = copies.packed(outs)
    copies.unpacked(flat, outs)
    position = 0
    for order in run:  # their own loads come first, in order
        if order.copies is not None:
            position = copies.include(order.copies, position=position)
    key = run[0].key._replace(shape=(flat.numel(),))
    limits = [order.timeout_s for order in run if order.timeout_s is not None]
    return run[0]._replace(
        key=key,
        ins=(flat,),
        outs=(flat,),
        copies=copies,
        nbytes=nbytes_of(flat),
        timeout_s=max(limits) if limits else None,
    )
