"""Costs: closed forms, estimates by rounds against the simulator, and the figures that books give."""

from __future__ import annotations

import pytest

from braid.errors import ConfigError
from braid.programs.cost import FORMS, Cost, Estimate, form, simulate_rounds
from braid.programs.schedule import Costs, Timeline, simulate
from braid.programs.schedule.collective import ALGORITHMS, Rounds, algorithm, program
from braid.programs.topology import Cluster, Level, flat

C, NBYTES = 2e-10, 1e6  # seconds per byte added up; bytes
KIB, MB, GB, TB = 1024, 1e6, 1e9, 1e12
GBIT_PER_S = 1e9 / 8


def cluster(*sizes: int) -> Cluster:
    """Ranks, hosts and racks; what leaves a rack is a quarter of what its hosts can send."""
    names, latencies, rates = (
        ("host", "rack", "spine", "hall"),
        (1e-6, 5e-6, 10e-6, 20e-6),
        (50e9, 12.5e9, 12.5e9, 50e9),
    )
    return Cluster(
        [
            Level(name=name, size=size, latency_s=seconds, bytes_per_s=rate)
            for name, size, seconds, rate in zip(names, sizes, latencies, rates, strict=False)
        ]
    )


TREE = cluster(4, 4, 4)


def simulated(made: Rounds, nbytes: float, network: Cluster, c: float = C) -> Timeline:
    block = made.block_bytes(nbytes)
    seconds = Costs(lambda _, __: block, lambda _, a: block * c if a.kind == "reduce" else 0.0)
    return simulate(program(made), seconds, network)


def as_estimate(done: Timeline, network: Cluster) -> Estimate:
    level_bytes = dict.fromkeys([level.name for level in network.levels], 0.0)
    for link, nbytes in done.link_bytes.items():
        level_bytes[network.level_of_link(link).name] += nbytes
    return Estimate(done.seconds, level_bytes)


def check(made: Rounds, network: Cluster) -> None:
    estimate = simulate_rounds(made, NBYTES, network, C)
    exact = as_estimate(simulated(made, NBYTES, network), network)
    assert estimate.seconds == pytest.approx(exact.seconds, rel=1e-9), made.name
    assert estimate.level_bytes == pytest.approx(exact.level_bytes, rel=1e-9, abs=1e-3), made.name


# By rounds.


@pytest.mark.parametrize("num_ranks", [4, 16, 64])
@pytest.mark.parametrize(("name", "operation"), sorted(ALGORITHMS))
def test_rounds_give_what_the_simulator_gives_on_three_levels(
    name: str, operation: str, num_ranks: int
) -> None:
    made = algorithm(name, operation, num_ranks, row=4)
    if (name, num_ranks) == ("torus", 64):  # its ranks do not start their rounds together
        estimate, exact = simulate_rounds(made, NBYTES, TREE, C), simulated(made, NBYTES, TREE)
        assert exact.seconds < estimate.seconds < 1.2 * exact.seconds
        assert estimate.level_bytes == pytest.approx(as_estimate(exact, TREE).level_bytes)
        return
    check(made, TREE)


@pytest.mark.parametrize(("name", "operation"), sorted(FORMS))
def test_rounds_give_the_closed_form_on_a_flat_network(name: str, operation: str) -> None:
    a, b = 3e-6, 1e-9
    sizes = range(1, 34)
    found = [
        simulate_rounds(algorithm(name, operation, p), NBYTES, flat(p, a, 1 / b), C).seconds
        for p in sizes
    ]
    closed = [form(name, operation, p, NBYTES).seconds(a, b, C) for p in sizes]
    assert found == pytest.approx(closed, rel=1e-9)


@pytest.mark.proof
@pytest.mark.parametrize("name", ["ring", "halving_doubling", "tree"])
def test_rounds_give_what_the_simulator_gives_on_256_ranks(name: str) -> None:
    check(algorithm(name, "all_reduce", 256), cluster(4, 4, 16))


def test_half_duplex_counts_both_ways_on_one_link() -> None:
    rounds = algorithm("doubling", "all_reduce", 2)
    shared = Cluster([Level(name="bus", size=2, latency_s=1.0, bytes_per_s=1.0, full_duplex=False)])
    assert simulate_rounds(rounds, 10.0, shared) == Estimate(21.0, {"bus": 40.0})
    assert simulate_rounds(rounds, 10.0, flat(2, 1.0, 1.0)) == Estimate(11.0, {"switch": 40.0})


def test_one_rank_takes_no_time() -> None:
    made = [algorithm(name, op, 1, row=1) for name, op in sorted(ALGORITHMS)]
    estimates = [simulate_rounds(one, NBYTES, flat(1, 1.0, 1.0), C) for one in made]
    assert estimates == [Estimate(0.0, {"switch": 0.0})] * len(made)


# A hundred thousand ranks: hosts of 8, racks of 32 hosts, 25 racks, 16 halls.

HUGE = cluster(8, 32, 25, 16)


def huge(name: str, nbytes: float) -> float:
    made = algorithm(name, "all_reduce", HUGE.num_ranks, row=8)
    return simulate_rounds(made, nbytes, HUGE).seconds


def test_a_tree_is_best_for_little_on_a_hundred_thousand_ranks() -> None:
    assert HUGE.num_ranks == 102_400
    assert huge("tree", KIB) < huge("halving_doubling", KIB)


