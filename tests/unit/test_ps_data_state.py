"""Samples are finished once, whoever dies."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from braid.ps.protocol.data_state import DataState, Issue


def test_what_a_lost_worker_had_is_dealt_again_and_others_wait_for_it():
    data = DataState(2)
    assert data.next("worker:0", ("worker:0", 1), ()) == [Issue(("worker:0", 1), 0)]
    assert data.next("worker:1", ("worker:1", 1), ()) == [Issue(("worker:1", 1), 1)]
    assert data.next("worker:0", ("worker:0", 2), (0,)) == []
    assert data.lost("worker:1") == [Issue(("worker:0", 2), 1)]
    assert data.next("worker:0", ("worker:0", 3), (1,)) == [Issue(("worker:0", 3), None)]


def test_a_request_that_comes_twice_gets_the_same_shard():
    data = DataState(3)
    data.next("worker:0", ("worker:0", 1), ())
    assert data.next("worker:0", ("worker:0", 2), ()) == [Issue(("worker:0", 2), 0)]


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_each_shard_is_finished_once(num_shards, turns):
    data = DataState(num_shards)
    held, waiting, finished = {}, set(), []

    def take(issues):
        for (node, _), shard in issues:
            waiting.discard(node)
            if shard is not None:
                held[node] = shard

    for number, (worker, dies) in enumerate([*turns, *((0, False),) * (2 * num_shards + 2)]):
        node = f"worker:{worker}"
        if dies:
            held.pop(node, None)
            waiting.discard(node)
            take(data.lost(node))
        elif node not in waiting:
            done = (held.pop(node),) if node in held else ()
            finished += done
            waiting.add(node)
            take(data.next(node, (node, number), done))
        if number == len(turns):  # all others die, and worker 0 finishes alone
            for other in [n for n in {*held, *waiting} if n != "worker:0"]:
                held.pop(other, None)
                waiting.discard(other)
                take(data.lost(other))
    assert sorted(finished) == list(range(num_shards))
    assert data.num_left == 0
