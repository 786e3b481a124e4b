"""Bandwidth that depends on the size of a message: the same in routes, simulations and estimates."""

from __future__ import annotations

import pytest

from braid.errors import ConfigError
from braid.programs.cost import simulate_rounds
from braid.programs.schedule import Costs, simulate
from braid.programs.schedule.collective import algorithm, program
from braid.programs.topology import Cluster, Level, from_toml, to_toml

STAIRS = ((1024.0, 1e9), (1048576.0, 8e9))


def level(**changes: object) -> Level:
    given = {"name": "host", "size": 4, "latency_s": 1e-6, "bytes_per_s": 10e9, "by_size": STAIRS}
    return Level(**{**given, **changes})


def test_a_message_gets_what_its_size_permits():
    cluster = Cluster([level()])
    sizes = (1.0, 1024.0, 32768.0, 1048576.0, 1e12)
    rates = [cluster.route(0, 1, nbytes).bytes_per_s for nbytes in sizes]
    assert rates == pytest.approx([1e9, 1e9, 4.5e9, 8e9, 8e9])


def test_the_slowest_level_of_a_way_counts():
    cluster = Cluster([level(), level(name="spine", size=2, by_size=((1.0, 2e9),))])
    found = [cluster.route(0, target, 1e9).bytes_per_s for target in (1, 4)]
    assert found == [8e9, 2e9]


@pytest.mark.parametrize("nbytes", [1e3, 1e5, 1e7])
@pytest.mark.parametrize("name", ["ring", "halving_doubling", "tree"])
def test_estimates_agree_with_the_simulation(name, nbytes):
    rounds, cluster = algorithm(name, "all_reduce", 4), Cluster([level()])
    size = rounds.block_bytes(nbytes)
    timeline = simulate(program(rounds), Costs(lambda _r, _a: size, lambda _r, _a: 0.0), cluster)
    assert simulate_rounds(rounds, nbytes, cluster).seconds == pytest.approx(timeline.seconds)


def test_sharing_slows_only_below_what_the_size_permits():
    cluster = Cluster([level(by_size=((1.0, 4e9),)), level(name="spine", size=2, by_size=())])
    crossing = algorithm("halving_doubling", "all_reduce", 8)
    shared = simulate_rounds(crossing, 8e9, cluster).seconds
    wide = Cluster([cluster.levels[0], level(name="spine", size=2, by_size=(), bytes_per_s=1e12)])
    alone = simulate_rounds(crossing, 8e9, wide).seconds
    # 2 x 4 GB per rank cross the spine, four ranks at 2.5 GB/s each instead of 4
    assert shared - alone == pytest.approx(2 * 4e9 * (1 / 2.5e9 - 1 / 4e9))


def test_a_cluster_is_read_back_as_it_was_written():
    names = level(name='"r\U0001f9f6ck"', full_duplex=False, by_size=())
    cluster = Cluster([level(), names])
    assert from_toml(to_toml(cluster)).levels == cluster.levels


@pytest.mark.parametrize(
    "by_size", [((2.0, 1e9), (1.0, 2e9)), ((1.0, 0.0),), ((0.0, 1e9),), ((1.0, float("nan")),)]
)
def test_sizes_that_make_no_sense_are_refused(by_size):
    with pytest.raises(ConfigError, match=r"by_size must have ascending sizes"):
        level(by_size=by_size)
