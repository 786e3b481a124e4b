"""Ways of training one model on two ranks end with the same bits, those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from program_jobs import run_program

pytestmark = pytest.mark.procs

EXAMPLES = Path(__file__).parents[2] / "examples" / "four_ways"
WAYS = {"alone": 1} | dict.fromkeys(
    ("by_hand", "placed", "optimizer", "wrapper", "scope", "call"), 2
)


def test_ways_of_training_one_model_end_with_the_same_bits(procs):
    printed = {way: run_program(procs, n, EXAMPLES / f"{way}.py") for way, n in WAYS.items()}
    digests = {way: texts[0].strip() for way, texts in printed.items()}
    assert {len(digest) for digest in digests.values()} == {16}, printed
    assert len(set(digests.values())) == 1, digests
