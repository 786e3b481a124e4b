"""The tiers of tests: samples by pairs, and entries that name tests."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tiers import ALL, TEST, TIERS, covering_sample, tier_of

TESTS = Path(__file__).parents[1]


def _pairs(rows):
    return {pair for row in rows for pair in combinations(row.items(), 2)}


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4))
def test_a_sample_has_every_pair_of_values(num_values):
    rows = [dict(enumerate(values)) for values in product(*map(range, num_values))]
    assert _pairs([rows[index] for index in covering_sample(rows, 2)]) == _pairs(rows)


def test_a_sample_of_a_product_is_small():
    rows = [dict(enumerate(values)) for values in product(range(4), repeat=4)]
    assert len(covering_sample(rows, 2)) < len(rows) / 8


def test_a_sample_has_every_value():
    rows = [{"size": size, "mode": mode} for size in (1, 2, 3) for mode in "ab"]
    assert covering_sample(rows, 1) == {1, 2, 5}
    assert covering_sample([{"size": 1}, {"size": 2}, {"size": 1}], 2) == {1, 2}


def test_a_test_without_parameters_is_its_sample():
    assert covering_sample([{}], 2) == {0}


def test_the_longest_beginning_that_fits_decides():
    assert tier_of("gpu/test_gpu_copies.py::test_a", starts_launchers=False) == ALL
    assert tier_of("unit/test_tiers.py::test_a", starts_launchers=False) == TEST
    assert tier_of("world/test_demo.py::test_a", starts_launchers=True) == ALL


def test_every_entry_names_tests_that_exist():
    sources = {
        path.relative_to(TESTS).as_posix(): path.read_text() for path in TESTS.rglob("test_*.py")
    }
    for beginning in TIERS:
        path, _, name = beginning.partition("::")
        assert any(
            file.startswith(path) and (not name or f"def {name.partition('[')[0]}" in text)
            for file, text in sources.items()
        ), beginning
