"""The status of a backward: what ranks put in is what all of them read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from braid.parallel.gradients.status import RankState, StatusLayout

flags = st.lists(st.booleans(), min_size=5, max_size=5)
rank = st.fixed_dictionaries(
    {
        "present": flags,
        "nonfinite": flags,
        "requires_grad": flags,
        "state": st.sampled_from(RankState),
        "num_forwards_without_backward": st.integers(0, 1 << 30),
        "has_hook": st.booleans(),
        "weight": st.integers(0, 1 << 30).map(float),
        "is_weighted": st.booleans(),
        "buffers_used": st.booleans(),
    }
)


@given(st.lists(rank, min_size=1, max_size=6))
def test_the_sum_of_what_ranks_say_says_what_each_said(ranks):
    layout = StatusLayout(5, len(ranks))
    said = [layout.encode(number, **one) for number, one in enumerate(ranks)]
    assert {len(one) for one in said} == {layout.length}
    heard = layout.decode([sum(column) for column in zip(*said, strict=True)])
    for name in ("present", "nonfinite", "requires_grad"):
        counts = [sum(one[name][p] for one in ranks) for p in range(5)]
        assert getattr(heard, name) == counts
    assert heard.states == [one["state"] for one in ranks]
    forwards = [one["num_forwards_without_backward"] for one in ranks]
    assert heard.num_forwards_without_backward == forwards
    assert heard.has_hook == [one["has_hook"] for one in ranks]
    assert heard.weight == sum(one["weight"] for one in ranks)
    assert heard.num_weighted == sum(one["is_weighted"] for one in ranks)
    assert heard.num_buffers_used == sum(one["buffers_used"] for one in ranks)
    for state in RankState:
        assert heard.ranks(state) == [
            number for number, one in enumerate(ranks) if one["state"] is state
        ]
