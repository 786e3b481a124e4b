"""Persistent requests: an operation that is described once and started many times (as in MPI-4).

A gradient bucket takes part in the same all-reduce every step. Its request has a separate channel,
so it can start as soon as its gradients are ready, in any order relative to other requests. A start
publishes this rank's part and takes all steps that are possible; nothing blocks until
`Work.wait()`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any

import torch

from braid.comm.api.batch import Batch
from braid.comm.api.face import Face, is_sequence
from braid.comm.engines.collective import Collective, Describer
from braid.comm.engines.engine import Engine
from braid.comm.engines.work import StepsBy, Work
from braid.comm.tensors.arguments import as_tensor
from braid.errors import ConfigError, StaleError

__all__ = ["Numbers", "Request", "describe_persistent"]

PERSISTENT = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
MAX_SCALES = 64  # factors whose descriptions are cached


class Numbers:
    """Numbers of a group's requests, equal on all members.

    A group has a limited number of channels, so numbers are reused. The next number depends only on
    the set of existing requests, not on the order of their creation and deletion, which may differ
    between members. Members also garbage-collect requests at different times. So the numbers of
    unreferenced requests are only recorded (`lost`) until the members agree on them (`reclaim`).
    """

    def __init__(self) -> None:
        self._next = 0
        self._free: list[int] = []
        self._lost: dict[int, Work | None] = {}

    def next(self) -> int:
        """Return the smallest unused number, and mark it as used."""
        if self._free:
            return heapq.heappop(self._free)
        self._next += 1
        return self._next - 1

    def give_back(self, number: int) -> None:
        """Free the number of a retired request."""
        heapq.heappush(self._free, number)

    def lose(self, number: int, work: Work | None) -> None:
        """Record that the request with this number was garbage-collected.

        Args:
            number: Number of the request.
            work: Last start of the request, if it has not ended; else None.
        """
        self._lost[number] = work

    def lost(self) -> list[int]:
        """Return the numbers of garbage-collected requests without an operation in progress."""
        lost = self._lost.copy()  # a finalizer may add requests meanwhile
        return sorted(n for n, work in lost.items() if work is None or work.succeeded)

    def state(self) -> str:
        """Return the numbers in use as text, to compare with other members."""
        return f"{self._next} {sorted(self._free)}"

    def reclaim(self, numbers: Iterable[int]) -> None:
        """Free `numbers`, whose requests have been garbage-collected on all members.

        All members call this at the same point of the order of their requests.
        """
        for number in numbers:
            del self._lost[number]
            self.give_back(number)


class Request:
    """An operation that is prepared once, with `Group.persistent`, and started often.

    Attributes:
        result: Result of the last start that has ended.

    Args:
        engine: Engine of the group.
        collective: Collective to run at every start.
        numbers: The group's request numbers; this request takes the next one.
        describer: The group's descriptions.
    """

    def __init__(
        self,
        engine: Engine,
        collective: Collective,
        numbers: Numbers,
        describer: Describer,
    ) -> None:
        self.result = collective.result
        self._describer = describer
        self._collective = collective
        self._scaled: dict[float, Collective] = {}
        self._numbers = numbers
        self._number = numbers.next()
        try:
            self._request = engine.request(collective, self._number)
        except BaseException:
            numbers.give_back(self._number)  # another attempt must get the same number
            raise
        self._work: Work | None = None
        self._retired = False

    def start(self, scale: float | None = None, *, steps_by: StepsBy = StepsBy.CALLER) -> Work:
        """Start the operation again; do not use its tensors until the Work is done.

        Args:
            scale: Factor for the result, applied once while it is in the CPU cache; the same on all
                members.
            steps_by: Thread that takes the steps. `StepsBy.WAITER` also publishes a tensor in
                shared memory immediately, so that members that started earlier can do the work.

        Raises:
            StaleError: The last start has not ended, or the request has been retired.
            ConfigError: `scale` was passed for integers, or for an operation without a reduction.
        """
        work = self._work
        if self._retired or (work is not None and not work.done()):
            self._refuse_busy()
        collective = self._collective
        if scale is not None:
            collective = self._scaled.get(scale) or self._with_scale(scale)
        collective.site = self._describer.call_site()
        self._work = work = self._request.start(collective, scale, steps_by)
        return work

    def residual(self) -> torch.Tensor | None:
        """Return the error of a lossy wire format on this rank, which the next start will add.

        The residual belongs to this rank's input. After `reset_residual`, adding it to the input of
        a later start corrects the sum, even if that start runs on other ranks and hosts. (For
        requests that are started without a scale.)

        Returns:
            A flat copy in the layout of the tensor, with zeros where this rank encodes nothing;
            None if the request has no lossy format.
        """
        return self._request.residual()

    def reset_residual(self) -> None:
        """Set the residual to zero."""
        self._request.reset_residual()

    def retire(self) -> None:
        """Free the request's channel for later requests.

        All members call this at the same point of the order of their requests.

        Raises:
            StaleError: The last start has not ended, or the request has been retired before.
        """
        if self._retired or (self._work is not None and not self._work.done()):
            self._refuse_busy()
        self._retired = True
        self.reset_residual()
        self._numbers.give_back(self._number)

    def __del__(self) -> None:
        if getattr(self, "_retired", True):
            return
        work = self._work
        if work is None or work.exception() is None:
            self._numbers.lose(self._number, None if work is None or work.succeeded else work)

    def _refuse_busy(self) -> None:
        if self._retired:
            msg = f"{self!r} was ended by retire() and cannot start again: make a new request"
        else:
            msg = (
                f"request {self._number} ({self._collective.text}) is busy, because its last start "
                "has not ended: wait for the Work that start() returned"
            )
        raise StaleError(msg)

    def _with_scale(self, scale: float) -> Collective:
        kind, dtype = self._collective.kind, self._collective.outs[0].dtype
        reduces = kind in {"all_reduce", "reduce_scatter"}
        if not reduces or not (dtype.is_floating_point or dtype.is_complex):
            msg = (
                f"scale={scale!r} works for all_reduce or reduce_scatter of floating-point "
                "numbers only, not for "
                f"{self._collective.text}: leave it out, and multiply the result"
            )
            raise ConfigError(msg)
        if len(self._scaled) >= MAX_SCALES:
            self._scaled.clear()
        return self._scaled.setdefault(scale, self._describer.scaled(self._collective, scale))

    def __repr__(self) -> str:
        return f"Request({self._number}, {self._collective.text})"


def describe_persistent(
    group: Face, kind: str, x: Any, *, out: Any, op: str, root: int, wire: str | None
) -> Collective:
    """Return the collective of `Group.persistent` for its arguments.

    Raises:
        ConfigError: The kind has no persistent form or no wire format, or a tensor would have to be
            copied at every start although it is on the group's device.
    """
    if kind not in PERSISTENT:
        msg = f"{kind!r} cannot be a persistent request: choose one of {', '.join(PERSISTENT)}"
        raise ConfigError(msg)
    if wire is not None and kind != "all_reduce":
        msg = (
            f"wire={wire!r} does not work for {kind}: only an all_reduce has wire formats, so "
            "leave wire out"
        )
        raise ConfigError(msg)
    with Batch(group, lambda _: []) as batch:  # records the collective without starting it
        if kind == "all_reduce":
            batch.all_reduce(x, op, wire=wire)
        elif kind == "broadcast":
            batch.broadcast(x, root)
        elif kind == "all_gather":
            batch.all_gather(x, out=out)
        elif kind == "reduce_scatter":
            batch.reduce_scatter(x, op, out=out)
        else:
            batch.all_to_all(x, out=out)
    collective = batch.collectives[0]
    copies = collective.copies
    if copies is not None and copies.crosses:
        return collective
    copied = copies is not None and copies.needed
    # as_tensor copies a read-only array
    first = as_tensor(next((part for part in x if part.numel()), x[0]) if is_sequence(x) else x)
    if copied or collective.ins[0].data_ptr() != first.data_ptr():
        msg = (
            f"a tensor registered for {kind} would have to be copied at every start: pass "
            "x.contiguous(), and an out that does not overlap it"
        )
        raise ConfigError(msg)
    return collective
