"""`all_gather` and `barrier` over remote calls, for nodes that are not ranks of a group.

    every node ── its value ──> the first of the names
               <── all values, when all have come

Each node counts its calls for the same names, so the n-th call of one node matches the n-th call
of every other node.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from braid.errors import CommTimeout
from braid.rpc.agent import Agent
from braid.rpc.api import rpc_async, rpc_sync
from braid.rpc.current import current_agent
from braid.rpc.functions import async_execution
from braid.rpc.names import register
from braid.rpc.outcomes import AnswerFuture, RpcError

__all__ = ["all_gather", "barrier"]

Key = tuple[int, tuple[str, ...]]


class AllGathers:
    """State of the `all_gather` calls of one node: its counts, and the values it collects."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, ...]] = Counter()
        self._values: dict[Key, dict[str, Any]] = {}
        self._futures: dict[Key, AnswerFuture] = {}

    def next_number(self, names: tuple[str, ...]) -> int:
        """Return the number of this node's next `all_gather` among the nodes `names`."""
        with self._lock:
            self._counts[names] += 1
            return self._counts[names]

    def add(self, key: Key, name: str, value: Any) -> torch.futures.Future[dict[str, Any]]:
        """Add the value of node `name` to the all_gather `key`; return a future of all values."""
        with self._lock:
            values = self._values.setdefault(key, {})
            future = self._futures.setdefault(key, AnswerFuture())
            values[name] = value
            is_full = len(values) == len(key[1])
            if is_full:
                del self._values[key], self._futures[key]
        if is_full:
            future.set_result(values)
        return future

    def end_early(self, key: Key, reason: str) -> None:
        """Fail the all_gather `key` on all waiting nodes, because one node timed out."""
        with self._lock:
            self._values.pop(key, None)
            future = self._futures.pop(key, None)
        if future is not None:
            future.set_exception(CommTimeout(reason))


def all_gather(
    agent: Agent, value: Any, names: Iterable[str] | None = None, timeout: float = -1.0
) -> dict[str, Any]:
    """Return the values of several nodes, by name; all of them call this.

    Args:
        agent: The node.
        value: Value of this node.
        names: Names of the participating nodes; all known nodes when None.
        timeout: Seconds; the node's default when -1, unlimited when 0.

    Raises:
        RpcError: This node is not among the names.
        CommTimeout: A node did not call this in time.
    """
    known = [info.name for info in agent.directory.infos]
    chosen = tuple(sorted(set(known if names is None else names)))
    if agent.info.name not in chosen:
        msg = (
            f"{agent.info.name} calls an all_gather of {', '.join(chosen)} that does not include "
            "it: add its name"
        )
        raise RpcError(msg)
    number = agent.part(AllGathers).next_number(chosen)
    arguments = (number, list(chosen), agent.info.name, value)
    try:
        values: dict[str, Any] = rpc_sync(chosen[0], _gather, arguments, None, timeout)
    except CommTimeout as exc:
        seconds = agent.options.rpc_timeout if timeout < 0 else timeout
        msg = (
            f"{agent.info.name} timed out in _all_gather after {seconds:.2f} seconds: one of "
            f"{', '.join(chosen)} has not called it, see the errors there"
        )
        rpc_async(chosen[0], _end_early, (number, list(chosen), msg))
        raise CommTimeout(msg) from exc
    return values


def barrier(agent: Agent, names: Iterable[str] | None = None, timeout: float = -1.0) -> None:
    """Wait until several nodes have called this; see `all_gather`."""
    all_gather(agent, None, names, timeout)


@register
@async_execution
def _gather(
    number: int, names: list[str], name: str, value: Any
) -> torch.futures.Future[dict[str, Any]]:
    """Add the value of a node; runs in the first named node."""
    return current_agent().part(AllGathers).add((number, tuple(names)), name, value)


@register
def _end_early(number: int, names: list[str], reason: str) -> None:
    """Fail an all_gather that timed out; runs in the first named node."""
    current_agent().part(AllGathers).end_early((number, tuple(names)), reason)
