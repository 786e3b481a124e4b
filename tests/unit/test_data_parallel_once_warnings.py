"""What is said of steps that work, but may not be meant."""

from __future__ import annotations

import warnings

import pytest
from torch import nn

from braid.parallel.data_parallel.ddp.once_warnings import OnceWarnings
from braid.parallel.gradients import AveragingOutcome, ParamTable, RankState, Status

RECORDS = ParamTable.of(nn.Linear(2, 3)).records  # weight and bias


def outcome(*, forwards=(0, 0, 0), states=(RankState.ACTIVE,) * 3, present=(3, 3)):
    status = Status(
        present=present,
        nonfinite=(0, 0),
        requires_grad=(3, 3),
        states=states,
        num_forwards_without_backward=forwards,
        has_hook=(0, 0, 0),
        weight=3.0,
        num_weighted=0,
        num_buffers_used=0,
    )
    return AveragingOutcome(88, status, RECORDS)


def once_warnings(ranks=(4, 5, 6), *, is_speaker=True, names_unused=True):
    return OnceWarnings("Net", ranks, is_speaker=is_speaker, names_unused=names_unused)


def said(own, found):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own.check(found)
    return [str(one.message) for one in caught]


def test_steps_that_are_as_they_should_be_are_not_spoken_of():
    assert said(once_warnings(), outcome()) == []


def test_unused_parameters_are_named_once():
    own = once_warnings()
    (text,) = said(own, outcome(present=(3, 0)))
    assert (
        "1 parameter of Net got no gradient on any rank in step 88: 'bias'; .grad stays None"
        in text
    )
    assert said(own, outcome(present=(0, 0))) == []


def test_forwards_without_backward_are_told_once_with_their_ranks():
    own = once_warnings()
    (text,) = said(own, outcome(forwards=(0, 1, 0)))
    assert "forwards without a backward in step 88: 1 on rank 5. If an exception" in text
    assert said(own, outcome(forwards=(3, 2, 1))) == []


def test_forwards_without_backward_are_counted_by_rank():
    (text,) = said(once_warnings(), outcome(forwards=(1, 2, 1)))
    assert "in step 88: 1 on ranks 4, 6; 2 on rank 5. If" in text


@pytest.mark.parametrize(
    "found",
    [
        outcome(forwards=(1, 0, 1), states=(RankState.ACTIVE, RankState.JOINED, RankState.ACTIVE)),
        outcome(forwards=(2, 2, 2)),
    ],
)
def test_ranks_that_have_joined_and_equal_counts_are_all_right(found):
    assert said(once_warnings(), found) == []


def test_one_rank_speaks_and_expected_unused_parameters_are_no_news():
    both = outcome(forwards=(0, 1, 0), present=(0, 0))
    assert said(once_warnings(is_speaker=False), both) == []
    (text,) = said(once_warnings(names_unused=False), both)
    assert "forwards" in text


def test_a_great_many_names_and_ranks_are_cut_short():
    net = nn.ModuleList([nn.Linear(1, 1) for _ in range(6)])
    records = ParamTable.of(net).records
    size = 30
    status = Status(
        present=[0] * 12,
        nonfinite=[0] * 12,
        requires_grad=[size] * 12,
        states=[RankState.ACTIVE] * size,
        num_forwards_without_backward=[1 + rank % 2 for rank in range(size)],
        has_hook=[0] * size,
        weight=1.0,
        num_weighted=0,
        num_buffers_used=0,
    )
    unused, ahead = said(once_warnings(tuple(range(size))), AveragingOutcome(1, status, records))
    assert "12 parameters" in unused
    assert "and 4 more" in unused
    assert "1 on ranks 0, 2, 4, 6, 8, 10, 12, 14 and 7 more" in ahead
