"""Ways of training one model on two ranks end with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from program_jobs import run_program

pytestmark = pytest.mark.procs

EXAMPLES = Path(__file__).parents[2] / "examples" / "four_ways"
WAYS = ("by_hand", "placed", "optimizer", "wrapper", "scope")


def test_ways_of_training_one_model_end_with_the_same_bits(procs):
    printed = {way: run_program(procs, 2, EXAMPLES / f"{way}.py") for way in WAYS}
    digests = {way: text.strip() for way, (text, _) in printed.items()}
    assert {len(digest) for digest in digests.values()} == {16}, printed
    assert len(set(digests.values())) == 1, digests
