"""1-6-9 and 0-6-10 against all their 65,536 codes."""

from __future__ import annotations

import bisect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.comm.formats import from_0_6_10, from_1_6_9, to_0_6_10, to_1_6_9
from braid.errors import ConfigError

ALL_CODES = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
both = pytest.mark.parametrize(
    ("there", "back", "mantissa"),
    [(to_1_6_9, from_1_6_9, 9), (to_0_6_10, from_0_6_10, 10)],
    ids=["1-6-9", "0-6-10"],
)


def value(code: int, mantissa: int) -> float:
    """What the table in the module says, for a code without sign."""
    exponent, fraction = divmod(code, 1 << mantissa)
    if exponent == 63:
        return math.nan if fraction else math.inf
    if exponent == 0:
        return fraction * 2.0 ** (-30 - mantissa)
    return (1 + fraction / (1 << mantissa)) * 2.0 ** (exponent - 31)


FINITE = {m: [value(code, m) for code in range(63 << m)] for m in (9, 10)}  # ascending


def nearest(x: float, mantissa: int) -> int:
    """The code without sign of `x` >= 0, by search: ties to even, infinity from half a step above the largest."""
    table = FINITE[mantissa]
    above = bisect.bisect_left(table, x)
    if above == len(table):
        beyond = table[-1] + (table[-1] - table[-2]) / 2
        return above if x >= beyond else above - 1
    if above == 0 or table[above] == x:
        return above
    to_low, to_high = x - table[above - 1], table[above] - x
    if to_low == to_high:
        return above - 1 if above % 2 else above
    return above if to_high < to_low else above - 1


@both
def test_codes_mean_what_the_table_says(there, back, mantissa):
    codes = range(64 << mantissa)
    expected = torch.tensor([value(code, mantissa) for code in codes])
    torch.testing.assert_close(
        back(ALL_CODES[: len(codes)]), expected, rtol=0, atol=0, equal_nan=True
    )


def test_the_upper_half_of_1_6_9_is_negative():
    assert torch.equal(
        from_1_6_9(ALL_CODES[32768:]).view(torch.int32),
        (-from_1_6_9(ALL_CODES[:32768])).view(torch.int32),
    )


@both
def test_every_code_but_the_many_of_nan_comes_back(there, back, mantissa):
    numbers = back(ALL_CODES)
    again = there(numbers)
    valid = ~numbers.isnan()
    assert torch.equal(again[valid], ALL_CODES[valid])
    assert back(again)[~valid].isnan().all()


MAGNITUDES = (
    st.floats(0, 2.0**33, width=32)
    | st.floats(0, 2.0**-28, width=32)
    | st.floats(0, 2.0**-39, width=32)
    | st.integers(0, (63 << 10) - 1).map(lambda code: value(code, 10))  # half ways of 1-6-9
    | st.integers(0, (63 << 11) - 1).map(lambda code: value(code, 11))  # half ways of 0-6-10
    | st.floats(0, torch.finfo(torch.float32).max, width=32)
)


@both
@given(values=st.lists(MAGNITUDES, max_size=30))
def test_numbers_become_the_nearest_and_ties_the_even_one(there, back, mantissa, values):
    assert (there(torch.tensor(values)).int() & 0xFFFF).tolist() == [
        nearest(x, mantissa) for x in values
    ]


@given(values=st.lists(MAGNITUDES, max_size=30))
def test_negative_numbers_differ_in_the_sign_only(values):
    x = torch.tensor(values)
    assert torch.equal(to_1_6_9(-x).int() & 0xFFFF, (to_1_6_9(x).int() & 0xFFFF) | 0x8000)


@both
@given(values=st.lists(MAGNITUDES.filter(lambda x: x <= 4.29e9), max_size=30))
def test_the_error_keeps_its_bound(there, back, mantissa, values):
    x = torch.tensor(values)
    error = (back(there(x)).double() - x.double()).abs()
    assert (error <= 2.0 ** -(mantissa + 1) * x.double() + 2.0 ** (-31 - mantissa)).all()


@both
def test_infinity_and_nan_are_kept_and_what_is_too_large_becomes_infinity(there, back, mantissa):
    x = torch.tensor([torch.inf, torch.nan, 2.0**32, 4.29e9])
    found = back(there(x))
    assert found.isinf().tolist() == [True, False, True, False]
    assert found.isnan().tolist() == [False, True, False, False]


@both
def test_shapes_are_kept_and_strides_are_not(there, back, mantissa):
    x = torch.arange(12.0).view(3, 4).T
    codes = there(x)
    assert (codes.shape, codes.is_contiguous()) == ((4, 3), True)
    assert torch.equal(back(codes), x)
    assert there(torch.empty(0, 3)).shape == (0, 3)
    assert float(back(there(torch.tensor(1.5)))) == 1.5


def test_more_numbers_than_are_worked_on_at_a_time_come_out_in_order():
    x = torch.arange(200_000) % 500 * 1.0
    assert torch.equal(from_1_6_9(to_1_6_9(x)), x)


def test_negative_numbers_are_refused_where_there_is_no_sign():
    with pytest.raises(ConfigError, match=r"found 2 of 4 below, the first -2\.0: use 1-6-9"):
        to_0_6_10(torch.tensor([1.0, -2.0, -0.0, -torch.inf]))


def test_minus_zero_is_zero_where_there_is_no_sign():
    assert to_0_6_10(torch.tensor([-0.0])).tolist() == [0]


def test_other_dtypes_are_refused():
    for convert, wrong in (
        (to_1_6_9, torch.zeros(2, dtype=torch.float64)),
        (to_0_6_10, torch.zeros(2, dtype=torch.float16)),
        (from_1_6_9, torch.zeros(2)),
        (from_0_6_10, torch.zeros(2, dtype=torch.int32)),
    ):
        with pytest.raises(ConfigError, match=f"found {wrong.dtype}"):
            convert(wrong)
