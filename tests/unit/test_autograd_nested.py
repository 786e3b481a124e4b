"""Tensors in what a module takes are changed in whichever container they lie, and nothing else is."""

from __future__ import annotations

import dataclasses
from collections import ChainMap, OrderedDict, UserDict, defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch

from braid.comm.autograd.nested import map_tensors, tensors_in


class Pair(NamedTuple):
    """A tuple with names."""

    x: torch.Tensor
    note: str


@dataclasses.dataclass(frozen=True)
class Batch:
    """Checks itself, and has a field that is no argument."""

    x: torch.Tensor
    scale: dataclasses.InitVar[float] = 1.0
    scaled: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self, scale: float) -> None:
        object.__setattr__(self, "scaled", self.x * scale)


class Tagged(dict):
    """A dict with an attribute, made of something else."""

    def __init__(self, *, tag: str) -> None:
        super().__init__()
        self.tag = tag


class Fixed(Mapping):
    """A mapping that cannot be assigned to."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.x

    def __iter__(self):
        return iter("x")

    def __len__(self) -> int:
        return 1


def _low(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16) if x.is_floating_point() else x


def _tagged() -> Tagged:
    found = Tagged(tag="kept")
    found["x"] = torch.ones(2)
    return found


CONTAINERS = {
    "dict": lambda x: {"x": x},
    "ordered": lambda x: OrderedDict(x=x),
    "default": lambda x: defaultdict(list, x=x),
    "user": lambda x: UserDict(x=x),
    "chain": lambda x: ChainMap({"x": x}),
    "proxy": lambda x: MappingProxyType({"x": x}),
    "list": lambda x: [x, 1],
    "tuple": lambda x: (x, None),
    "named": lambda x: Pair(x, "note"),
    "dataclass": Batch,
    "nested": lambda x: UserDict(a=[defaultdict(int, b=MappingProxyType({"c": (x, x)}))]),
}


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_tensors_are_changed_in_containers_of_every_kind(make):
    before = make(torch.ones(2))
    after = map_tensors(before, _low)
    assert type(after) is type(before)
    assert {x.dtype for x in tensors_in(after)} == {torch.bfloat16}
    assert {x.dtype for x in tensors_in(before)} == {torch.float32}
    assert len(list(tensors_in(after))) == len(list(tensors_in(before)))


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_containers_in_which_nothing_changes_stay_the_same_objects(make):
    before = make(torch.ones(2, dtype=torch.int64))
    if not isinstance(before, Batch):  # that has a product with a float
        assert map_tensors(before, _low) is before


def test_what_else_a_container_has_is_kept():
    default = map_tensors(defaultdict(list, x=torch.ones(2)), _low)
    assert default["missing"] == []
    assert map_tensors(_tagged(), _low).tag == "kept"
    batch = map_tensors(Batch(torch.ones(2), 3.0), _low)
    assert (batch.x.tolist(), batch.scaled.tolist()) == ([1.0, 1.0], [3.0, 3.0])


@dataclasses.dataclass
class Unfinished:
    """Has a field that is set later."""

    x: torch.Tensor
    cache: torch.Tensor = dataclasses.field(init=False)


def test_fields_that_are_not_set_stay_unset():
    found = map_tensors(Unfinished(torch.ones(2)), _low)
    assert found.x.dtype == torch.bfloat16
    assert not hasattr(found, "cache")


def test_a_tensor_that_is_passed_twice_stays_one():
    x, whole = torch.ones(2), torch.ones(2, dtype=torch.int64)
    query, named, count = map_tensors((x, {"key": x}, whole), _low)
    assert query is named["key"]
    assert count is whole


def test_mappings_that_cannot_be_assigned_to_stay_as_they_are():
    before = Fixed(torch.ones(2))
    assert map_tensors(before, _low) is before
