"""The node of this process, which PS-Lite's programs use implicitly."""

from __future__ import annotations

import threading
from collections.abc import Callable

from braid import context
from braid.compat.pslite.environment import Environment
from braid.compat.pslite.rendezvous import SecretDesk, start_by_hand
from braid.errors import StaleError
from braid.ps import kv
from braid.ps.kv.groups import ALL

__all__ = ["PROCESS"]


class PSLiteProcess:
    """Holder of the PS-Lite node of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._node: kv.KVNode | None = None
        self._desk: SecretDesk | None = None
        self._exit_callbacks: list[Callable[[], object]] = []

    @property
    def node(self) -> kv.KVNode:
        """The node of this process.

        Raises:
            StaleError: The process is not started, or is finalized.
        """
        if self._node is None:
            msg = "this process is not a node: call Start() first, and Finalize() last"
            raise StaleError(msg)
        return self._node

    def start(self, customer_id: int, *, with_barrier: bool) -> None:
        """Start the node, unless a call with another `customer_id` has started it."""
        with self._lock:
            if self._node is None:
                self._node, self._desk = _start(Environment.parse())
        if with_barrier and customer_id == 0:
            self.node.barrier(ALL)

    def finalize(self, customer_id: int, *, with_barrier: bool) -> None:
        """Wait for the requests of apps with a `customer_id`; customer 0 also ends the node."""
        if customer_id:
            self.node.wait_for_customer(customer_id)
            return
        node, desk = self.node, self._desk
        try:
            node.close(with_barrier=with_barrier)
        finally:
            self._node = self._desk = None
            if desk is not None:
                desk.close()
        callbacks, self._exit_callbacks = self._exit_callbacks, []
        for callback in callbacks:
            callback()

    def at_exit(self, callback: Callable[[], object]) -> None:
        """Register a function to call after the node has ended."""
        self._exit_callbacks.append(callback)


def _start(environment: Environment) -> tuple[kv.KVNode, SecretDesk | None]:
    if not environment.is_launched:
        return start_by_hand(environment)
    node = kv.join(
        context.init(),
        environment.num_servers,
        resend_s=environment.resend_s,
        drop=environment.drop,
    )
    return node, None


PROCESS = PSLiteProcess()
