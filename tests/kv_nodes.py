"""Nodes of key-value programs in one process: on threads, and in a simulated network."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from braid.ps import kv
from braid.ps.kv.messages import SCHEMA
from braid.ps.protocol.directory import name_of
from braid.runtime.message import LocalNetwork, VanConfig
from support.message_faults import Faults
from support.simulated_van import Network

TICK_S = 0.05


def names(servers: int, workers: int) -> list[tuple[str, int]]:
    """Return role and number of all nodes."""
    return [
        ("scheduler", 0),
        *(("server", number) for number in range(servers)),
        *(("worker", number) for number in range(workers)),
    ]


def spread(count: int) -> np.ndarray:
    """Return keys over the whole range, the last one included."""
    keys = np.arange(count, dtype=np.uint64) * np.uint64((1 << 64) // count)
    keys[-1] = np.uint64((1 << 64) - 1)
    return keys


def everywhere(nodes: Any, call: Callable[[Any], object]) -> None:
    """Call a function for all nodes at once; raise the first error."""
    errors: list[Exception] = []

    def one(node: Any) -> None:
        try:
            call(node)
        except Exception as exc:  # noqa: BLE001 - raised again below
            errors.append(exc)

    threads = [threading.Thread(target=one, args=(node,)) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@contextlib.contextmanager
def run(
    servers: int = 1,
    workers: int = 1,
    *,
    config: VanConfig | None = None,
    unknown_s: float = 0.1,
    handle: Callable[[], Any] | None = kv.KVServerDefaultHandle,
    is_whole: bool = True,
) -> Iterator[dict[str, Any]]:
    """Start all nodes on threads, with a server of app 0 on each server; end them together."""
    network = LocalNetwork(SCHEMA, config=config)
    nodes = {}
    for role, number in names(servers, workers):
        name = name_of(role, number)
        counts = servers, workers
        van = network.join(name)
        nodes[name] = kv.KVNode(van, role, number, counts, "-", unknown_s=unknown_s)
    try:
        everywhere(nodes.values(), lambda node: node.start(10.0))
        for node in nodes.values():
            if node.is_server and handle is not None:
                kv.KVServer(node).set_request_handle(handle())
        yield nodes
        if is_whole:
            everywhere(nodes.values(), lambda node: node.close(10.0))
    finally:
        everywhere(nodes.values(), lambda node: node.abort())


class Simulation:
    """Nodes in a simulated network, in one thread and virtual time."""

    def __init__(
        self, seed: int, servers: int = 2, workers: int = 2, faults: Faults | None = None
    ) -> None:
        config = VanConfig(heartbeat_s=0.5, lost_after_s=30.0)
        self.network = Network(SCHEMA, seed=seed, faults=faults, config=config)
        self.nodes: dict[str, kv.KVNode] = {}
        for role, number in names(servers, workers):
            name = name_of(role, number)

            def handler(van: object, delivery: object, name: str = name) -> None:
                self.nodes[name].postoffice.poll(delivery)

            van = self.network.join(name, handler)
            node = kv.KVNode(van, role, number, (servers, workers), "-", resend_s=4 * TICK_S)
            self.nodes[name] = node
        for node in self.nodes.values():
            node.begin()
            self._tick(node)
        self.until(lambda: all(node.is_member for node in self.nodes.values()))

    def until(self, condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
        """Let time pass until a condition holds."""
        self.network.run_until(condition, timeout_s)

    def crash(self, name: str) -> None:
        """Let a node end at once."""
        del self.nodes[name]
        self.network.crash(name)

    def _tick(self, node: kv.KVNode) -> None:
        if self.nodes.get(node.name) is node:
            node.postoffice.poll()
            node.refuse_overdue()
            self.network.call_later(TICK_S, partial(self._tick, node))
