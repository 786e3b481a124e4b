"""Parts of layers are those of an exhaustive search, and of nonsense there is an error."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import ConfigError
from braid.parallel.pipeline import block_partition


def rank_of(costs, sizes):
    """What is to be as small as possible: the largest part, then unevenness of costs, of sizes."""
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    sums = [sum(map(Fraction, costs[a:b]), Fraction(0)) for a, b in pairwise(ends)]
    return max(sums), sum(s * s for s in sums), sum(n * n for n in sizes)


def all_sizes(num_layers, num_parts):
    for cuts in combinations(range(1, num_layers), num_parts - 1):
        yield [b - a for a, b in pairwise([0, *cuts, num_layers])]


@given(st.data())
def test_no_partition_is_better_than_the_one_that_is_returned(data):
    cost = st.one_of(st.integers(0, 5), st.floats(0, 1e9), st.sampled_from([0.1, 0.2, 0.3, 1e300]))
    costs = data.draw(st.lists(cost, min_size=1, max_size=9))
    num_parts = data.draw(st.integers(1, len(costs)))
    sizes = block_partition(costs, num_parts)
    assert len(sizes) == num_parts
    assert sum(sizes) == len(costs)
    assert min(sizes) >= 1
    best = min(rank_of(costs, other) for other in all_sizes(len(costs), num_parts))
    assert rank_of(costs, sizes) == best


@pytest.mark.parametrize(
    ("costs", "sizes"),
    [
        ([5, 1, 1, 1, 1, 1], [1, 3, 2]),  # not 1, 1, 4, which is as fast
        ([0.0] * 7, [3, 2, 2]),
        ([1, 1, 1, 1, 1, 5], [3, 2, 1]),
        ([0.1, 0.2, 0.3], [1, 1, 1]),
    ],
)
def test_parts_that_are_not_the_heaviest_are_even_too(costs, sizes):
    assert sorted(block_partition(costs, 3)) == sorted(sizes)
    assert rank_of(costs, block_partition(costs, 3)) == rank_of(costs, sizes)


@pytest.mark.parametrize(
    ("costs", "num_parts", "words"),
    [
        ([1.0, 2.0], 3, "2 layers cannot be divided into 3 parts"),
        ([1.0], 0, "number of parts must be at least 1, got 0"),
        ([1.0, -2.0, 3.0, math.nan], 2, "got -2.0 of layer 1, nan of layer 3"),
        ([math.inf], 1, "inf of layer 0"),
        ([-1.0], 2, "divided into 2 parts.*-1.0 of layer 0"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_all_reasons(costs, num_parts, words):
    with pytest.raises(ConfigError, match=words):
        block_partition(costs, num_parts)


def test_hundreds_of_layers_are_cut_at_once():
    costs = [1.0 + (i * 7919 % 13) / 7 for i in range(400)]
    sizes = block_partition(costs, 16)
    assert max(rank_of(costs, sizes)[:1]) <= sum(map(Fraction, costs)) / 16 + Fraction(max(costs))
