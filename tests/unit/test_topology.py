"""Clusters: ways by hand on a small tree, what is refused, and what holds for every tree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import ConfigError
from braid.programs.schedule import Route
from braid.programs.topology import Cluster, Level, flat


def level(name: str, size: int, latency_s: float, bytes_per_s: float, **more: bool) -> Level:
    return Level(name=name, size=size, latency_s=latency_s, bytes_per_s=bytes_per_s, **more)


# 2 ranks a host, 3 hosts a rack, 2 racks:  0 1 | 2 3 | 4 5 || 6 7 | 8 9 | 10 11
#   links 2r and 2r + 1: rank r up and down; 24 + 2h and 25 + 2h: host h; 36 + 2k and 37 + 2k: rack k
SMALL = Cluster(
    [level("host", 2, 1.0, 8.0), level("rack", 3, 2.0, 4.0), level("spine", 2, 5.0, 3.0)]
)


def test_a_message_goes_up_to_the_first_level_in_common_and_down_again() -> None:
    found = {pair: SMALL.route(*pair) for pair in [(3, 3), (0, 1), (1, 0), (1, 4), (11, 2)]}
    assert found == {
        (3, 3): Route(0.0, ()),
        (0, 1): Route(1.0, (0, 3)),
        (1, 0): Route(1.0, (2, 1)),
        (1, 4): Route(2.0, (2, 9, 24, 29)),
        (11, 2): Route(5.0, (22, 5, 34, 27, 38, 37)),
    }


def test_ways_of_many_messages_are_those_of_each() -> None:
    ranks = np.arange(SMALL.num_ranks)
    sources, targets = (side.ravel() for side in np.meshgrid(ranks, ranks))
    latency, links = SMALL.routes(sources, targets)
    together = [
        Route(seconds, tuple(link for link in row if link >= 0))
        for seconds, row in zip(latency.tolist(), links.tolist(), strict=True)
    ]
    pairs = zip(sources.tolist(), targets.tolist(), strict=True)
    assert together == [SMALL.route(*pair) for pair in pairs]


def test_both_ways_of_a_half_duplex_link_are_one_link() -> None:
    shared = Cluster([level("host", 2, 1.0, 8.0), level("rack", 2, 2.0, 4.0, full_duplex=False)])
    assert [shared.route(0, 2), shared.route(2, 0)] == [
        Route(2.0, (0, 5, 8, 10)),
        Route(2.0, (4, 1, 10, 8)),
    ]


def test_links_have_the_bandwidth_and_the_name_of_the_level_that_they_lead_to() -> None:
    names = [SMALL.level_of_link(link).name for link in range(len(SMALL.bytes_per_s))]
    assert names == ["host"] * 24 + ["rack"] * 12 + ["spine"] * 4
    assert SMALL.bytes_per_s.tolist() == [8.0] * 24 + [4.0] * 12 + [3.0] * 4


def test_oversubscription_is_what_children_can_send_over_what_goes_up() -> None:
    found = {name: SMALL.oversubscription(name) for name in ("host", "rack", "spine")}
    assert found == {"host": 1.0, "rack": 2 * 8.0 / 4.0, "spine": 3 * 4.0 / 3.0}


def test_the_number_of_ranks_is_the_product_of_the_sizes() -> None:
    assert (SMALL.num_ranks, flat(7, 0.0, 1.0).num_ranks) == (12, 7)


def test_a_flat_cluster_is_one_switch_with_a_full_duplex_link_for_each_rank() -> None:
    (only,) = flat(3, 2.0, 5.0).levels
    assert only == level("switch", 3, 2.0, 5.0, full_duplex=True)
    assert flat(3, 2.0, 5.0).route(2, 0) == Route(2.0, (4, 1))


@pytest.mark.parametrize(
    ("size", "latency_s", "bytes_per_s", "message"),
    [
        (
            0,
            0.0,
            1.0,
            "level 'host' of the cluster: size must be a whole number of at least 1, got 0",
        ),
        (
            1,
            -1.0,
            1.0,
            "level 'host' of the cluster: latency_s must be at least 0, got -1.0",
        ),
        (1, 0.0, 0.0, "level 'host' of the cluster: bytes_per_s must be above 0, got 0.0"),
        (
            -2,
            float("inf"),
            float("nan"),
            (
                "level 'host' of the cluster: size must be a whole number of at least 1, got -2; "
                "latency_s must be at least 0, got inf; bytes_per_s must be above 0, got nan"
            ),
        ),
    ],
)
def test_levels_that_there_cannot_be_are_refused_with_all_that_is_wrong(
    size: int, latency_s: float, bytes_per_s: float, message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        level("host", size, latency_s, bytes_per_s)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("names", "listed"), [([], "none"), (["host", "rack", "host"], "host, rack, host")]
)
def test_a_cluster_needs_levels_with_names_of_their_own(names: list[str], listed: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Cluster([level(name, 2, 0.0, 1.0) for name in names])
    assert str(raised.value) == (
        f"a cluster needs at least one level, each with a different name, got {listed}"
    )


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    return Cluster(
        [
            level(str(i), size, float(i), 2.0**i, full_duplex=draw(st.booleans()))
            for i, size in enumerate(sizes)
        ]
    )


@given(cluster=clusters(), data=st.data())
def test_a_way_and_its_way_back_are_as_long_and_as_slow(
    cluster: Cluster, data: st.DataObject
) -> None:
    ranks = st.integers(0, cluster.num_ranks - 1)
    one, other = data.draw(ranks), data.draw(ranks)
    there, back = cluster.route(one, other), cluster.route(other, one)
    assert len(there.links) == len(back.links) == len(set(there.links))
    assert there.latency_s == back.latency_s
    narrowest = [sorted(cluster.bytes_per_s[list(way.links)]) for way in (there, back)]
    assert narrowest[0] == narrowest[1]


@given(clusters())
def test_two_ranks_share_a_link_upwards_only_where_they_share_all_units_below(
    cluster: Cluster,
) -> None:
    last = cluster.num_ranks - 1
    ways = {rank: cluster.route(rank, last).links for rank in range(last)}
    for rank, links in ways.items():
        for height, link in enumerate(links[::2]):
            width = int(np.prod([one.size for one in cluster.levels[:height]]))
            users = [other for other, theirs in ways.items() if link in theirs[::2]]
            assert {other // width for other in users} == {rank // width}
