"""Nodes of remote calls as threads of one process, for tests."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from braid.rpc import RpcOptions
from braid.rpc.agent import Agent
from braid.rpc.current import acting_for
from braid.rpc.membership import join, leave
from braid.runtime.store import HashStore
from braid.runtime.wire import Secret

SECRET = Secret(b"s" * 32)


@contextlib.contextmanager
def nodes(count: int, **options: Any) -> Iterator[list[Agent]]:
    """Give nodes w0, w1, ... that know each other; they leave together at the end."""
    store = HashStore()
    made: dict[int, Agent] = {}

    def begin(rank: int) -> None:
        own = RpcOptions(
            **{"allowed_modules": ["test_rpc", "test_torch_rpc", "rpc_programs"], **options}
        )
        address = f"unix:@braid-test-{id(store)}-{rank}"
        made[rank] = join(store, f"w{rank}", rank, count, own, secret=SECRET, address=address)

    everywhere(count, begin)
    agents = [made[rank] for rank in range(count)]
    try:
        yield agents
    except BaseException:
        for agent in agents:
            agent.close()
        raise
    everywhere(count, lambda rank: leave(agents[rank], timeout_s=20))


def everywhere(count: int, act: Callable[[int], object]) -> None:
    """Run a function in as many threads."""
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            act(rank)
        except BaseException as exc:  # noqa: BLE001 - raised below
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    if errors:
        raise errors[0]


@contextlib.contextmanager
def first_of(count: int, **options: Any) -> Iterator[list[Agent]]:
    """Give nodes, and act for the first of them."""
    with nodes(count, **options) as agents, acting_for(agents[0]):
        yield agents
