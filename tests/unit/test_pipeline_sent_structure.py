"""Structures of values between stages travel as plain data, and describe no code."""

import enum
import pickle
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.comm.autograd.nested import flatten, unflatten
from braid.comm.tensors.plain_data import encode
from braid.errors import CommError, ConfigError
from braid.parallel.pipeline import sent_structure as sent
from braid.parallel.pipeline.sent_structure import SentSpec, SentStructure, read_structure


class Point(NamedTuple):
    x: Any
    y: Any


class Color(enum.Enum):
    RED = 1


@dataclass(frozen=True)
class Hidden:
    states: Any
    mask: Any = None
    names: list[str] = field(default_factory=list)


class Bag(dict[str, Any]):
    """A mapping with an attribute, as models' outputs are."""

    note: Any = None


class Features(UserDict[str, Any]):
    pass


class Opened:
    """A class that runs code when an object of it ends."""

    def __del__(self) -> None:
        pass


@dataclass
class OpenedData(Opened):
    x: int = 0


def there_and_back(value: Any) -> Any:
    tree, tensors = flatten(value)
    specs = tuple(map(SentSpec.of, tensors))
    structure = read_structure(SentStructure(tree, specs).as_bytes())
    assert structure.specs == specs
    return unflatten(structure.tree, tensors)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
    | st.binary(max_size=5)
    | st.complex_numbers(allow_nan=False)
    | st.just(Color.RED)
    | st.sampled_from([torch.float16, torch.device("cpu"), torch.Size([2, 0]), slice(1, None)]),
    lambda parts: (
        st.lists(parts, max_size=3)
        | st.lists(parts, max_size=3).map(tuple)
        | st.dictionaries(st.text("ab", max_size=2) | st.integers(), parts, max_size=3)
        | st.builds(Point, parts, parts)
        | st.builds(Hidden, parts, parts)
    ),
    max_leaves=8,
)


@given(PLAIN)
def test_a_structure_comes_back_as_it_was(value: Any) -> None:
    assert there_and_back(value) == value


def test_containers_keep_their_types_entries_and_attributes() -> None:
    x, y = torch.ones(2, 3, requires_grad=True), torch.arange(3)
    bag = Bag(a=x)
    bag.note = "kept"
    factory = defaultdict(list, a=x)
    value = (
        OrderedDict(a=x), bag, factory, MappingProxyType({"a": y}), Features(a=x),
        Hidden(x, names=["n"]), Point([x], {1: y}), torch.ones(2, 2).max(0), {frozenset({1}): x},
    )  # fmt: skip
    got = there_and_back(value)
    assert [type(part) for part in got] == [type(part) for part in value]
    assert got[1].note == "kept"
    assert got[1]["a"] is got[0]["a"] is got[4]["a"] is got[5].states is got[6].x[0] is x
    assert got[2].default_factory is list
    assert (got[5].names, got[6].y[1] is y, got[3]["a"] is y) == (["n"], True, True)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (lambda: 0, "function"),
        (print, "builtin_function"),
        (int, "builtins.type"),
        (OpenedData(), "__del__"),
        (Opened(), "__del__"),
        (defaultdict(lambda: 0), "default_factory"),
        ({torch.ones(1)}, "Tensor"),
        (type("Local", (tuple,), {})(), "top of a module"),
    ],
)
def test_other_objects_are_refused_by_name_where_they_are(value: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=rf"the value\['k'\](\[0\])? for another stage.*{word}"):
        there_and_back({"k": value})


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ConfigError, match="contains itself"):
        SentStructure(loop, ()).as_bytes()


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("code ran",)


CLASS, PLAIN_NODE = sent.CLASS, [sent.PLAIN, 1]
FORGED: list[Any] = [
    [[CLASS, "subprocess", "Popen", sent.ATTRIBUTES, []], []],
    [[CLASS, "os", "_Environ", sent.ATTRIBUTES, []], []],
    [[CLASS, "builtins", "eval", sent.FIELDS, []], []],
    [[CLASS, "antigravity", "x", sent.FIELDS, []], []],
    [[CLASS, __name__, "OpenedData", sent.ATTRIBUTES, []], []],
    [[CLASS, __name__, "Bomb", sent.ATTRIBUTES, []], []],
    [[CLASS, __name__, "Color", sent.MEMBER, "__class__"], []],
    [[CLASS, __name__, "Point", sent.ENTRIES, [], []], []],
    [[CLASS, 3, None, sent.FIELDS, []], []],
    [[sent.PLACE, 0], []],
    [[sent.PLACE, "0"], []],
    [[sent.DTYPE, "load"], []],
    [[99, 0], []],
    [[], []],
    [PLAIN_NODE, [[[-1], "float32", False, True, None]]],
    [PLAIN_NODE, [[[2, 2], "float32", False, True, [0, 0]]]],
    [PLAIN_NODE, [[[2], "load", False, True, None]]],
    7,
]  # fmt: skip


@pytest.mark.parametrize("forged", FORGED, ids=str)
def test_forged_structures_are_refused_and_import_nothing(forged: Any) -> None:
    with pytest.raises(CommError):
        read_structure(encode(forged))


def test_pickles_and_noise_are_refused_and_run_nothing() -> None:
    for raw in (pickle.dumps(Bomb()), b"\x01" + pickle.dumps(Bomb()), b"", b"\x00", b"\x00\xc1"):
        with pytest.raises(CommError):
            read_structure(raw)
