"""Values of remote calls: what is packed is unpacked, and bytes of a peer construct nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from braid.errors import CommError
from braid.rpc.codec import Codec
from braid.rpc.names import Names
from braid.rpc.outcomes import RpcError

ALLOWED = [__name__, "test_rpc_codec"]
BUILT: list[str] = []  # constructors that ran


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    place: Any
    label: str = ""


@dataclasses.dataclass
class Sample:
    inputs: Any
    point: Point
    total: Any = dataclasses.field(init=False)
    scale: dataclasses.InitVar[int] = 1

    def __post_init__(self, scale: int) -> None:
        BUILT.append("Sample")
        self.total = scale

    @functools.cached_property
    def doubled(self) -> Any:
        return self.total * 2

    def __reduce__(self) -> Any:
        msg = "no pickle on any wire"
        raise AssertionError(msg)


@dataclasses.dataclass
class Unset:
    later: int = dataclasses.field(init=False)


@dataclasses.dataclass
class Keyed(dict):
    key: int = 0


@dataclasses.dataclass
class Extra:
    place: int


def hook(*_: object) -> None:
    """Do nothing."""


class Way(enum.Flag):
    LEFT = 1
    UP = 2


class Access(enum.IntFlag):
    READ = 1
    WRITE = 4
    RUN = 8
    ALL = 13


class Both(enum.Flag):
    LEFT_AND_UP = 3
    DOWN = 4


class Plain:
    def __init__(self) -> None:
        BUILT.append("Plain")


def codec_of(**options: bool) -> Codec:
    """Return a codec that has no references, and no devices but the CPU."""

    def nothing(*_: Any) -> None:
        return None

    return Codec(Names(ALLOWED), nothing, nothing, nothing, lambda *_: "", **options)


def round_trip(value: Any) -> Any:
    packed = codec_of().pack(value, 0)
    return codec_of().unpack(packed.data, packed.tensors, "w0")


NUMBERS = st.one_of(
    arrays.boolean_dtypes(),
    arrays.integer_dtypes(endianness="?"),
    arrays.unsigned_integer_dtypes(endianness="?"),
    arrays.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    arrays.complex_number_dtypes(endianness="?"),
    st.just(np.dtype(np.longdouble)),
)
ARRAYS = NUMBERS.flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0, max_side=4))
)


@st.composite
def views(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Return an array that may be transposed, reversed, broadcast or read-only."""
    array = draw(ARRAYS)
    changes = st.sampled_from(
        [
            lambda a: a,
            lambda a: a.T,
            lambda a: a[::-1] if a.ndim else a,
            lambda a: a[..., ::2] if a.ndim else a,
            lambda a: np.broadcast_to(a, (2, *a.shape)),
        ]
    )
    array = draw(changes)(draw(changes)(array)).view()
    array.flags.writeable = array.flags.writeable and draw(st.booleans())
    return array


def assert_same(value: np.ndarray[Any, Any], back: Any) -> None:
    assert type(back) is np.ndarray
    assert (back.dtype, back.shape, back.tobytes()) == (value.dtype, value.shape, value.tobytes())
    assert back.flags.writeable
    assert back.flags.c_contiguous


@given(views())
def test_arrays_of_numbers_keep_their_bits(array):
    assert_same(array, round_trip(array))


@given(NUMBERS.filter(lambda dtype: dtype.isnative), st.integers(0, 1))
def test_scalars_of_numpy_keep_their_type(dtype, number):
    value = dtype.type(number)
    back = round_trip([value])[0]
    assert (type(back), back) == (type(value), value)


@given(views(), st.text(), st.integers(0, 3))
def test_dataclasses_arrive_with_their_fields_and_no_constructor_runs(array, label, depth):
    point = Point(array, label)
    for _ in range(depth):
        point = Point(point, label)
    sample = Sample([torch.ones(2), array], point, scale=5)
    assert sample.doubled == 10
    BUILT.clear()
    back = round_trip({"sample": sample})["sample"]
    assert BUILT == []
    assert type(back) is Sample
    assert back.inputs[0].tolist() == [1, 1]
    assert (back.total, back.doubled) == (5, 10)
    assert_same(array, back.inputs[1])
    place = back.point
    for _ in range(depth):
        assert (type(place), place.label) == (Point, label)
        place = place.place
    assert_same(array, place.place)


def test_combinations_of_flags_arrive():
    access = (Access(0), Access.READ, Access.READ | Access.WRITE, Access.ALL)
    for flags in (Way.LEFT, Way.LEFT | Way.UP, Way(0), Both(0), *access):
        assert round_trip(flags) is flags


def test_a_stranger_adds_no_flags_that_an_enum_keeps_for_ever():
    kept = [dict(kind._value2member_map_) for kind in (Access, Way, Both)]
    numbers = {"Access": (2, 16, -1), "Way": (4,), "Both": (1, 2, 5, 6, 8)}
    for kind, number in ((kind, one) for kind, several in numbers.items() for one in several):
        data = msgspec.msgpack.encode(ext(17, [f"{__name__}:{kind}", number]))
        with pytest.raises(RpcError, match=rf"{kind} of this node has no member {number}: use"):
            codec_of().unpack(data, [], "stranger")
    assert [kind._value2member_map_ for kind in (Access, Way, Both)] == kept
    with pytest.raises(RpcError, match=r"Access\(6\) is not a union of members and cannot be sent"):
        codec_of().pack(Access(6), 0)


