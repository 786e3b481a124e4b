"""Persistent requests: an operation that is described once and started many times (as in MPI-4).

A gradient bucket takes part in the same all-reduce every step. Its request owns a channel, so it can be started as soon
as its gradients are there, whatever the order in which other ranks start theirs. Starting publishes this rank's part and
takes whatever steps are possible; nothing blocks until `Work.wait()`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Any

import torch

from braid.comm.engines.engine import Call, Engine
from braid.comm.engines.work import Work
from braid.errors import ConfigError, StaleError

__all__ = ["Numbers", "Request"]


class Numbers:
    """Numbers of a group's requests, equal on all members; those of retired ones are used again, since a group has a limited number of channels.

    The next one depends on what requests there are, not on how they came and went: that may be one member's own business. So is when an object dies:
    requests that nobody has any more are only noted (`lost`), until the members have agreed on them (`reclaim`).
    """

    def __init__(self) -> None:
        self._next = 0
        self._free: list[int] = []
        self._lost: set[int] = set()

    def take(self) -> int:
        """The least that no request has."""
        if self._free:
            return heapq.heappop(self._free)
        self._next += 1
        return self._next - 1

    def give_back(self, number: int) -> None:
        """No request has it any more."""
        heapq.heappush(self._free, number)

    def lose(self, number: int) -> None:
        """The request that has it is gone, and nothing of it under way."""
        self._lost.add(number)

    def lost(self) -> list[int]:
        """Those of requests that are gone on this member."""
        return sorted(self._lost.copy())  # others may die meanwhile

    def state(self) -> str:
        """Which numbers there are, as text; another one than other members' while this one has made requests that they have not."""
        return f"{self._next} {sorted(self._free)}"

    def reclaim(self, numbers: Iterable[int]) -> None:
        """Give back what all members have lost; they do so at the same point of the order in which they make requests."""
        for number in numbers:
            self._lost.remove(number)
            self.give_back(number)


class Request:
    """An operation registered with `Group.persistent`.

    Args:
        engine: Engine of the group.
        call: What is done at every start.
        numbers: The group's numbers, of which this request takes one.
        call_site: Digest of the program's line that is running, for messages and traces.
        result: Where the result of every start is found.
    """

    def __init__(
        self,
        engine: Engine,
        call: Call,
        numbers: Numbers,
        call_site: Callable[[], int],
        result: Any,
    ) -> None:
        self.result = result
        self._engine = engine
        self._call_site = call_site
        self._call = call
        self._numbers = numbers
        self._number = numbers.take()
        self._work: Work | None = None
        self._retired = False

    def start(self, scale: float | None = None, *, lazily: bool = False) -> Work:
        """Begin once more; the tensors belong to the request until the Work is done.

        Args:
            scale: Factor for the result, applied once while it is in the cache; the same on all members.
            lazily: Take no steps before somebody in this process waits or asks; see `Group.coalesce`. Where the tensor lies in memory that
                all members share, it is offered at once, so that whoever comes early can do the work.

        Raises:
            StaleError: The last start has not ended, or the request has been retired.
            ConfigError: A factor for what is no reduction, or for integers.
        """
        if scale is not None:
            self._check_scale(scale)
        self._check_idle()
        call = self._call._replace(site=self._call_site())
        self._work = self._engine.begin(call, self._number, scale, lazily=lazily).returns(
            self.result
        )
        return self._work

    def residual(self) -> torch.Tensor | None:
        """What a lossy wire format has left out here and will be added at the next start; None where nothing can be.

        Returns:
            A flat copy in the places of the numbers, zeros where this rank encodes nothing. It counts as part of this rank's own numbers: added
            to them at some start, after `reset_residual`, it makes up for what was left out, on whatever ranks and hosts that is.
            (Of requests that are started without a scale.)
        """
        return self._engine.residual(self._call, self._number)

    def reset_residual(self) -> None:
        """Forget what has been left out."""
        self._engine.reset_residual(self._number)

    def retire(self) -> None:
        """Give the channel to requests that come later; all members do so at the same point of the order in which they make requests.

        Raises:
            StaleError: The last start has not ended, or it has been retired before.
        """
        self._check_idle()
        self._retired = True
        self.reset_residual()
        self._numbers.give_back(self._number)

    def __del__(self) -> None:
        if not getattr(self, "_retired", True) and (self._work is None or self._work.succeeded):
            self.reset_residual()
            self._numbers.lose(self._number)

    def _check_idle(self) -> None:
        if self._retired:
            msg = f"expected a request to be used before it is retired, found {self!r} afterwards: make another one"
            raise StaleError(msg)
        if self._work is not None and not self._work.done():
            msg = (
                f"expected request {self._number} ({self._call.text}) to be idle, found its last start under way: "
                "wait for the Work that start() returned"
            )
            raise StaleError(msg)

    def _check_scale(self, scale: float) -> None:
        kind, dtype = self._call.kind, self._call.outs[0].dtype
        reduces = kind in {"all_reduce", "reduce_scatter"}
        if not reduces or not (dtype.is_floating_point or dtype.is_complex):
            msg = (
                f"expected scale for all_reduce or reduce_scatter of floating-point numbers only, found {scale!r} for "
                f"{self._call.text}: leave it out, and multiply the result"
            )
            raise ConfigError(msg)

    def __repr__(self) -> str:
        return f"Request({self._number}, {self._call.text})"
