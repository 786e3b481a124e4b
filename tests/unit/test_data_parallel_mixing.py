"""Mixing matrices: what is refused, whom ranks hear, how fast they agree."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.data_parallel import Mixing
from braid.errors import ConfigError

MAKERS = (Mixing.ring, Mixing.complete, Mixing.exponential, Mixing.one_peer)
sizes = st.integers(1, 17)


@given(st.sampled_from(MAKERS), sizes)
def test_those_that_are_made_here_pass_the_check_and_are_doubly_stochastic(make, size):
    mixing = make(size)
    assert Mixing.of(mixing.matrices, mixing.name) == mixing
    assert mixing.doubly_stochastic
    assert mixing.size == size


@given(st.sampled_from(MAKERS), sizes, st.integers(0, 20))
def test_whom_a_rank_hears_sends_to_it(make, size, step):
    mixing = make(size)
    heard = {(j, i) for i in range(size) for j in mixing.sources(i, step)}
    assert heard == {(j, i) for j in range(size) for i in mixing.targets(j, step)}
    assert all(i != j for i, j in heard)


def test_one_peer_graphs_hear_one_rank_a_step_which_is_twice_as_far_each_time():
    mixing = Mixing.one_peer(8)
    assert [mixing.sources(0, step) for step in range(4)] == [[7], [6], [4], [7]]
    assert [mixing.targets(0, step) for step in range(4)] == [[1], [2], [4], [1]]


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_one_peer_graphs_reach_the_exact_mean_in_a_turn(size):
    values = [Fraction(rank * rank) for rank in range(size)]
    mixing = Mixing.one_peer(size)
    for step in range(len(mixing.matrices)):
        matrix = mixing.at(step)
        values = [
            sum(Fraction(weight) * value for weight, value in zip(row, values, strict=True))
            for row in matrix
        ]
    assert len(mixing.matrices) == size.bit_length() - 1
    assert values == [Fraction(sum(r * r for r in range(size)), size)] * size
    assert mixing.spectral_gap() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("mixing", "gap"),
    [
        (Mixing.complete(5), 1.0),
        (Mixing.ring(1), 1.0),
        (Mixing.ring(2), 1.0),
        (Mixing.ring(12), 1 - (1 + 2 * math.cos(2 * math.pi / 12)) / 3),
        (Mixing.exponential(8), 0.5),  # 2 / (1 + log2 n), Ying et al. 2021
    ],
)
def test_the_spectral_gap_is_that_of_the_closed_form(mixing, gap):
    assert mixing.spectral_gap() == pytest.approx(gap)


@pytest.mark.parametrize(
    ("matrices", "words"),
    [
        ([[[0.5, 0.5], [0.4, 0.6]]], "column 0 that sums to 0.9 in step 0; column 1 that sums"),
        ([[[1.5, 0.0], [-0.5, 1.0]]], "-0.5 for what rank 1 takes from 0 in step 0"),
        ([[[1.0, 0.0], [0.0, 1.0]]], "never hear of some others"),
        ([[[0.5, 0.0], [0.5, 1.0]]], "never hear of some others"),
        ([[[0.0, 1.0], [1.0, 0.0]]], "or only change places"),
        ([[[0, 1, 0], [0, 0, 1], [1, 0, 0]]], "or only change places"),
        ([[[1, 1], [0, 0]], [[0.5, 0], [0.5, 1]]], "got nothing for rank 1 in step 0"),
        ([[[1.0, 0.0]]], "no square matrices"),
        ([], "no square matrices"),
        ([[[math.nan]]], "nan for what rank 0"),
    ],
)
def test_weights_that_move_the_mean_or_leave_ranks_alone_are_refused(matrices, words):
    with pytest.raises(ConfigError, match=r"columns that sum to 1") as caught:
        Mixing.of(matrices)
    assert words in str(caught.value)


def test_ranks_may_hear_of_each_other_in_the_course_of_a_turn():
    pairs = [[[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]], [[1, 0, 0], [0, 0.5, 0.5], [0, 0.5, 0.5]]]
    assert 0 < Mixing.of(pairs).spectral_gap() < 1
    with pytest.raises(ConfigError, match="never hear"):
        Mixing.of(pairs[:1])


@given(st.lists(st.permutations(range(5)), min_size=1, max_size=3))
def test_what_passes_is_what_has_a_spectral_gap(orders):
    """The mean of permutations is doubly stochastic."""
    rows = [[0.0] * 5 for _ in range(5)]
    for order in orders:
        for rank, source in enumerate(order):
            rows[rank][source] += 1.0 / len(orders)
    gap = Mixing("drawn", (tuple(map(tuple, rows)),)).spectral_gap()
    if gap > 1e-6:
        assert Mixing.of([rows]).spectral_gap() == pytest.approx(gap)
    else:
        with pytest.raises(ConfigError, match="change places"):
            Mixing.of([rows])


def test_columns_alone_are_enough_but_are_told_apart():
    push = [[[0.5, 0.0, 0.25], [0.5, 0.5, 0.0], [0.0, 0.5, 0.75]]]
    assert not Mixing.of(push).doubly_stochastic


def test_no_ranks_are_refused():
    with pytest.raises(ConfigError, match="must be at least 1, got 0"):
        Mixing.ring(0)


HALVES = [[0.5, 0.5], [0.5, 0.5]]


@pytest.mark.parametrize(
    "given",
    [
        HALVES,
        [HALVES],
        np.array(HALVES),
        np.array([HALVES]),
        [np.array(HALVES, dtype=np.float32)],
        torch.tensor(HALVES, dtype=torch.bfloat16),
        torch.tensor([HALVES], dtype=torch.float64),
        [list(torch.tensor(HALVES))],
        [[np.float32(0.5), np.float32(0.5)], [0.5, 0.5]],
    ],
)
def test_one_matrix_or_several_may_be_lists_arrays_or_tensors(given):
    assert Mixing.of(given).matrices == (((0.5, 0.5), (0.5, 0.5)),)


def test_one_matrix_of_one_rank_is_as_good_as_several():
    assert Mixing.of([[1]]) == Mixing.of([[[1.0]]]) == Mixing.of(torch.ones(1, 1, 1))


def _sums(mixing: Mixing, axis: int) -> np.ndarray:
    return np.asarray(mixing.matrices[0]).sum(axis)


@pytest.mark.parametrize("size", [3, 7, 33])
def test_weights_of_32_bits_lose_nothing_in_64(size):
    drawn = np.random.default_rng(size)
    orders = [drawn.permutation(size) for _ in range(5)]
    shares = drawn.dirichlet(np.ones(5))
    doubly = sum(share * np.eye(size)[order] for share, order in zip(shares, orders, strict=True))
    for matrix in (torch.full((size, size), 1 / size), doubly.astype(np.float32)):
        mixing = Mixing.of([matrix])
        assert mixing.doubly_stochastic
        assert np.allclose(_sums(mixing, 0), 1.0, rtol=0, atol=1e-15)
        assert np.allclose(np.asarray(mixing.matrices[0]), np.asarray(matrix), rtol=1e-5, atol=0)
        assert Mixing.of(mixing.matrices, mixing.name) == mixing
    columns = drawn.dirichlet(np.ones(size), size=size).T.astype(np.float32)
    mixing = Mixing.of(torch.from_numpy(columns))
    assert not mixing.doubly_stochastic
    assert np.allclose(_sums(mixing, 0), 1.0, rtol=0, atol=1e-15)


def test_how_far_a_sum_is_from_1_is_said_where_few_digits_do_not_tell():
    third = float(np.float32(1 / 3))
    with pytest.raises(ConfigError, match=r"column 0 that sums to 1\+3e-08 in step 0"):
        Mixing.of([[[third] * 3] * 3])
    with pytest.raises(ConfigError, match=r"column 0 that sums to 1\.00195"):
        Mixing.of(torch.full((3, 3), 1 / 3, dtype=torch.bfloat16))


@pytest.mark.parametrize("given", ["ring", 3, [0.5, 0.5], [[["a"]]], None])
def test_what_is_no_matrix_of_numbers_is_refused(given):
    with pytest.raises(ConfigError, match=r"mixing 'own' must be made of matrices of numbers"):
        Mixing.of(given)
