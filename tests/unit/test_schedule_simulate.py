"""The simulator: equal to closed forms where there are some, and to sums by hand where links are shared or waited for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from braid.errors import ConfigError
from braid.programs.cost import FORMS, form
from braid.programs.schedule import Action, Costs, Program, Timeline, from_text, simulate
from braid.programs.schedule.collective import Rounds, algorithm, program
from braid.programs.schedule.known import VOCABULARIES
from braid.programs.schedule.pipeline import gpipe, most_held, one_f_one_b
from braid.programs.topology import Cluster, Level, flat

A, B, C, NBYTES = 3e-6, 1e-9, 2e-10, 1e6  # seconds per message, per byte, per byte added; bytes
SIZES = range(1, 18)


def costs(made: Rounds, nbytes: float, c: float) -> Costs:
    block = made.block_bytes(nbytes)
    return Costs(lambda _, __: block, lambda _, a: block * c if a.kind == "reduce" else 0.0)


def timeline(
    *ranks: str,
    network: Cluster,
    nbytes: float = 10.0,
    work_s: Callable[[int, Action], float] = lambda _, __: 0.0,
    buffered: bool = False,
) -> Timeline:
    """What a collective with these actions takes."""
    lines = [f"rank {number}\n{actions}" for number, actions in enumerate(ranks)]
    text = "\n".join(["program collective mine all_reduce units 9 indices 9", *lines])
    written = from_text(text, VOCABULARIES)
    return simulate(written, Costs(lambda _, __: nbytes, work_s), network, buffered=buffered)


def switch(size: int, *, latency_s: float = 0.0, full_duplex: bool = True) -> Cluster:
    """One byte a second for every rank."""
    return Cluster(
        [
            Level(
                name="switch",
                size=size,
                latency_s=latency_s,
                bytes_per_s=1.0,
                full_duplex=full_duplex,
            )
        ]
    )


# Closed forms.


@pytest.mark.parametrize(("name", "operation"), sorted(FORMS))
def test_the_simulator_gives_the_closed_form_on_a_flat_network(name: str, operation: str) -> None:
    made = [algorithm(name, operation, p) for p in SIZES]
    simulated = [
        simulate(program(one), costs(one, NBYTES, C), flat(one.num_ranks, A, 1 / B)).seconds
        for one in made
    ]
    closed = [form(name, operation, p, NBYTES).seconds(A, B, C) for p in SIZES]
    assert simulated == pytest.approx(closed, rel=1e-9)


@pytest.mark.parametrize("root", [0, 3, 6])
@pytest.mark.parametrize("operation", ["broadcast", "reduce", "gather", "scatter"])
def test_the_root_does_not_matter_on_a_flat_network(operation: str, root: int) -> None:
    made = algorithm("tree", operation, 7, root=root)
    found = simulate(program(made), costs(made, NBYTES, C), flat(7, A, 1 / B)).seconds
    assert found == pytest.approx(form("tree", operation, 7, NBYTES).seconds(A, B, C), rel=1e-9)


def test_work_of_a_receive_comes_after_the_message() -> None:
    done = timeline(
        "send0.0>1 send1.1>1",
        "reduce0.0<0 reduce1.1<0",
        network=switch(2, latency_s=1.0),
        work_s=lambda _, a: 5.0 if a.kind == "reduce" else 0.0,
    )
    spans = [(i.rank, i.start_s, i.end_s, i.is_message) for i in done.intervals]
    assert spans == [
        (0, 0.0, 11.0, True),
        (1, 0.0, 11.0, True),
        (1, 11.0, 16.0, False),
        (0, 16.0, 27.0, True),  # the second one waits for who adds up
        (1, 16.0, 27.0, True),
        (1, 27.0, 32.0, False),
    ]
    assert done.end_s == [27.0, 32.0]


# Sharing of links.


def test_two_ways_of_a_full_duplex_link_do_not_disturb_each_other() -> None:
    done = timeline("send0.0>1 recv1.0<1", "send1.0>0 recv0.0<0", network=switch(2))
    assert (done.end_s, done.link_bytes) == (
        [10.0, 10.0],
        {0: 10.0, 1: 10.0, 2: 10.0, 3: 10.0},
    )


def test_two_ways_of_a_half_duplex_link_share_it() -> None:
    network = switch(2, full_duplex=False)
    done = timeline("send0.0>1 recv1.0<1", "send1.0>0 recv0.0<0", network=network)
    assert (done.end_s, done.link_bytes) == ([20.0, 20.0], {0: 20.0, 2: 20.0})


def test_one_message_does_not_suffer_from_half_duplex() -> None:
    done = timeline("send0.0>1", "recv0.0<0", network=switch(2, full_duplex=False))
    assert done.end_s == [10.0, 10.0]


TWO_HOSTS = Cluster(
    [
        Level(name="host", size=2, latency_s=0.0, bytes_per_s=1.0),
        Level(name="rack", size=2, latency_s=0.0, bytes_per_s=1.0),  # 2 : 1
    ]
)


def test_two_flows_over_an_oversubscribed_link_share_it() -> None:
    apart = timeline("send0.0>2", "send0.0>3", "recv0.0<0", "recv0.0<1", network=TWO_HOSTS)
    inside = timeline("send0.0>1", "recv0.0<0", "send0.0>3", "recv0.0<2", network=TWO_HOSTS)
    assert (apart.end_s, inside.end_s) == ([20.0] * 4, [10.0] * 4)


def test_a_flow_that_ends_leaves_its_share_to_the_others() -> None:
    """10 bytes of one each second half until the shorter one ends: 10 + 10, then 20 more alone."""
    written = from_text(
        "program collective mine all_reduce units 2 indices 1\n"
        "rank 0\nsend0.0>2\nrank 1\nsend1.0>3\nrank 2\nrecv0.0<0\nrank 3\nrecv1.0<1\n",
        VOCABULARIES,
    )
    work = Costs(lambda _, action: (10.0, 30.0)[action.unit], lambda _, __: 0.0)
    assert simulate(written, work, TWO_HOSTS).end_s == [20.0, 40.0, 20.0, 40.0]


def test_a_message_that_comes_later_slows_the_one_under_way() -> None:
    """Rank 1 works for 4 seconds first: 4 bytes alone, 6 at half the rate until 16, then 4 left of the other."""
    done = timeline(
        "send0.1>2",
        "copy8.0/8 send0.1>3",
        "recv0.1<0",
        "recv0.1<1",
        network=TWO_HOSTS,
        work_s=lambda _, a: 4.0 if a.kind == "copy" else 0.0,
    )
    assert done.end_s == [16.0, 20.0, 16.0, 20.0]


def test_blocks_of_one_round_travel_as_one_message() -> None:
    network = switch(2, latency_s=1.0)
    together = timeline("send0.0>1 send1.0>1", "recv0.0<0 recv1.0<0", network=network)
    apart = timeline("send0.0>1 send1.1>1", "recv0.0<0 recv1.1<0", network=network)
    assert (together.end_s, apart.end_s) == ([21.0, 21.0], [22.0, 22.0])


def test_a_message_of_no_bytes_takes_its_latency() -> None:
    done = timeline("send0.0>1", "recv0.0<0", network=switch(2, latency_s=3.0), nbytes=0.0)
    assert (done.end_s, done.link_bytes) == ([3.0, 3.0], {0: 0.0, 3: 0.0})


# Buckets of tokens.


def bucket(*, fast: bool = False) -> Cluster:
    """One byte a second for every rank, and six after a rest."""
    by_size = ((1.0, 3.0),) if fast else ()
    return Cluster(
        [
            Level(
                name="cloud",
                size=2,
                latency_s=0.0,
                bytes_per_s=1.0,
                burst_bytes=6.0,
                by_size=by_size,
            )
        ]
    )


@pytest.mark.parametrize("fast", [False, True])
def test_a_rested_link_lets_its_bucket_through_beside_its_rate(fast: bool) -> None:
    done = timeline("send0.0>1", "recv0.0<0", network=bucket(fast=fast))
    assert done.end_s == pytest.approx(
        [4.0, 4.0]
    )  # 6 bytes in the bucket, 4 that come in meanwhile


def test_an_empty_bucket_fills_only_in_a_rest() -> None:
    at_once = timeline("send0.0>1 send1.1>1", "recv0.0<0 recv1.1<0", network=bucket())
    assert at_once.end_s == pytest.approx([14.0, 14.0])
    rested = timeline(
        "send0.0>1 copy8.1/8 send1.2>1",
        "recv0.0<0 recv1.2<0",
        network=bucket(),
        work_s=lambda _, a: 3.0 if a.kind == "copy" else 0.0,
    )
    assert rested.end_s == pytest.approx([4.0 + 3.0 + 7.0] * 2)


# Who waits for whom.


def work_first(*, buffered: bool) -> list[float]:
    """Rank 1 works for 4 seconds before it is ready to receive."""
    return timeline(
        "send0.0>1",
        "copy1.0/1 recv0.1<0",
        network=switch(2),
        work_s=lambda _, a: 4.0 if a.kind == "copy" else 0.0,
        buffered=buffered,
    ).end_s


def test_a_message_begins_when_both_are_ready_or_where_it_is_buffered_at_once() -> None:
    assert (work_first(buffered=False), work_first(buffered=True)) == ([14.0, 14.0], [0.0, 10.0])


ONE_AFTER_THE_OTHER = ("send0.0>1 recv1.1<1", "send1.0>0 recv0.1<0")


def test_a_program_that_deadlocks_is_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        timeline(*ONE_AFTER_THE_OTHER, "copy0.0/0", network=switch(3))
    assert str(raised.value) == (
        "the program does not end: ranks 0, 1 wait in a deadlock; validate it first"
    )


def test_a_message_without_another_end_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as raised:
        timeline("send0.0>1", "copy0.0/0", network=switch(2))
    assert str(raised.value) == (
        "the send of block 0 in round 0 to rank 1 of rank 0 has no matching "
        "action on its peer: validate the program first"
    )


def test_what_deadlocks_only_without_memory_ends_where_messages_are_buffered() -> None:
    assert timeline(*ONE_AFTER_THE_OTHER, network=switch(2), buffered=True).end_s == [10.0, 10.0]


def test_a_program_of_nothing_takes_no_time() -> None:
    assert timeline("", "", network=switch(2)) == Timeline([], [0.0, 0.0], {})


@pytest.mark.parametrize("buffered", [False, True])
def test_simulations_are_repeatable(buffered: bool) -> None:
    made = algorithm("tree", "all_reduce", 6)
    once, again = (
        simulate(program(made), costs(made, NBYTES, C), flat(6, A, 1 / B), buffered=buffered)
        for _ in range(2)
    )
    assert once == again


def test_every_byte_leaves_and_arrives_once() -> None:
    """Ring: 2 (p-1)/p l over every rank's link, up and down."""
    made = algorithm("ring", "all_reduce", 5)
    done = simulate(program(made), costs(made, 100.0, C), flat(5, A, 1.0))
    assert done.link_bytes == pytest.approx(dict.fromkeys(range(10), 160.0))


