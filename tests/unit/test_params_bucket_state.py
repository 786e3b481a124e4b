"""Buckets hold every parameter once, and leave when they are full."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import ConfigError
from braid.params.bucket_state import BucketState, Caps, held_back, plan_buckets
from braid.types import TensorSpec

specs = st.lists(
    st.builds(
        TensorSpec,
        st.lists(st.integers(0, 50), max_size=3).map(tuple),
        st.sampled_from(["float32", "bfloat16"]),
    ),
    max_size=30,
).map(lambda found: dict(enumerate(found)))
caps = st.lists(st.integers(1, 10_000), min_size=1, max_size=4).map(
    lambda found: Caps(tuple(found))
)
FOUR = dict(enumerate([TensorSpec((4,), "float32")] * 4))


@given(specs, caps, st.randoms())
def test_every_parameter_is_in_exactly_one_bucket_of_its_dtype(params, caps, random):
    order = [p for p in params if random.random() < 0.7]
    random.shuffle(order)
    delayed = frozenset(p for p in params if random.random() < 0.2)
    plan = plan_buckets(params, caps, order=order, delayed=delayed)
    assert sorted(p for bucket in plan for p in bucket.members) == list(params)
    assert all(params[p].dtype == bucket.dtype for bucket in plan for p in bucket.members)
    assert all((p in delayed) == bucket.delayed for bucket in plan for p in bucket.members)


@given(specs, caps)
def test_buckets_are_filled_from_the_last_parameter(params, caps):
    for bucket in plan_buckets(params, caps):
        assert list(bucket.members) == sorted(bucket.members, reverse=True)


@given(specs, caps, st.randoms())
def test_buckets_are_filled_in_the_order_in_which_gradients_came(params, caps, random):
    order = list(params)
    random.shuffle(order)
    for bucket in plan_buckets(params, caps, order=order):
        assert list(bucket.members) == sorted(bucket.members, key=order.index)


@given(specs, caps, st.randoms())
def test_a_plan_by_the_order_of_gradients_holds_none_back_longer_than_one_by_registration(
    params, caps, random
):
    order = list(params)
    random.shuffle(order)
    single = Caps((1,))  # every gradient leaves by itself
    assert held_back(plan_buckets(params, single, order=order), params, order) == 0
    assert held_back(plan_buckets(params, caps, order=order), params, order) >= 0


def test_the_first_bucket_is_small_and_the_last_cap_holds_for_the_others():
    params = dict(enumerate([TensorSpec((256,), "float32")] * 6))  # 1 KiB each
    plan = plan_buckets(params, Caps((1024, 2048)))
    assert [bucket.members for bucket in plan] == [(5,), (4, 3), (2, 1), (0,)]


def test_devices_do_not_mix():
    plan = plan_buckets(FOUR, Caps((1 << 20,)), devices={0: "cuda:0", 2: "cuda:0"})
    assert {(bucket.device, bucket.members) for bucket in plan} == {
        ("cpu", (3, 1)),
        ("cuda:0", (2, 0)),
    }


@given(specs.filter(bool), caps, st.randoms())
def test_a_bucket_completes_with_its_last_gradient_whatever_the_order(params, caps, random):
    plan = plan_buckets(params, caps)
    state = BucketState(plan, {p: f"p{p}" for p in params})
    order = list(params)
    random.shuffle(order)
    completed = [(p, b) for p in order if (b := state.ready(p)) is not None]
    last = {b: max(bucket.members, key=order.index) for b, bucket in enumerate(plan)}
    assert {b: p for p, b in completed} == last
    assert state.order == order


def state_of_four(cap: int = 1 << 20) -> BucketState:
    return BucketState(plan_buckets(FOUR, Caps((cap,))), dict(enumerate("abcd")))


def test_what_came_is_forgotten_by_reset():
    state = state_of_four()
    state.ready(1)
    state.leave(0)
    assert (state.came(1), state.came(2), state.begun, state.has_left(0)) == (
        True,
        False,
        True,
        True,
    )
    state.reset()
    assert (state.came(1), state.begun, state.has_left(0)) == (False, False, False)


def test_a_gradient_may_come_in_parts_until_its_bucket_has_left():
    state = state_of_four(cap=32)
    assert [state.ready(p) for p in (3, 3, 2)] == [None, None, 0]
    state.leave(0)
    with pytest.raises(ConfigError, match=r"'d'.*static_graph=True"):
        state.ready(3)


def test_a_static_graph_waits_for_the_last_part():
    state = state_of_four(cap=32)
    for position in (3, 3, 2, 1, 0):
        state.ready(position)
    state.learn()
    state.reset()
    assert [state.ready(p) for p in (3, 2, 3)] == [None, None, 0]


@pytest.mark.parametrize("wrong", [(), (0,), (5, -1)])
def test_caps_must_be_positive(wrong):
    with pytest.raises(ConfigError, match="at least one byte"):
        plan_buckets({}, Caps(wrong))
