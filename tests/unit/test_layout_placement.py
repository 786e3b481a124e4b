"""Orders of axes over hosts: none is better than the one that `place` returns, and its seconds are the simulator's."""

from __future__ import annotations

import doctest
import importlib
import itertools
import math
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from braid.errors import ConfigError
from braid.programs.cost import simulate_rounds
from braid.programs.layout import Grid, Mesh, Traffic, place, usual_traffic
from braid.programs.layout.traffic import OPERATIONS
from braid.programs.schedule.collective import Round, Rounds
from braid.programs.topology import Cluster, Level, flat

AXES = ("tp", "cp", "ep", "fsdp", "dp", "pp")


@st.composite
def clusters(draw: st.DrawFn, num_ranks: int) -> Cluster:
    """Hosts and what is above them; a rank has no more of any level than of the one below."""
    sizes = draw(st.lists(st.sampled_from((2, 3, 4, 8)), min_size=1, max_size=3))
    if math.prod(sizes) < num_ranks:
        sizes[-1] *= -(-num_ranks // math.prod(sizes))
    levels, latency_s, rate = [], draw(st.floats(0, 1e-6)), draw(st.floats(1e9, 1e11))
    for number, size in enumerate(sizes):
        levels.append(Level(name=("host", "rack", "hall")[number], size=size, latency_s=latency_s, bytes_per_s=rate))  # fmt: skip
        latency_s *= draw(st.floats(1, 10))
        rate *= size / draw(st.floats(1, 20))
    return Cluster(levels)


@st.composite
def meshes(draw: st.DrawFn, sizes: tuple[int, ...] = (1, 2, 3, 4)) -> Mesh:
    names = draw(st.lists(st.sampled_from(AXES), min_size=1, max_size=4, unique=True))
    return Mesh({name: draw(st.sampled_from(sizes)) for name in names})


def rings_of(groups: list[list[int]], cluster: Cluster) -> list[list[list[int]]]:
    """Rings of each level: members that have the same place below, in different children of one unit.

    All groups together are one ring each, unless each unit with any members has as many of each.
    """
    levels, width = [], 1
    for below in cluster.levels:
        width *= below.size
        counts = {
            sum(r // width == unit for r in g) for g in groups for unit in {r // width for r in g}
        }
        if len(counts) > 1:
            return [groups]
        levels.append((width, counts.pop()))
    rings, inside = [], 1
    for _, members in levels:  # the ranks of a unit stand beside each other
        if members > inside:
            units = [g[i : i + members] for g in groups for i in range(0, len(g), members)]
            rings.append([unit[place::inside] for unit in units for place in range(inside)])
        inside = members
    return rings


def simulated_s(mesh: Mesh, axis: str, flow: Traffic, cluster: Cluster) -> float:
    """Seconds of a step's collectives of an axis, message by message: all its groups, all ranks."""
    size, nbytes = mesh.axes[axis], flow.nbytes
    groups = sorted({mesh.peers(axis, rank) for rank in range(mesh.size)})

    def once(pairs: list[tuple[int, int]], nbytes: float, repeat: int = 1) -> float:
        sources, targets = np.array(pairs).T
        step = Round(sources, targets, 1, lambda *_: [], repeat=repeat)
        return simulate_rounds(Rounds("", "", mesh.size, 1, (step,)), nbytes, cluster).seconds

    if flow.operation == "send":
        return flow.count * once([pair for g in groups for pair in pairwise(g)], nbytes)
    if flow.operation == "all_to_all":  # rounds wait for each other
        shifts = [
            [(g[i], g[(i + shift) % size]) for g in groups for i in range(size)]
            for shift in range(1, size)
        ]
        return flow.count * sum(once(pairs, nbytes / size) for pairs in shifts)
    seconds = 0.0
    for rings in rings_of([list(g) for g in groups], cluster):
        length = len(rings[0])
        pairs = [(ring[i], ring[(i + 1) % length]) for ring in rings for i in range(length)]
        times = (length - 1) * (2 if flow.operation == "all_reduce" else 1)
        seconds += once(pairs, nbytes / length, times)
        nbytes /= length
    return flow.count * seconds


@given(data=st.data(), mesh=meshes())
def test_seconds_are_those_of_simulated_messages(data, mesh):
    cluster = data.draw(clusters(mesh.size))
    flows = {
        axis: Traffic(data.draw(st.sampled_from(OPERATIONS)), data.draw(st.integers(0, 10**9)), 3)
        for axis in mesh.axes
    }
    placement = place(mesh, cluster, flows)
    for order in (placement.best, placement.worst):
        for axis, cost in order.axes.items():
            expected = (
                simulated_s(order.mesh, axis, flows[axis], cluster) if mesh.axes[axis] > 1 else 0.0
            )
            assert cost.seconds == pytest.approx(expected, rel=1e-9)


@given(data=st.data(), mesh=meshes((1, 2, 4)))
def test_no_order_is_better_and_none_is_worse_than_the_worst(data, mesh):
    cluster = data.draw(clusters(mesh.size))
    flows = {axis: data.draw(st.floats(0, 1e9)) for axis in mesh.axes}
    placement = place(mesh, cluster, flows)
    assert sorted(placement.mesh.axes) == sorted(mesh.axes)
    usual = {axis: Traffic(usual_traffic(mesh)[axis].operation, flows[axis]) for axis in mesh.axes}
    for order in permutations(mesh.axes):
        ordered = Mesh({axis: mesh.axes[axis] for axis in order})
        wide = [axis for axis in order if mesh.axes[axis] > 1]
        seconds = sum(simulated_s(ordered, axis, usual[axis], cluster) for axis in wide)
        assert placement.seconds <= seconds * (1 + 1e-8)
        assert seconds <= placement.worst.seconds * (1 + 1e-8)


@given(mesh=meshes(), nbytes=st.floats(0, 1e9))
def test_on_one_host_every_order_takes_as_long(mesh, nbytes):
    placement = place(mesh, flat(mesh.size, 1e-6, 1e9), dict.fromkeys(mesh.axes, nbytes))
    assert placement.worst.seconds == pytest.approx(placement.seconds)
    assert placement.crossing() == ()


@given(data=st.data(), tp=st.sampled_from((2, 4)), others=st.permutations(("dp", "pp")))
def test_tp_lies_inside_a_host_whenever_it_divides_the_hosts_ranks(data, tp, others):
    sizes = {axis: data.draw(st.sampled_from((1, 2, 4))) for axis in others}
    mesh = Mesh({"tp": tp} | sizes)
    cluster = data.draw(clusters(mesh.size))
    assume(cluster.levels[0].size % tp == 0)
    steps = itertools.pairwise(cluster.levels)
    assume(all(2 * up.bytes_per_s <= low.bytes_per_s * low.size for low, up in steps))
    placement = place(mesh, cluster)
    assert "tp" not in placement.crossing()
    assert placement.best.axes["tp"].spread == {"host": tp}


def hosts(number: int, ranks: int = 8) -> Cluster:
    """Hosts with NVLink inside and one card of 400 Gbit/s each."""
    return Cluster(
        [
            Level(name="host", size=ranks, latency_s=2e-6, bytes_per_s=450e9),
            Level(name="rack", size=number, latency_s=5e-6, bytes_per_s=50e9),
        ]
    )


@pytest.mark.parametrize(
    ("mesh", "number", "best", "crossing"),
    [
        ("tp=8,pp=2,dp=4", 8, "pp=2,dp=4,tp=8", ("pp", "dp")),
        ("dp=8,fsdp=8", 8, "dp=8,fsdp=8", ("dp",)),  # gradients of a shard only leave the host
        ("fsdp=4,dp=2,tp=2", 2, "dp=2,fsdp=4,tp=2", ("dp",)),
        ("tp=1,dp=4,pp=2", 1, "tp=1,pp=2,dp=4", ()),  # ties: more bytes, closer ranks
    ],
)
def test_usual_traffic_puts_slices_and_shards_inside_a_host(mesh, number, best, crossing):
    placement = place(Mesh.parse(mesh), hosts(number))
    assert (str(placement.mesh), placement.crossing()) == (best, crossing)


def test_without_a_reason_the_order_stays():
    mesh = Mesh.parse("b=2,a=2,c=2")
    assert place(mesh, hosts(1), dict.fromkeys(mesh.axes, 1e9)).mesh == mesh


@pytest.mark.parametrize("name", ["grid", "layout", "mesh", "placement", "traffic"])
def test_examples_in_docstrings_give_what_they_show(name):
    assert doctest.testmod(importlib.import_module(f"braid.programs.layout.{name}")).failed == 0


def test_an_axis_that_does_not_fit_is_divided_over_hosts():
    placement = place(Mesh.parse("tp=2,fsdp=16"), hosts(4))
    assert placement.best.axes["fsdp"].spread == {"host": 4, "rack": 4}
    assert (placement.crossing(), placement.crossing("rack")) == (("fsdp",), ())
    assert placement.order == "tp-fsdp"


def test_the_order_of_megatron_makes_the_same_groups():
    placement = place(Mesh.parse("pp=2,tp=4,dp=2"), hosts(2))
    grid = Grid(placement.mesh.axes, placement.order)
    for axis in placement.mesh.axes:
        peers = {placement.mesh.peers(axis, rank) for rank in range(16)}
        assert sorted(map(tuple, grid.groups(axis))) == sorted(peers)


def test_the_table_has_the_worst_order_beside_the_best():
    placement = place(
        Mesh.parse("tp=8,dp=2"),
        hosts(2),
        {"tp": Traffic("all_reduce", 1 << 28, 128), "dp": 1 << 30},
    )
    assert str(placement).splitlines() == [
        "16 ranks on 8 (host) x 2 (rack)",
        "best   dp=2,tp=8   axes between hosts: dp",
        "worst  tp=8,dp=2",
        "axis  collectives of a step     best over     ms  worst over             ms",
        "tp    all_reduce 128 x 256 MiB  8 (host)   137.2  4 (host) x 2 (rack)  1492",
        "dp    all_reduce 1 x 1 GiB      2 (rack)   171.8  2 (host)             2.39",
        "all                                          309                       1494",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("mesh", "traffic", "text"),
    [
        ("tp=4,dp=8", None, "the cluster has 16 ranks"),
        ("tp=2,x=2,y=2", {"z": 1.0}, "unknown axis z in .*axis x has no usual traffic: .*; axis y has"),
        ("tp=2", {"tp": -1.0}, "mesh axis tp: nbytes must be at least 0, got -1.0"),
        ("a=2,b=2,c=2,d=2", {"a": 1.0, "b": 1.0, "c": 1.0}, "axis d has no usual traffic"),
    ],
)  # fmt: skip
def test_what_cannot_be_placed_is_refused(mesh, traffic, text):
    with pytest.raises(ConfigError, match=text):
        place(Mesh.parse(mesh), hosts(2), traffic)


def test_too_many_axes_and_wrong_traffic_are_refused():
    mesh = Mesh({f"a{number}": 2 for number in range(8)})
    with pytest.raises(ConfigError, match="8 axes of several ranks, but at most 7"):
        place(mesh, flat(256, 0.0, 1.0), dict.fromkeys(mesh.axes, 1.0))
    with pytest.raises(
        ConfigError, match=r"unknown operation 'sum'.*nbytes.*got -1; count.*got 1.5"
    ):
        Traffic("sum", -1, 1.5)
    with pytest.raises(ConfigError, match="no level 'hall': choose one of host, rack"):
        place(Mesh({"tp": 2}), hosts(2)).crossing("hall")
