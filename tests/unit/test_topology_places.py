"""Where ranks stand: NUMA nodes and hosts, and who sends to whom for each level."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import ConfigError
from braid.programs.topology import Rings, cpus_of, node_of, rings


def test_every_level_has_rings_of_the_first_ranks_of_its_children():
    places = [(0, 0), (0, 0), (0, 1), (0, 1), (1, 0), (1, 0), (1, 1), (1, 1)]
    assert rings(places) == [
        Rings("node", 2, ((0, 1), (2, 3), (4, 5), (6, 7))),
        Rings("host", 2, ((0, 2), (4, 6))),
        Rings("network", 2, ((0, 4),)),
    ]


@pytest.mark.parametrize(
    ("places", "levels"),
    [
        ([(0, 0)] * 3, [Rings("host", 3, ((0, 1, 2),))]),
        ([(0, 0), (1, 0), (2, 0)], [Rings("network", 3, ((0, 1, 2),))]),
        ([(0, 0), (0, 1)], [Rings("host", 2, ((0, 1),))]),
    ],
)
def test_levels_of_one_child_are_left_out(places, levels):
    assert rings(places) == levels


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([(0, 0)], "at least 2 ranks are needed to measure messages, got 1"),
        ([(0, 0), (0, 0), (1, 0)], "level host contain different numbers of units"),
        ([(0, 0), (1, 0), (0, 0), (1, 0)], "ranks of one host are not numbered consecutively"),
    ],
)
def test_ranks_that_are_no_tree_are_refused(places, words):
    with pytest.raises(ConfigError, match=words):
        rings(places)


@given(st.sets(st.integers(0, 300)))
def test_lists_of_processors_are_read_as_the_kernel_writes_them(cpus):
    ordered = sorted(cpus)
    runs: list[list[int]] = []
    for cpu in ordered:
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    text = ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
    assert cpus_of(text + "\n") == tuple(ordered)


@given(st.text(min_size=1, max_size=20).filter(lambda text: not set(text) <= set("0123456789-,")))
def test_what_is_no_list_of_processors_is_refused(text):
    with pytest.raises(ConfigError, match=r"0-3,8-11"):
        cpus_of(f"0,{text}!")


def test_ranks_are_spread_evenly_over_nodes_or_not_at_all():
    assert [node_of(rank, 4, 2) for rank in range(4)] == [0, 0, 1, 1]
    assert [node_of(rank, 3, 2) for rank in range(3)] == [0, 0, 0]
    assert node_of(0, 1, 0) == 0
