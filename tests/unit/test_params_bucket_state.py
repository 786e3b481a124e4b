"""Buckets hold every parameter once, and leave when they are full."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import ConfigError
from braid.params.bucket_state import BucketState, plan_buckets
from braid.types import TensorSpec

specs = st.lists(
    st.builds(
        TensorSpec,
        st.lists(st.integers(0, 50), max_size=3).map(tuple),
        st.sampled_from(["float32", "bfloat16"]),
    ),
    max_size=30,
)


@given(specs, st.integers(1, 10_000), st.integers(1, 10_000))
def test_every_parameter_is_in_exactly_one_bucket_of_its_dtype(params, cap, first):
    plan = plan_buckets(params, cap, first)
    assert sorted(p for bucket in plan for p in bucket.members) == list(range(len(params)))
    assert all(params[p].dtype == bucket.dtype for bucket in plan for p in bucket.members)


@given(specs, st.integers(1, 10_000))
def test_buckets_are_filled_from_the_last_parameter(params, cap):
    for bucket in plan_buckets(params, cap):
        assert list(bucket.members) == sorted(bucket.members, reverse=True)


def test_the_first_bucket_is_small():
    params = [TensorSpec((256,), "float32")] * 6  # 1 KiB each
    plan = plan_buckets(params, cap_bytes=2048, first_cap_bytes=1024)
    assert [bucket.members for bucket in plan] == [(5,), (4, 3), (2, 1), (0,)]


@given(specs.filter(bool), st.integers(1, 10_000), st.randoms())
def test_a_bucket_completes_with_its_last_gradient_whatever_the_order(params, cap, random):
    plan = plan_buckets(params, cap)
    state = BucketState(plan, [f"p{i}" for i in range(len(params))])
    order = list(range(len(params)))
    random.shuffle(order)
    completed = [(p, b) for p in order if (b := state.ready(p)) is not None]
    last = {b: max(bucket.members, key=order.index) for b, bucket in enumerate(plan)}
    assert {b: p for p, b in completed} == last


def test_missing_gradients_are_named_and_forgotten_by_reset():
    state = BucketState(plan_buckets([TensorSpec((4,), "float32")] * 3, 1 << 20), "abc")
    assert state.missing(0) == (2, 1, 0)
    state.ready(1)
    assert (state.missing(0), state.begun) == ((2, 0), True)
    state.reset()
    assert (state.missing(0), state.begun) == ((2, 1, 0), False)


def test_a_second_gradient_of_one_parameter_is_refused_by_name():
    state = BucketState(plan_buckets([TensorSpec((4,), "float32")] * 2), ["first", "second"])
    state.ready(1)
    with pytest.raises(ConfigError, match="'second'"):
        state.ready(1)


def test_caps_must_be_positive():
    with pytest.raises(ConfigError, match="0"):
        plan_buckets([], 0)
