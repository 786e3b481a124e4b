"""The rendezvous of a task: carries out what `RendezvousState` decides.

producer (this task)                 receiver
put(key, value) ──▶ table ◀── ask(key): a future of the value
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from typing import Any

import torch

from braid.errors import StaleError
from braid.rpc.outcomes import AnswerFuture
from braid.strategies.placed.rendezvous_state import (
    AnswerAsker,
    DropValue,
    FailAsker,
    RendezvousInstruction,
    RendezvousKey,
    RendezvousState,
)

__all__ = ["Rendezvous"]

Value = tuple[torch.Tensor | None, bool]  # the tensor, and whether it requires a gradient


class Rendezvous:
    """Values that parts of this task send, and futures for receivers that wait for values.

    Args:
        incarnation: Identifier of the task's process, different after a restart.
    """

    def __init__(self, incarnation: str) -> None:
        self._lock = threading.Lock()
        self._state = RendezvousState(incarnation)
        self._values: dict[RendezvousKey, Value] = {}
        self._futures: dict[int, torch.futures.Future[Value]] = {}
        self._tickets = itertools.count()

    @property
    def num_pending(self) -> int:
        """Number of values without a request, plus the number of requests without a value."""
        with self._lock:
            return self._state.num_pending

    def put(self, key: RendezvousKey, tensor: torch.Tensor | None, requires_grad: bool) -> None:
        """Send the tensor of `key` to its receiver, now or when the receiver asks for it."""
        with self._lock:
            self._values[key] = tensor, requires_grad
            ends = self._carry_out(self._state.put(key))
        _complete(ends)

    def ask(self, key: RendezvousKey) -> torch.futures.Future[Value]:
        """Return a future of the value with a key, for the part that receives it.

        On failure: the future has a StaleError when the step has ended, or the task has
        restarted.
        """
        future: torch.futures.Future[Value] = AnswerFuture()
        with self._lock:
            ticket = next(self._tickets)
            self._futures[ticket] = future
            ends = self._carry_out(self._state.ask(key, ticket))
        _complete(ends)
        return future

    def end(self, graph: str, step: int, reason: str) -> None:
        """Drop a graph's values up to a step; fail waiting requests with the text `reason`."""
        with self._lock:
            ends = self._carry_out(self._state.end(graph, step, reason))
        _complete(ends)

    def forget(self, graph: str) -> None:
        """Drop all state of a graph that is no longer used."""
        with self._lock:
            ends = self._carry_out(self._state.forget(graph))
        _complete(ends)

    def _carry_out(self, instructions: Iterable[RendezvousInstruction]) -> list[tuple[Any, Any]]:
        """Return futures with their values or errors; complete them without the lock."""
        ends: list[tuple[Any, Any]] = []
        for instruction in instructions:
            match instruction:
                case AnswerAsker(ticket, key):
                    ends.append((self._futures.pop(ticket), self._values.pop(key)))
                case FailAsker(ticket, reason):
                    ends.append((self._futures.pop(ticket), StaleError(reason)))
                case DropValue(key):
                    self._values.pop(key, None)
        return ends


def _complete(ends: Iterable[tuple[Any, Any]]) -> None:
    for future, value in ends:
        if isinstance(value, StaleError):
            future.set_exception(value)
        else:
            future.set_result(value)