# Pipelines.

FORWARD_S, BACKWARD_S = 1.0, 2.0
MAKERS = pytest.mark.parametrize("make", [one_f_one_b, gpipe])


def pipelined(written: Program) -> Timeline:
    seconds = {"F": FORWARD_S, "B": BACKWARD_S}
    work = Costs(lambda _, __: 0.0, lambda _, action: seconds.get(action.kind, 0.0))
    return simulate(written, work, flat(written.num_ranks, 0.0, 1.0))


@MAKERS
def test_pipelines_take_as_long_as_their_bubble_says(
    make: Callable[[int, int], Program],
) -> None:
    """(m + p - 1) (f + b): each rank works m (f + b) and is idle for (p - 1) (f + b)."""
    found = {(p, m): pipelined(make(p, m)).seconds for p in range(1, 7) for m in range(1, 9)}
    assert found == {(p, m): (m + p - 1) * (FORWARD_S + BACKWARD_S) for p, m in found}


@MAKERS
def test_every_rank_of_a_pipeline_works_as_long_as_the_others(
    make: Callable[[int, int], Program],
) -> None:
    busy = [0.0] * 4
    for interval in pipelined(make(4, 8)).intervals:
        busy[interval.rank] += 0.0 if interval.is_message else interval.end_s - interval.start_s
    assert busy == [8 * (FORWARD_S + BACKWARD_S)] * 4


