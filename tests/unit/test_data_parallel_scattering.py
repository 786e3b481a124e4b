"""Batches cut into shares and put together again."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import ConfigError
from braid.parallel.data_parallel.replicas.gather import gather
from braid.parallel.data_parallel.replicas.scatter import num_samples, scatter, share_sizes


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Record:
    x: Any
    label: Any = "none"


class Special(dict):
    """A dict of its own kind."""


def _trees(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def wider(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(Special)
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(
                collections.OrderedDict
            )
            | st.builds(Pair, inner, inner)
            | st.builds(Record, inner)
        )

    return st.recursive(leaf, wider, max_leaves=6)


@st.composite
def _batches(draw: st.DrawFn) -> tuple[Any, int, int]:
    """Inputs, dim of samples, devices."""
    dim = draw(st.integers(-2, 1))
    length = draw(st.integers(0, 7))

    def tensor(others: list[int]) -> torch.Tensor:
        shape = [*others]
        shape[dim] = length
        return torch.arange(float(torch.Size(shape).numel())).view(shape)

    tensors = st.lists(st.integers(1, 3), min_size=2, max_size=2).map(tensor)
    leaf = tensors | st.none() | st.integers() | st.text(max_size=3)
    return draw(_trees(leaf)), dim, draw(st.integers(1, 4))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, Record):
        return _equal(one.x, other.x) and one.label == other.label
    return one == other


@given(_batches())
def test_what_is_scattered_and_gathered_is_what_it_was(batch):
    inputs, dim, count = batch
    shares = scatter(inputs, ["cpu"] * count, dim)
    assert _equal(gather(shares, "cpu", dim), inputs)
    samples = num_samples(inputs, dim)
    assert len(shares) == max(1, min(count, samples or 0))
    if samples is not None:
        assert [num_samples(share, dim) for share in shares] == share_sizes(samples, count)


@given(st.integers(0, 50), st.integers(1, 9))
def test_shares_differ_by_one_sample_at_most_and_none_is_idle(total, count):
    sizes = share_sizes(total, count)
    assert sum(sizes) == total
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert len(sizes) == count or sizes == [1] * total or sizes == [0]


def test_gradients_come_back_through_both():
    x = torch.arange(10.0).view(5, 2).requires_grad_()
    shares = scatter((x, {"twice": x}), ["cpu"] * 3)
    y = gather([(i + 1) * args + named["twice"] for i, (args, named) in enumerate(shares)], "cpu")
    y.sum().backward()
    assert x.grad[:, 0].tolist() == [2, 2, 3, 3, 4]


def test_a_tensor_that_occurs_twice_is_one_in_each_share():
    x = torch.ones(4, 1)
    for share in scatter([x, {"again": x}], ["cpu"] * 2):
        assert share[0] is share[1]["again"]


def test_other_objects_and_tensors_without_dims_go_to_all():
    flag, scale = object(), torch.tensor(2.0)
    shares = scatter((torch.ones(2), flag, scale), ["cpu"] * 2)
    assert [(x.tolist(), other, s.item()) for x, other, s in shares] == [([1.0], flag, 2.0)] * 2
    assert scatter((flag, scale), ["cpu"] * 2) == [(flag, scale)]


def test_shares_on_the_device_of_the_batch_are_views():
    x = torch.zeros(4)
    for share in scatter(x, ["cpu"] * 2):
        share.add_(1)
    assert x.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("inputs", "dim", "words"),
    [
        ((torch.ones(2, 3), torch.ones(4)), 0, r"differ in the number of samples along dim 0, got shapes \[2, 3\], \[4\]"),
        ([torch.ones(2)], 1, r"tensor of shape \[2\] has no dim 1"),
        ({"a": {torch.ones(2)}}, 0, r"tensor of shape \[2\] is in a container that cannot be split"),
        ({"a": frozenset([torch.ones(2)])}, 0, r"pass lists, tuples, dicts or dataclasses, such as dict\(\.\.\.\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused(inputs, dim, words):
    with pytest.raises(ConfigError, match=words):
        scatter(inputs, ["cpu"] * 2, dim)


@pytest.mark.parametrize("devices", [[], ["nowhere"], [None], [99], ["cuda:99"]], ids=str)
def test_devices_that_do_not_exist_are_refused(devices):
    with pytest.raises(ConfigError, match="device"):
        scatter(torch.ones(2), devices)


def test_numbers_become_a_vector_and_of_one_replica_stay_as_they_are():
    assert gather([torch.tensor(1.0), torch.tensor(2.0)], "cpu").tolist() == [1.0, 2.0]
    assert gather([torch.tensor(1.0)], -1).shape == ()


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ([], "outputs is empty"),
        ([torch.ones(1), 1.0], "differ in the type of output: Tensor on replica 0 and float"),
        ([{"a": 1}, {"a": 1}, {"b": 1}], r"differ in the keys of output: \['a'\] on replica 0 and \['b'\] on replica 2"),
        ([(None, [1]), (None, [2])], r"differ in the value of output\[1\]\[0\]: 1 on replica 0 and 2"),
        ([Record(torch.ones(2, 3)), Record(torch.ones(2, 4))], r"output\['x'\]: float32\[2, 3\]"),
        ([torch.ones(2), torch.ones(2).double()], r"float64\[2\] on replica 1"),
        ([torch.ones(2), torch.tensor(1.0)], r"float32\[\] on replica 1"),
        ([torch.ones(2, dtype=torch.int8).numpy(), torch.ones(2).numpy()], "the value of output"),
    ],
)  # fmt: skip
def test_replicas_that_return_different_things_are_refused_by_place(outputs, words):
    with pytest.raises(ConfigError, match=words):
        gather(outputs, "cpu")


def test_outputs_without_the_dim_are_refused():
    with pytest.raises(ConfigError, match=r"output\['y'\] of shape \[2\] has no dim 1"):
        gather([{"y": torch.ones(2)}] * 2, "cpu", 1)


def test_a_container_keeps_what_else_it_has():
    outputs = [collections.defaultdict(list, y=torch.ones(1)) for _ in range(2)]
    found = gather(outputs, "cpu")
    assert found["other"] == []
    assert found["y"].tolist() == [1.0, 1.0]


def test_mappings_of_every_kind_are_scattered_and_gathered():
    shares = scatter(collections.UserDict(y=torch.ones(2)), ["cpu"] * 2)
    assert [share["y"].tolist() for share in shares] == [[1.0], [1.0]]
    whole = gather(shares, "cpu")
    assert isinstance(whole, collections.UserDict)
    assert whole["y"].tolist() == [1.0, 1.0]
