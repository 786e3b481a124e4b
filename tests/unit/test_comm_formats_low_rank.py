"""Low rank: exact where the rank suffices, the best projection over the steps, the same on all ranks."""

from __future__ import annotations

import pytest
import torch

from braid.comm.formats import ErrorFeedback, LowRank
from braid.errors import ConfigError


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def low_rank(rows: int, columns: int, rank: int, seed: int = 9) -> LowRank:
    return LowRank(rows, columns, rank, generator=torch.Generator().manual_seed(seed))


def averaged(ranks: list[LowRank], matrices: list[torch.Tensor]) -> list[torch.Tensor]:
    """One step of all ranks; an all-reduce gives every rank the same average."""
    pairs = list(zip(ranks, matrices, strict=True))
    p = torch.stack([rank.compress(matrix) for rank, matrix in pairs]).mean(0)
    ps = [p.clone() for _ in ranks]
    q = torch.stack(
        [rank.project(matrix, p) for (rank, matrix), p in zip(pairs, ps, strict=True)]
    ).mean(0)
    outs = [torch.full_like(matrix, 7.0) for matrix in matrices]
    for rank, p, out in zip(ranks, ps, outs, strict=True):
        rank.finish(p, q.clone(), out)
    return outs


def test_a_sum_of_matrices_whose_rank_suffices_arrives_whole():
    matrices = [noise(20, 2, seed=i) @ noise(2, 30, seed=i + 9) for i in range(3)]
    outs = averaged([low_rank(20, 30, 6) for _ in matrices], matrices)
    for out in outs:
        torch.testing.assert_close(out, torch.stack(matrices).mean(0), rtol=1e-4, atol=1e-4)


def test_all_ranks_have_the_same_bits_and_the_same_next_start():
    ranks = [low_rank(20, 30, 3) for _ in range(4)]
    for step in range(3):
        outs = averaged(ranks, [noise(20, 30, seed=4 * step + i) for i in range(4)])
        assert all(torch.equal(out, outs[0]) for out in outs)
    starts = [rank.state_dict()["q"] for rank in ranks]
    assert all(torch.equal(start, starts[0]) for start in starts)


def test_steps_with_a_warm_start_reach_the_best_approximation():
    u, _, v = torch.linalg.svd(noise(30, 20), full_matrices=False)
    spectrum = 0.6 ** torch.arange(20.0)
    matrix = u @ spectrum.diag() @ v
    rank = low_rank(30, 20, 3)
    errors = [float((averaged([rank], [matrix])[0] - matrix).norm()) for _ in range(15)]
    best = float(spectrum[3:].norm())  # Eckart, Young, Mirsky
    assert errors[0] > 1.01 * best
    assert errors[-1] == pytest.approx(best, rel=1e-4)


def test_with_feedback_all_that_was_sent_and_what_is_left_is_all_that_was_given():
    rank, feedback = low_rank(20, 30, 2), ErrorFeedback(600)
    given, arrived = torch.zeros(20, 30), torch.zeros(20, 30)
    for step in range(10):
        matrix = noise(20, 30, seed=step)
        given += matrix
        out = averaged([rank], [feedback.correct(matrix.view(-1)).view(20, 30)])[0]
        feedback.mark_sent(out.view(-1))
        arrived += out
    left = feedback.state_dict()["residual"].view(20, 30)
    torch.testing.assert_close(arrived + left, given, rtol=0, atol=1e-4)


def test_a_gradient_of_zero_does_not_end_it():
    rank, matrix = low_rank(20, 30, 2), noise(20, 1) @ noise(1, 30)
    assert averaged([rank], [torch.zeros(20, 30)])[0].count_nonzero() == 0
    averaged([rank], [matrix])
    torch.testing.assert_close(averaged([rank], [matrix])[0], matrix, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_step_that_is_not_finite_is_seen_and_then_forgotten(bad):
    rank, matrix = low_rank(20, 30, 2), noise(20, 30)
    matrix[3, 4] = bad
    assert not averaged([rank], [matrix])[0].isfinite().all()
    assert averaged([rank], [noise(20, 30)])[0].isfinite().all()


def test_the_result_may_be_the_matrix_and_has_no_gradient():
    rank, matrix = low_rank(6, 5, 2), noise(6, 5).requires_grad_()
    expected = averaged([low_rank(6, 5, 2)], [noise(6, 5)])[0]
    p = rank.compress(matrix)
    rank.finish(p, rank.project(matrix, p), out=matrix)
    assert torch.equal(matrix.detach(), expected)


def test_a_checkpoint_continues_where_it_was():
    first, second = low_rank(20, 30, 2), low_rank(20, 30, 2, seed=1)
    averaged([first], [noise(20, 30)])
    second.load_state_dict(first.state_dict())
    again = noise(20, 30, seed=1)
    assert torch.equal(averaged([first], [again])[0], averaged([second], [again])[0])


def test_bytes_are_those_of_both_factors():
    rank, matrix = low_rank(20, 30, 4), noise(20, 30)
    p = rank.compress(matrix)
    q = rank.project(matrix, p)
    assert p.untyped_storage().nbytes() + q.untyped_storage().nbytes() == rank.nbytes() == 800


@pytest.mark.parametrize("rank", [0, 6])
def test_ranks_beyond_the_matrix_are_refused(rank):
    with pytest.raises(ConfigError, match=f"a rank from 1 to 5, not {rank}"):
        low_rank(9, 5, rank)


def test_matrices_that_do_not_fit_are_refused():
    rank = low_rank(9, 5, 2)
    p, q = torch.zeros(9, 2), torch.zeros(5, 2)
    for call in (
        lambda: rank.compress(torch.zeros(5, 9)),
        lambda: rank.compress(torch.zeros(9, 5, dtype=torch.float64)),
        lambda: rank.project(torch.zeros(9, 5), q),
        lambda: rank.finish(p, p, torch.zeros(9, 5)),
        lambda: rank.load_state_dict({}),
        lambda: rank.load_state_dict({"q": p}),
    ):
        with pytest.raises(ConfigError, match=r"LowRank\(9, 5, 2\)"):
            call()
