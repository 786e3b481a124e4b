"""Buckets hold every parameter once, and leave when they are full."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from braid.comm import StepsBy
from braid.errors import ConfigError
from braid.parallel.gradients import Bucket, FlatBuffer, ParamTable
from braid.parallel.gradients.bucket_layout import BucketLayout, Caps, plan_buckets, waiting_cost
from braid.runtime.events import Recorder
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
    assert waiting_cost(plan_buckets(params, single, order=order), params, order) == 0
    assert waiting_cost(plan_buckets(params, caps, order=order), params, order) >= 0


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


class Operation:
    """Doubles the bucket when it is waited for, and leaves out a quarter of each number."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.num_started = 0

    def start(self, *, steps_by=StepsBy.CALLER):  # noqa: ARG002 - of the protocol
        self.num_started += 1
        return self

    def wait(self):
        self.tensor.mul_(2)

    def residual(self):
        return self.tensor / 4

    def reset_residual(self):
        pass

    def retire(self):
        pass


def bucket_of(numels, residuals=None):
    with torch.no_grad():
        params = [nn.Parameter(torch.zeros(numel)) for numel in numels]
    records = ParamTable.named((f"p{i}", p) for i, p in enumerate(params)).records
    layout = BucketLayout("float32", tuple(reversed(range(len(params)))))
    members = [records[p].param for p in layout.members]
    buffer = FlatBuffer([p.shape for p in members], torch.float32, make, like=members)
    operation = Operation(buffer.tensor)
    bucket = Bucket(
        0,
        layout,
        records,
        buffer,
        operation,
        events=Recorder(),
        title="bucket 1 of 1",
        residuals={} if residuals is None else residuals,
    )
    return bucket, params, operation


def make(shape, dtype):
    return torch.zeros(tuple(shape), dtype=dtype)


def come(bucket, params, position, value=1.0):
    """A gradient is accumulated, as autograd does it."""
    param = params[position]
    grad = torch.full_like(param, value)
    if param.grad is None:
        param.grad = grad
    else:
        param.grad += grad
    return bucket.mark_ready(position)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.randoms())
def test_a_bucket_completes_with_its_last_gradient_whatever_the_order(numels, random):
    bucket, params, _ = bucket_of(numels)
    order = list(range(len(params)))
    random.shuffle(order)
    for step in range(2):
        assert [come(bucket, params, p) for p in order] == [False] * (len(order) - 1) + [True]
        assert bucket.is_ready
        bucket.reset()
        assert not bucket.is_ready
        for param in params:
            param.grad = None if step else param.grad


def test_gradients_become_views_of_the_bucket_and_receive_its_result():
    bucket, params, operation = bucket_of([2, 1])
    come(bucket, params, 0, 3.0)
    come(bucket, params, 1, 5.0)
    assert bucket.buffer.tensor.tolist() == [5.0, 3.0, 3.0]
    bucket.launch()
    assert (bucket.is_launched, operation.num_started) == (True, 1)
    assert bucket.wait()
    assert (params[0].grad.tolist(), params[1].grad.tolist()) == ([6.0, 6.0], [10.0])
    assert not bucket.wait()
    assert {name: r.tolist() for name, r in bucket.residuals().items()} == {
        "p1": [2.5],
        "p0": [1.5, 1.5],
    }


def test_what_is_missing_is_zero_and_a_bucket_of_nothing_says_so():
    bucket, params, _ = bucket_of([2, 1])
    bucket.buffer.tensor.fill_(9)
    assert not bucket.collect_all()
    come(bucket, params, 1)
    assert bucket.collect_all()
    assert bucket.buffer.tensor.tolist() == [1.0, 0.0, 0.0]


def test_residuals_are_added_once_at_the_launch():
    residuals = {"p0": torch.tensor([0.5, 0.25]), "frozen": torch.ones(1)}
    bucket, _params, _ = bucket_of([2, 1], residuals)
    bucket.zero()
    bucket.launch()
    assert bucket.buffer.tensor.tolist() == [0.0, 0.5, 0.25]
    assert list(residuals) == ["frozen"]
    bucket.wait()
    bucket.keep_residuals([0, 1])
    assert sorted(residuals) == ["frozen", "p0"]


@pytest.mark.parametrize("check", ["first", "late", "all"])
def test_gradients_that_are_not_finite_are_found_by_position(check):
    bucket, params, _ = bucket_of([2, 1, 3])
    for position, value in enumerate((1.0, float("nan"), float("-inf"))):
        come(bucket, params, position, value)
    assert sorted(bucket.find_nonfinite(check)) == [1, 2]
    bucket.zero()
    assert bucket.find_nonfinite(check) == []


def test_a_gradient_may_come_in_parts_until_its_bucket_is_launched():
    bucket, params, _ = bucket_of([4, 4])
    assert [come(bucket, params, p) for p in (1, 1, 0)] == [False, False, True]
    bucket.launch()
    with pytest.raises(ConfigError, match=r"'p1'.*static_graph=True"):
        come(bucket, params, 1)


def test_a_static_graph_waits_for_the_last_part():
    bucket, params, _ = bucket_of([4, 4])
    for position in (1, 1, 0):
        come(bucket, params, position)
    bucket.learn()
    bucket.reset()
    assert [come(bucket, params, p) for p in (1, 0, 1)] == [False, False, True]


def test_sparse_gradients_are_refused_and_graphs_of_gradients_stay_outside():
    bucket, params, _ = bucket_of([4, 4])
    params[0].grad = torch.zeros(4).to_sparse()
    with pytest.raises(ConfigError, match=r"'p0' has layout"):
        bucket.mark_ready(0)
    params[1].grad = torch.zeros(4, requires_grad=True)
    assert bucket.collect(1)
    assert params[1].grad.requires_grad


@pytest.mark.parametrize("wrong", [(), (0,), (5, -1)])
def test_caps_must_be_positive(wrong):
    with pytest.raises(ConfigError, match="at least one byte"):
        plan_buckets({}, Caps(wrong))
