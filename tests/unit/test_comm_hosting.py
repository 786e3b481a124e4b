"""Members of a group by host: mates, lanes, twins."""

from __future__ import annotations

import pytest

from braid.comm.tensors.node_map import Hosting


def test_members_of_one_host_are_mates_whatever_their_order():
    hosting = Hosting.of([0, 1, 0, 1])
    assert hosting.hosts == ((0, 2), (1, 3))
    assert [hosting.mates(m) for m in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [hosting.twins(m) for m in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]


def test_there_are_as_many_lanes_as_the_smallest_host_has_members():
    hosting = Hosting.of([0, 0, 0, 1, 1])
    assert hosting.num_lanes == 2
    assert [hosting.lane(m) for m in range(5)] == [0, 1, -1, 0, 1]
    assert hosting.twins(2) == (2,)


@pytest.mark.parametrize(
    ("numbers", "nbytes"),
    [([0, 0, 1, 1], 4.0), ([0, 1, 2], 2.0), ([0, 0, 0], 0.0), ([0, 0, 1], 2.0)],
)
def test_a_host_sends_what_each_of_its_members_sends_to_each_of_the_others(numbers, nbytes):
    assert Hosting.of(numbers).bytes_out(1.0) == nbytes
