"""Servers that join get shards in one sweep, and wait for a directory that has them."""

from __future__ import annotations

import pytest

from braid.ps import Node
from braid.ps.messages import SCHEMA
from braid.ps.protocol.directory import Directory
from braid.ps.protocol.scheduler_state import SchedulerState
from braid.ps.service import is_over
from braid.runtime.message import LocalNetwork


@pytest.mark.parametrize(("replicas", "moved"), [(0, 16), (1, 32), (2, 48)])
def test_a_server_that_joins_gets_its_share_in_one_sweep(replicas, moved):
    state = SchedulerState(3, 1, replicas=replicas)
    for server in range(3):
        state.server_joins(server, f"address {server}")
    state.worker_joins(0)
    state.server_joins(3, "address 3")
    num_installed = 0
    while opened := [
        (v, *new) for v, own in enumerate(state.directory.joining) for new in own.items()
    ]:
        virtual, server, since = opened[num_installed % len(opened)]
        assert state.installed(virtual, server, since)
        num_installed += 1
    assert moved <= num_installed <= moved + 1  # it was twice as many while loads counted both ends
    assert sorted(state.directory.loads().values()) == [16 * (replicas + 1)] * 4


@pytest.mark.parametrize("asks", [True, False])
def test_a_server_goes_when_it_has_asked_to_and_a_directory_that_had_it_has_it_no_longer(asks):
    node = Node(LocalNetwork(SCHEMA).join("server:3"), "server", 3, (1, 1), "-")
    if asks:
        node._server.drain()
    before = Directory.begin({0: "first"}, [0])
    joined = before.with_server(3, "fourth")
    gone = []
    for directory in (before, joined, joined.without(3)):
        node.postoffice.directory = directory
        node._server._configure(directory)
        gone.append(is_over(node.postoffice, node._server, lambda: False))
    node.close()
    assert gone == [False, False, asks]
