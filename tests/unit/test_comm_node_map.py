"""Members of a group by host: local_peers, slices, cross_node_peers."""

from __future__ import annotations

import pytest

from braid.comm.tensors.node_map import NodeMap


def test_members_of_one_host_are_local_peers_whatever_their_order():
    nodes = NodeMap.of([0, 1, 0, 1])
    assert nodes.hosts == ((0, 2), (1, 3))
    assert [nodes.local_peers(m) for m in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [nodes.cross_node_peers(m) for m in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]


def test_there_are_as_many_slices_as_the_smallest_host_has_members():
    nodes = NodeMap.of([0, 0, 0, 1, 1])
    assert nodes.num_slices == 2
    assert [nodes.slice(m) for m in range(5)] == [0, 1, -1, 0, 1]
    assert nodes.cross_node_peers(2) == (2,)


@pytest.mark.parametrize(
    ("numbers", "nbytes"),
    [([0, 0, 1, 1], 4.0), ([0, 1, 2], 2.0), ([0, 0, 0], 0.0), ([0, 0, 1], 2.0)],
)
def test_a_host_sends_what_each_of_its_members_sends_to_each_of_the_others(numbers, nbytes):
    assert NodeMap.of(numbers).bytes_out(1.0) == nbytes
