"""Plain data comes back as it was; what is not plain is refused with its type and place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.comm.tensors.plain_data import MAX_DEPTH, decode, encode
from braid.errors import ConfigError

KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.binary()
PLAIN = st.recursive(
    KEYS | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.sets(KEYS)
        | st.frozensets(KEYS)
        | st.dictionaries(KEYS, inner)
    ),
    max_leaves=20,
)


def described(obj: object) -> object:
    """With types, which == does not tell apart: True is 1, and 1 is 1.0."""
    if isinstance(obj, dict):
        return dict, [(described(k), described(v)) for k, v in obj.items()]
    if isinstance(obj, set | frozenset):
        return type(obj), {described(item) for item in obj}
    if isinstance(obj, list | tuple):
        return type(obj), [described(item) for item in obj]
    return type(obj), obj


@given(PLAIN)
def test_plain_data_comes_back_with_all_its_types(obj):
    assert described(decode(encode(obj))) == described(obj)


def test_integers_have_no_limit():
    assert [decode(encode(n)) for n in (1 << 20_000, -(1 << 64))] == [1 << 20_000, -(1 << 64)]


def cyclic(kind):
    inner: list[object] = []
    inner.append([inner] if kind is list else {"again": inner})
    return {"model": inner}


def nested(depth):
    obj: list[object] = []
    for _ in range(depth - 1):
        obj = [obj]
    return obj


@pytest.mark.parametrize(
    ("obj", "found"),
    [
        ({"model": [1, complex(1, 2)]}, "complex at ['model'][1] is not"),
        (cyclic(list), "a list that contains itself at ['model'][0][0] is not"),
        (cyclic(dict), "a list that contains itself at ['model'][0]['again'] is not"),
        (
            ["a\ud800"],
            "a str with a lone surrogate ('\\ud800', character 1) at [0] is not",
        ),
        (
            {"x": {"\udcff": 1}},
            "a str with a lone surrogate ('\\udcff', character 0) at ['x'] key is not",
        ),
        (nested(MAX_DEPTH + 1), f"more than {MAX_DEPTH} nested containers is not"),
    ],
)
def test_what_cannot_travel_is_named_with_its_place(obj, found):
    with pytest.raises(ConfigError) as error:
        encode(obj)
    assert str(error.value).startswith(found)
    assert "pass allow_pickle=True on all ranks" in str(error.value)


def test_what_is_held_twice_is_no_cycle():
    shared = [1]
    assert decode(encode([shared, (shared, shared)])) == [[1], ([1], [1])]
    assert decode(encode(nested(MAX_DEPTH))) == nested(MAX_DEPTH)


@pytest.mark.parametrize("obj", ["\ud800", 1 + 2j])
def test_with_the_switch_everything_that_can_be_pickled_travels(obj):
    assert decode(encode(obj, allow_pickle=True), allow_pickle=True) == obj
    with pytest.raises(ConfigError, match="sent a pickled object"):
        decode(encode(obj, allow_pickle=True))


class Unmade:
    def __reduce__(self):
        return (int, ("no number",))


def test_what_cannot_be_pickled_or_made_again_is_named():
    with pytest.raises(ConfigError, match=r"function cannot be pickled \("):
        encode(lambda: None, allow_pickle=True)
    with pytest.raises(ConfigError, match=r"loaded here \(ValueError: "):
        decode(encode(Unmade(), allow_pickle=True), allow_pickle=True)
