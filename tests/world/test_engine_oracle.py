"""Random models have the same results under every engine and combination as in one process."""

from __future__ import annotations

import pytest

from engine_oracle import BLOCKS, ENGINES, OTHERS, case_of, check

pytestmark = pytest.mark.procs

FAST, ALL, AT_ONCE = 300, 20_000, 25
# a stage without anything to shard; layers that only some ranks use, in several micro-batches
ONCE_WRONG = [2443, 3020]


@pytest.mark.parametrize("first", range(0, FAST, AT_ONCE))
def test_random_models_train_like_one_process_under_every_engine(procs, first):
    found = check(procs, list(range(first, first + AT_ONCE)))
    assert not found, "\n\n".join("\n  ".join(said) for said in found.values())


def test_models_that_once_stopped_ranks_train_like_one_process(procs):
    found = check(procs, ONCE_WRONG, at_once=1)
    assert not found, "\n\n".join("\n  ".join(said) for said in found.values())


@pytest.mark.proof
@pytest.mark.parametrize("first", range(FAST, ALL, 40 * AT_ONCE))
def test_many_random_models_train_like_one_process_under_every_engine(procs, first):
    found = check(procs, list(range(first, min(ALL, first + 40 * AT_ONCE))))
    assert not found, "\n\n".join("\n  ".join(said) for said in found.values())


def test_every_engine_and_block_is_among_the_fast_cases():
    cases = [case_of(seed) for seed in range(FAST)]
    assert {case.engine for case in cases} == set(ENGINES)
    assert {block for case in cases for block in case.blocks} == {*BLOCKS, *OTHERS}
