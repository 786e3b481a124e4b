"""The status of a backward: what ranks put in is what all of them read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from braid.params.status import Standing, StatusLayout

flags = st.lists(st.booleans(), min_size=5, max_size=5)
rank = st.fixed_dictionaries(
    {
        "present": flags,
        "spoiled": flags,
        "trained": flags,
        "standing": st.sampled_from(Standing),
        "unreached": st.integers(0, 1 << 30),
        "weight": st.integers(0, 1 << 30).map(float),
        "weighed": st.booleans(),
        "buffers": st.booleans(),
    }
)


@given(st.lists(rank, min_size=1, max_size=6))
def test_the_sum_of_what_ranks_say_says_what_each_said(ranks):
    layout = StatusLayout(5, len(ranks))
    said = [layout.encode(number, **one) for number, one in enumerate(ranks)]
    assert {len(one) for one in said} == {layout.length}
    heard = layout.decode([sum(column) for column in zip(*said, strict=True)])
    for name in ("present", "spoiled", "trained"):
        counts = [sum(one[name][p] for one in ranks) for p in range(5)]
        assert getattr(heard, name) == counts
    assert heard.standings == [one["standing"] for one in ranks]
    assert heard.unreached == [one["unreached"] for one in ranks]
    assert heard.weight == sum(one["weight"] for one in ranks)
    assert heard.weighed == sum(one["weighed"] for one in ranks)
    assert heard.buffers == sum(one["buffers"] for one in ranks)
    for standing in Standing:
        assert heard.ranks(standing) == [
            number for number, one in enumerate(ranks) if one["standing"] is standing
        ]
