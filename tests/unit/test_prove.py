"""Proofs: distances in ulps, tasks of users, and what is shown."""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from braid.cli import main
from braid.errors import ConfigError
from braid.train.prove import Difference, Proof, load_task, ulps_between
from braid.train.prove.compare import difference, difference_of_ranks
from braid.train.prove.show import show

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(floats.filter(lambda value: value < 1e38), st.integers(1, 1000))  # infinity has no next
def test_neighbouring_floats_are_one_ulp_apart(value, steps):
    start = torch.tensor(value, dtype=torch.float32)
    end = start.clone()
    for _ in range(steps):
        end = torch.nextafter(end, torch.tensor(float("inf")))
    assert int(ulps_between(start, end)) == steps


@given(floats, floats)
def test_distances_are_the_same_both_ways_and_nothing_only_between_equal_numbers(a, b):
    x, y = torch.tensor(a), torch.tensor(b)
    assert int(ulps_between(x, y)) == int(ulps_between(y, x))
    assert (int(ulps_between(x, y)) == 0) == (a == b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_ulps_are_those_of_the_dtype(dtype):
    one = torch.ones((), dtype=dtype)
    assert int(ulps_between(one, one + torch.finfo(dtype).eps)) == 1


def test_nan_is_far_from_numbers_and_equal_to_itself():
    nan = torch.tensor(float("nan"))
    assert int(ulps_between(nan, nan)) == 0
    assert int(ulps_between(nan, torch.tensor(1.0))) == torch.iinfo(torch.int64).max


def test_the_worst_number_is_named():
    expected = torch.zeros(2, 3)
    found = expected.clone()
    found[0, 1], found[1, 2] = 1e-45, 1.0
    where = difference("head.weight", found, expected)
    assert where == Difference("head.weight", (1, 2), "1.0", "0.0", 0x3F800000, 2, 6)
    assert difference("head.weight", expected, -expected) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "does not exist: name a Python file"),
        ("def model(): ...", "defines no loss:"),
        ("x = 1", "defines no model and no loss:"),
        ("1 / 0", "raised ZeroDivisionError while it was imported: division by zero"),
    ],
)
def test_a_task_that_cannot_be_read_is_told_once(tmp_path, capsys, text, words):
    file = tmp_path / "task.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_task(file)
    assert main(["prove", str(file)]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_numbers_that_make_no_sense_are_refused(capsys):
    assert main(["prove", "task.py", "-n", "0", "--steps", "0"]) == 2
    assert "--num-ranks 0 and --steps 0" in capsys.readouterr().err


def test_a_difference_is_shown_with_step_parameter_and_distance():
    where = Difference("a.weight", (0,), "1.5", "1.25", 7, 2, 9)
    others = tuple(f"p{number}" for number in range(7))
    out = io.StringIO()
    show(
        Proof(2, 1, 8, 99, 1, where, others, (("0.5", "0.5"),)),
        Console(file=out, width=200),
    )
    text = out.getvalue()
    assert "after step 1: a.weight[0] is 1.5 in the parallel run and 1.25 in one process" in text
    assert "7 ulps apart; 2 of its 9 numbers differ" in text
    assert "p4 and 2 more" in text


def test_imaginary_parts_and_opposite_signs_count():
    a, b = torch.tensor([1 + 1j, 2 + 0j]), torch.tensor([1 + 2j, 2 + 0j])
    assert difference("w", a, b).differing == 1
    far = difference("w", torch.tensor([2.0, 1.0]).double(), torch.tensor([-2.0, 1.0]).double())
    assert (far.place, far.ulps) == ((0,), torch.iinfo(torch.int64).max)


def test_the_rank_that_differs_from_most_is_named():
    rows = [torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0])]
    where = difference_of_ranks("w", rows, (4, 5, 6))
    assert where == Difference("w", (1,), "3.0", "2.0", 1 << 22, 1, 2, ranks=(5,), usual=4)
    assert str(where).startswith("w[1] is 3.0 on rank 5 and 2.0 on rank 4, 4,194,304 ulps apart;")
    assert difference_of_ranks("w", [rows[0], rows[2]], (0, 1)) is None
    rows[0] = torch.tensor([1.5, 2.0])
    assert difference_of_ranks("w", rows, (0, 1, 2)).ranks == (1, 2)


def test_ranks_that_drifted_are_told_what_keeps_them_equal():
    where = Difference("a", (0,), "1.5", "1.25", 7, 2, 9, ranks=(2, 1))
    out = io.StringIO()
    show(Proof(3, 1, 8, 99, 1, where, (), (("0.5", "0.5"),)), Console(file=out, width=200))
    text = out.getvalue()
    assert "a[0] is 1.5 on rank 2 and 1.25 on rank 0, 7 ulps apart" in text
    assert "rank 1 also has other numbers" in text
    assert "wrap() returns must average all gradients" in text
