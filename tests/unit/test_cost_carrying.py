"""Algorithms on tensors: pieces, pipelines, and links that several messages share."""

from __future__ import annotations

import pytest

from braid.errors import ConfigError
from braid.programs.cost import Phase, form, hierarchical_s, pipelined_s, program_s
from braid.programs.schedule.collective import algorithm, program
from braid.programs.topology import Cluster, Level, flat

A, B = 1e-3, 1e-6


def test_one_piece_costs_its_closed_form_and_two_steps():
    ring = program(algorithm("ring", "all_reduce", 4))
    found = program_s(ring, 4000, flat(4, A, 1 / B), sync_s=7.0, piece_bytes=4000)
    assert found == pytest.approx(14 + form("ring", "all_reduce", 4, 4000).seconds(A, B))


def test_every_piece_begins_and_ends_with_a_step():
    ring = program(algorithm("ring", "all_reduce", 4))
    wanted = {"sync_s": 1.0, "piece_bytes": 400}
    network = flat(4, A, 1 / B)
    found = program_s(ring, 1000, network, **wanted)
    parts = [program_s(ring, size, network, **wanted) for size in (400, 400, 200)]
    assert found == pytest.approx(sum(parts))


def test_a_root_that_sends_to_two_at_once_shares_its_link_between_them():
    tree = program(algorithm("tree", "broadcast", 4))  # 0 -> 2, then 0 -> 1 and 2 -> 3
    found = program_s(tree, 1000, flat(4, 0.0, 1 / B), sync_s=0.0, piece_bytes=1000)
    assert found == pytest.approx(3 * 1000 * B)  # the closed form waits for the first: 2 l b


@pytest.mark.parametrize(
    ("phases", "depth", "seconds"),
    [
        ([Phase("card", 3.0), Phase("memory", 1.0)], 9, 4.0 + 4 * 3.0),  # the slower one paces
        ([Phase("card", 3.0), Phase("card", 1.0)], 9, 4.0 + 4 * 4.0),  # both are the same one
        ([Phase("card", 1.0, 5.0)], 1, 6.0 + 4 * 3.0),  # too few are under way to hide latency
        ([Phase("card", 1.0, 5.0)], 0, 5 * 6.0),  # one after the other
    ],
)
def test_the_slowest_resource_or_the_longest_wait_sets_the_pace(phases, depth, seconds):
    assert pipelined_s(phases, 5, depth) == pytest.approx(seconds)


def test_no_chunks_are_refused():
    with pytest.raises(ConfigError, match="got 0 chunks and depth 1"):
        pipelined_s([], 0, 1)


def test_slices_of_two_hosts_send_every_byte_once():
    host = Level(name="host", size=2, latency_s=0.0, bytes_per_s=1e12)
    network = Level(name="network", size=2, latency_s=A, bytes_per_s=1 / B)
    found = hierarchical_s(
        8000, Cluster([host, network]), sync_s=A, chunk_bytes=1000, depth=2, copy_s_per_byte=0.0, sum_s_per_byte=0.0
    )  # fmt: skip
    assert found == pytest.approx(2 * A + 8000 * B)  # all begin, then the first chunk is on its way


def test_slices_share_the_card_of_their_host_and_are_limited_one_by_one():
    host = Level(name="host", size=2, latency_s=0.0, bytes_per_s=1e12)
    slow = Level(name="network", size=2, latency_s=0.0, bytes_per_s=1e6, by_size=((1.0, 2e5),))
    found = hierarchical_s(
        1000, Cluster([host, slow]), sync_s=0.0, chunk_bytes=1000, depth=2, copy_s_per_byte=0.0, sum_s_per_byte=0.0
    )  # fmt: skip
    assert found == pytest.approx(500 / 2e5)  # half of it by each lane, at what one message gets
