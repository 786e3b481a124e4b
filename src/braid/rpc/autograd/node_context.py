"""One context of distributed autograd on one node: its records and gradients."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from braid.errors import CommTimeout
from braid.rpc.autograd.accumulation import HookGroup
from braid.rpc.autograd.graph import Reached, Receive, SendFunction, reached_from
from braid.rpc.outcomes import RpcError
from braid.rpc.protocol.autograd_state import ContextState
from braid.rpc.protocol.reference_messages import Id

__all__ = ["Context"]


class Context:
    """State of a distributed autograd context on one node.

    Args:
        process: Number of the node.
        number: Number of the context.

    Attributes:
        number: Number of the context.
        gradients: Gradients of this node's parameters.
        lock: Lock of the state and of all values.
    """

    def __init__(self, process: int, number: int) -> None:
        self.number = number
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.lock = threading.RLock()
        self.state = ContextState(process, number, self._reach)
        self.sends: dict[int, list[torch.Tensor]] = {}
        self.receives: dict[int, Receive] = {}
        self.functions: dict[int, Any] = {}  # of the receives, in torch's graph
        self.roots: list[torch.Tensor] = []
        self.arrived: dict[int, list[torch.Tensor | None]] = {}  # gradients that are to be used
        self.retains = False
        self.is_finished = False  # the backward that this node has begun last
        self._local_ended = threading.Condition(self.lock)
        self._local: Id | None = None  # backward to which the local backwards belong
        self._num_local = 0
        self._before: dict[torch.Tensor, torch.Tensor] = {}  # gradients before that backward
        self._groups: set[HookGroup] = set()  # that it has reached
        self.hooked: dict[torch.Tensor, torch.Tensor | None] = {}  # `.grad` between its parts
        self._reached: dict[int | None, Reached] = {}

    def reached(self, source: int | None) -> Reached:
        """Return the leaves and receives on which a sent message, or the roots (None), depend."""
        if source not in self._reached:
            tensors = self.roots if source is None else self.sends.get(source, [])
            self._reached[source] = reached_from(tensors)
        return self._reached[source]

    def begin(self, roots: Sequence[torch.Tensor]) -> None:
        """Set the roots of the next backward."""
        self.roots, self.is_finished = list(roots), False
        self._reached.pop(None, None)

    @contextlib.contextmanager
    def local(self, backward: Id, timeout_s: float | None) -> Iterator[None]:
        """In the block, run a local part of the distributed backward with the number `backward`.

        The block begins once this node runs no part of an earlier distributed backward. If the
        earlier backward has failed, the gradients that it has added are then removed. If `backward`
        itself has failed already, the block begins immediately, and no gradients are removed.

        Raises:
            CommTimeout: Parts of the earlier backward still run after `timeout_s` seconds.
        """

        def may_run() -> bool:
            is_over = not self.state.is_current(backward)
            return is_over or not self._num_local or self._local == backward

        with self.lock:
            if not self._local_ended.wait_for(may_run, timeout_s):
                msg = "another backward of this context still runs on this node: wait for it first"
                raise CommTimeout(msg)
            if self._local != backward and self.state.is_current(backward):
                self.restore()
                self._local, self._before = backward, dict(self.gradients)
                self._groups, self.hooked = set(), {}
                for receive in self.receives.values():
                    receive.take()
            self._num_local += 1
        try:
            yield
        finally:
            with self.lock:
                self._num_local -= 1
                self._local_ended.notify_all()

    def reach_groups(self, groups: set[HookGroup]) -> None:
        """Record that a local backward reaches these groups of parameters.

        Raises:
            RpcError: An earlier local backward has reached one of the groups, and the hooks of that
                group need one local backward for all parameters (`is_early`).
        """
        with self.lock:
            if any(group.is_early for group in groups & self._groups):
                msg = (
                    "a remote call lies between parameters of torch's DistributedDataParallel, "
                    "which averages too early there with static_graph=True or "
                    "find_unused_parameters=True: pass neither, or use "
                    "braid.DistributedDataParallel"
                )
                raise RpcError(msg)
            self._groups |= groups

    def restore(self) -> None:
        """If the last backward has failed, remove the gradients that this backward has added."""
        with self.lock:
            if self._local in self.state.failures:
                self.gradients.clear()
                self.gradients.update(self._before)

    def _reach(self, source: int | None) -> Iterable[int]:
        receives = self.reached(source).receives
        return [one.edge for one in receives if self.receives.get(one.edge) is one]

    # -- introspection

    def _context_id(self) -> int:
        return self.number

    def _send_functions(self) -> dict[int, SendFunction]:
        return {edge: SendFunction(tensors) for edge, tensors in self.sends.items()}

    def _recv_functions(self) -> dict[int, Any]:
        return dict(self.functions)

    def _known_worker_ids(self) -> set[int]:
        return set(self.state.known)