@pytest.mark.proof
def test_algorithms_keep_their_order_on_a_hundred_thousand_ranks() -> None:
    """A ring has 204,798 rounds; halving sends half of everything over the slowest links at once."""
    names = ("tree", "halving_doubling", "hierarchical", "ring")
    little, much = ({name: huge(name, n) for name in names} for n in (KIB, 100 * MB))
    assert (sorted(little, key=little.__getitem__), sorted(much, key=much.__getitem__)) == (
        ["tree", "halving_doubling", "hierarchical", "ring"],
        ["tree", "hierarchical", "ring", "halving_doubling"],
    )


@pytest.mark.parametrize(
    ("nbytes", "faster", "slower"),
    [
        (100 * MB, "hierarchical", "ring"),
        (100 * MB, "hierarchical", "tree"),
        (KIB, "tree", "hierarchical"),
        (KIB, "tree", "ring"),
    ],
)
def test_each_algorithm_has_its_size_behind_an_oversubscribed_spine(
    nbytes: float, faster: str, slower: str
) -> None:
    network = cluster(8, 16, 8)
    found = {
        name: simulate_rounds(
            algorithm(name, "all_reduce", network.num_ranks, row=8), nbytes, network
        ).seconds
        for name in (faster, slower)
    }
    assert found[faster] < found[slower]


# Closed forms.


def test_forms_count_what_books_count() -> None:
    assert {
        name: form(name, "all_reduce", 8, 800.0)
        for name in ("naive", "tree", "ring", "doubling", "halving_doubling", "torus")
    } == {
        "naive": Cost(14, 14 * 800.0, 7 * 800.0),
        "tree": Cost(6, 6 * 800.0, 3 * 800.0),
        "ring": Cost(14, 1400.0, 700.0),
        "doubling": Cost(3, 2400.0, 2400.0),
        "halving_doubling": Cost(6, 1400.0, 700.0),
        "torus": Cost(8, 1400.0, 700.0),
    }


def test_there_are_forms_for_all_but_what_depends_on_rows() -> None:
    assert set(ALGORITHMS) - set(FORMS) == {("hierarchical", "all_reduce")}
    assert set(FORMS) <= set(ALGORITHMS)


def test_costs_are_seconds_by_three_prices_and_add_up() -> None:
    assert Cost(2, 30.0, 5.0).seconds(100.0, 10.0, 1.0) == 505.0
    assert Cost(2, 30.0, 5.0).seconds(100.0, 10.0) == 500.0
    assert Cost(1, 2.0, 3.0) + Cost(10, 20.0, 30.0) == Cost(11, 22.0, 33.0)


def test_an_algorithm_without_a_form_is_refused_with_those_that_have_one() -> None:
    with pytest.raises(ConfigError) as raised:
        form("tree", "all_to_all", 4, 1.0)
    assert str(raised.value) == (
        "tree has no closed form for all_to_all: choose one of bruck, pairwise"
    )


def test_more_ranks_than_the_cluster_has_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^the cluster has 64 ranks .*, got 65:"):
        simulate_rounds(algorithm("ring", "all_reduce", 65), NBYTES, TREE)


# Figures of the books.


def test_a_terabyte_takes_40_seconds_over_200_gbit_per_s() -> None:
    link = flat(2, 0.0, 200 * GBIT_PER_S)
    made = algorithm("naive", "broadcast", 2)
    exact = simulated(made, TB, link).seconds
    estimated = simulate_rounds(made, TB, link).seconds
    closed = form("naive", "broadcast", 2, TB).seconds(0.0, 1 / (200 * GBIT_PER_S))
    assert [exact, estimated, closed] == pytest.approx([40.0] * 3)


def test_three_replicas_of_700_gb_load_one_root_with_twice_1400_gb() -> None:
    """Both others' gradients come down the root's link, and twice the sum goes up."""
    network = flat(3, 0.0, 200 * GBIT_PER_S)
    reduce, broadcast = (algorithm("naive", op, 3) for op in ("reduce", "broadcast"))
    into = simulated(reduce, 700 * GB, network).link_bytes
    out = simulated(broadcast, 700 * GB, network).link_bytes
    up, down = 0, 1
    assert (into.get(up, 0.0), into[down]) == (0.0, 1.4 * TB)
    assert (out[up], out.get(down, 0.0)) == (1.4 * TB, 0.0)


def test_three_replicas_of_700_gb_send_as_much_in_all() -> None:
    """Every byte counts on its way up and on its way down."""
    network = flat(3, 0.0, 200 * GBIT_PER_S)
    both = simulate_rounds(algorithm("naive", "all_reduce", 3), 700 * GB, network)
    halves = [
        simulate_rounds(algorithm("naive", op, 3), 700 * GB, network).level_bytes["switch"]
        for op in ("reduce", "broadcast")
    ]
    assert (halves, both.level_bytes) == ([2 * 1.4 * TB] * 2, {"switch": 4 * 1.4 * TB})
    assert both.seconds == pytest.approx(2 * 1.4 * TB / (200 * GBIT_PER_S))


@pytest.mark.parametrize("name", ["ring", "tree", "halving_doubling"])
def test_large_sums_take_9_375_times_as_long_over_pcie_as_over_nvlink(name: str) -> None:
    made = algorithm(name, "all_reduce", 8)
    pcie, nvlink = (
        simulate_rounds(made, 10 * GB, flat(8, 0.0, rate)).seconds for rate in (64 * GB, 600 * GB)
    )
    assert pcie / nvlink == pytest.approx(9.375)
