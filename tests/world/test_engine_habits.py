"""Habits of training programs give the numbers of one process under every engine, or are refused."""

from __future__ import annotations

import pytest

from engine_habits import ENGINES, problems, run_all

pytestmark = pytest.mark.procs


@pytest.mark.parametrize("engine", ENGINES)
def test_a_program_gets_the_numbers_of_one_process_or_an_error(procs, engine):
    ranks = procs(ENGINES[engine].size, run_all, engine)
    found = problems(engine, ranks)
    assert not found, "\n".join(found)