def test_no_other_flags_than_those_sent_arrive():
    """Python 3.11.0 to 3.11.3 has no Both(7): it calls it DOWN."""
    several, zero = (msgspec.msgpack.encode(ext(17, [f"{__name__}:Both", n])) for n in (7, False))
    with contextlib.suppress(*[RpcError] * (sys.version_info < (3, 11, 4))):
        assert codec_of().unpack(several, [], "stranger").value == 7
    assert type(codec_of().unpack(zero, [], "stranger").value) is int


def test_fields_that_are_not_set_are_not_set_at_the_receiver():
    assert not hasattr(round_trip(Unset()), "later")


def test_values_that_would_lose_a_part_are_refused_by_name():
    @dataclasses.dataclass
    class Local:
        a: int

    extra = Sample(1, Point(2))
    extra.cache = 3
    refused = [
        (np.array([None]), r"numpy dtype object, which cannot be sent: send numbers, or a list"),
        (np.array(["a"]), "numpy dtype <U1"),
        (np.zeros(2, [("a", int)]), "numpy dtype"),
        (np.datetime64("2020-01-01"), r"numpy dtype datetime64\[D\]"),
        (np.ma.array([1]), "is a numpy.ma.MaskedArray, which cannot be sent"),
        (extra, "with 'cache', which is not a field and would be lost"),
        (Keyed(1), "a dataclass that is also a dict and cannot be sent"),
        (Plain(), "Plain, which cannot be sent: pass plain data, tensors, numpy arrays"),
        (Local(1), "Local' cannot be called by name"),
    ]
    for value, text in refused:
        with pytest.raises(RpcError, match=text):
            codec_of().pack([value], 0)


def test_pickle_carries_the_parts_that_would_be_lost():
    codec = codec_of(allow_pickle=True)
    point, linear = Extra(1), torch.nn.Linear(1, 1)
    point.cache = 3
    linear.register_forward_hook(hook)
    packed = codec.pack([point, np.array([None, "a"]), linear, np.arange(3), Point(2)], 0)
    back = codec.unpack(packed.data, packed.tensors, "w0")
    assert (back[0].place, back[0].cache) == (1, 3)
    assert back[1].tolist() == [None, "a"]
    assert list(back[2]._forward_hooks.values()) == [hook]
    assert (back[3].tolist(), back[4]) == ([0, 1, 2], Point(2))
    with pytest.raises(CommError, match="sent a pickle, which this node refuses"):
        codec_of().unpack(packed.data, packed.tensors, "w0")


def test_other_fields_at_the_receiver_are_an_error():
    packed = codec_of().pack(Point(1), 0).data
    for renamed in (packed.replace(b"place", b"plate"), packed.replace(b"label", b"babel")):
        with pytest.raises(RpcError, match="use the same version of the module on both nodes"):
            codec_of().unpack(renamed, [], "w0")


# -- strangers


def ext(code: int, value: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(value))


PLAIN = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.floats()),
        *(st.text(max_size=5), st.binary(max_size=5)),
        st.sampled_from(
            [
                *("torch:add", "torch:load", "builtins:eval", "os:system", "float32", "|O", "<f8"),
                *(f"{__name__}:{name}" for name in ("Plain", "Point", "Sample", "Keyed", "BUILT")),
                *("torch.nn.modules.linear:Linear", "weight", "__class__", "strided", "nn"),
            ]
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=5), inner, max_size=3),
        st.builds(ext, st.integers(0, 30), inner),
        st.builds(ext, st.integers(0, 30), st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=12,
)
TENSORS = [torch.zeros(8, dtype=torch.uint8), torch.ones(2, 2), torch.tensor(3)]


def opened(data: bytes) -> Any:
    """Unpack bytes of a stranger; None if they are refused with a documented error."""
    try:
        return codec_of().unpack(data, TENSORS, "stranger")
    except (CommError, RpcError):
        return None


@given(st.one_of(PLAIN.map(msgspec.msgpack.encode), st.binary(max_size=40)))
def test_bytes_of_a_stranger_raise_only_documented_errors_and_run_no_constructor(data):
    BUILT.clear()
    opened(data)
    assert BUILT == []


@given(st.data())
def test_changed_bytes_raise_only_documented_errors(data):
    value = [Sample(np.arange(3), Point(np.float32(2), "x")), {1: {2}}, (torch.ones(1), slice(1))]
    packed = bytearray(codec_of().pack(value, 0).data)
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    opened(bytes(packed))


def test_a_stranger_constructs_no_other_class_and_allocates_no_memory():
    plain = f"{__name__}:Plain"
    state = {"label": 1, "place": 2}
    attempts = [
        ext(15, [plain, state]),
        ext(15, ["os:_Environ", state]),
        ext(15, [plain, {"__class__": 1}]),
        ext(15, [f"{__name__}:Point", {"__class__": ext(14, plain), **state}]),
        ext(15, [f"{__name__}:Extra", {"more": 1, "place": 2}]),
        ext(16, [plain, [1]]),
        ext(16, ["builtins:tuple", [1]]),
        ext(17, [plain, "RED"]),
        ext(19, 1 << 20),
        ext(20, [plain, []]),
        ext(21, [0, "|O", [1]]),
        ext(21, [0, "<f8", [1 << 40]]),
        ext(21, [1, "<f4", [2, 2]]),
        ext(22, ["|O", b"12345678"]),
        ext(22, ["<f8", b"1234"]),
        ext(99, [b"cos\nsystem\n(S'true'\ntR.", []]),
    ]
    BUILT.clear()
    for attempt in attempts:
        with pytest.raises((CommError, RpcError)):
            codec_of().unpack(msgspec.msgpack.encode(attempt), TENSORS, "stranger")
    deep: Any = 1
    for _ in range(200):
        deep = ext(1, [deep])
    opened(msgspec.msgpack.encode(deep))
    assert BUILT == []
