"""Four ways of training one model on two ranks end with the same bits."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.launcher]

EXAMPLES = Path(__file__).parents[2] / "examples" / "four_ways"
WAYS = ("by_hand", "placed", "optimizer", "wrapper")


def test_four_ways_of_training_one_model_end_with_the_same_bits(tmp_path):
    digests = {}
    for way in WAYS:
        told = ["run", "-n", "2", "--log-dir", str(tmp_path / way), str(EXAMPLES / f"{way}.py")]
        command = [sys.executable, "-m", "braid", *told]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        (digests[way],) = re.findall(r"^\[rank 0\] ([0-9a-f]{16})$", done.stdout, re.MULTILINE)
    assert len(set(digests.values())) == 1, digests