def test_1f1b_holds_activations_for_no_more_than_the_way_to_the_end() -> None:
    found = {(p, m): most_held(one_f_one_b(p, m)) for p in range(1, 7) for m in range(1, 9)}
    assert found == {(p, m): [min(m, p - rank) for rank in range(p)] for p, m in found}


def test_gpipe_holds_activations_for_all_micro_batches() -> None:
    assert most_held(gpipe(3, 5)) == [5, 5, 5]


def test_messages_of_a_pipeline_take_their_time() -> None:
    """Two stages, one micro-batch: F, message, F, B, message, B."""
    work = Costs(lambda _, __: 10.0, lambda _, a: {"F": 1.0, "B": 2.0}.get(a.kind, 0.0))
    done = simulate(one_f_one_b(2, 1), work, switch(2, latency_s=0.5))
    assert done.end_s == [1 + 10.5 + 3 + 10.5 + 2, 1 + 10.5 + 3 + 10.5]


@MAKERS
@pytest.mark.parametrize(("p", "m"), [(0, 1), (2, 0), (-1, 1)])
def test_pipelines_of_nothing_are_refused(
    make: Callable[[int, int], Program], p: int, m: int
) -> None:
    with pytest.raises(ConfigError) as raised:
        make(p, m)
    assert str(raised.value) == (
        f"a pipeline needs at least 1 stage and 1 micro-batch, got {max(p, 0)} and {m}"
    )
