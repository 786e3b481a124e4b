"""Megatron's groups for any order, against their definition."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import ConfigError
from braid.programs.layout import Grid

KINDS = ("tp", "cp", "ep", "dp", "pp")


def test_the_groups_of_the_paper():
    """16 GPUs, tensor parallel by 2, pipelines of 4: figure 8 of Narayanan et al. and its text."""
    grid = Grid({"tp": 2, "dp": 2, "pp": 4}, "tp-dp-pp")
    assert grid.size == 16
    assert grid.groups("tp") == [[i, i + 1] for i in range(0, 16, 2)]
    assert grid.groups("pp") == [[i, i + 4, i + 8, i + 12] for i in range(4)]
    assert grid.groups("dp") == [[a + b, a + b + 2] for a in range(0, 16, 4) for b in range(2)]
    assert grid.groups("tp-pp")[0] == [0, 1, 4, 5, 8, 9, 12, 13]
    assert grid.embedding_groups() == [[i, i + 12] for i in range(4)]
    assert grid.position_embedding_groups() == [[0], [1], [2], [3]]
    assert str(grid) == "tp2-dp2-pp4-cp1-ep1"


def test_a_pipeline_of_one_stage_has_its_embedding_once():
    assert Grid({"tp": 2}).embedding_groups() == [[0], [1]]


@given(
    sizes=st.fixed_dictionaries({kind: st.integers(1, 3) for kind in KINDS}),
    order=st.sampled_from([*permutations(KINDS)]),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True),
    first=st.integers(0, 5),
)
def test_groups_hold_ranks_whose_other_indices_are_equal(sizes, order, kinds, first):
    grid = Grid(sizes, "-".join(order), first_rank=first)

    def indices(rank: int) -> dict[str, int]:
        rank -= first
        found = {}
        for kind in order:  # the leftmost varies fastest
            rank, found[kind] = divmod(rank, sizes[kind])
        return found

    groups = grid.groups("-".join(kinds))
    assert sorted(rank for group in groups for rank in group) == list(
        range(first, first + grid.size)
    )
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    for group in groups:
        assert group == sorted(group)
        others = {tuple(i for k, i in indices(rank).items() if k not in kinds) for rank in group}
        assert len(others) == 1
        assert all(grid.group_of("-".join(kinds), rank) == group for rank in group)


@pytest.mark.parametrize(
    ("sizes", "order", "text"),
    [
        ({"tp": 2, "pp": 2}, "tp-dp", "pp has 2 ranks, but is not in the order tp-dp: add it"),
        ({"tp": 2, "xp": 2}, "tp", "unknown kind 'xp': use tp, cp, ep, dp, pp"),
        ({"tp": 2}, "tp-tp", "tp comes twice"),
        ({"tp": 2}, "tp-zz", "unknown kind 'zz'"),
    ],
)
def test_orders_that_make_no_grid_are_refused(sizes, order, text):
    with pytest.raises(ConfigError, match=text):
        Grid(sizes, order)
    with pytest.raises(ConfigError, match="has no axis xx"):
        Grid({"tp": 2}).groups("xx")
