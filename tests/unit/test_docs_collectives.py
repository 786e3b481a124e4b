"""The pages about collectives are what the programs say."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from braid.programs.cost import form
from braid.programs.cost.forms import grid
from braid.programs.schedule.collective import ALGORITHMS

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import pages

A, B, C, L = 3e-6, 1e-9, 2e-10, 1e6


@pytest.mark.parametrize("name", pages.SUBJECTS)
def test_page_and_picture_are_current(name):
    written = [(pages.PAGES / f"{name}.{end}").read_text() for end in ("md", "svg")]
    assert written == [pages.page(name), pages.picture(name)]


def test_what_groups_choose_is_told_as_they_choose_it():
    assert (pages.PAGES / "chosen.md").read_text() == pages.chosen()


def test_every_algorithm_has_a_page():
    assert (pages.PAGES / "README.md").read_text() == pages.contents()
    told = {(name, op) for name, subject in pages.SUBJECTS.items() for op in subject.formulas}
    assert told == set(ALGORITHMS)


@pytest.mark.parametrize("p", [2, 4, 16, 64])
@pytest.mark.parametrize("name", pages.SUBJECTS)
def test_formulas_are_those_that_the_simulator_confirms(name, p):
    row = max(2, math.isqrt(p)) if name in {"torus", "hierarchical"} else 0
    for operation, text in pages.SUBJECTS[name].formulas.items():
        names = {"a": A, "b": B, "c": C, "l": L, "p": p, "lg": p.bit_length() - 1, "r": row}
        told = grid(p, L, row) if name == "hierarchical" else form(name, operation, p, L)
        assert eval(text, {}, names) == pytest.approx(told.seconds(A, B, C))
