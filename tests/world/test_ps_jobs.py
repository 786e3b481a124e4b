"""Jobs on real data: word vectors and hashed features, on a parameter server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [pytest.mark.launcher, pytest.mark.proof]


def run(example: str, servers: int, tmp_path: Path) -> str:
    roles = ["--servers", str(servers), "--workers", "2"]
    command = [
        sys.executable,
        "-m",
        "braid",
        "run",
        *roles,
        "--log-dir",
        str(tmp_path / f"{servers}"),
    ]
    done = subprocess.run(
        [*command, str(EXAMPLES / example)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_word_vectors_know_pairs_and_are_the_same_with_1_and_3_servers(tmp_path):
    said = [run("ps_word_vectors.py", servers, tmp_path) for servers in (1, 3)]
    results = [set(re.findall(r"score (0\.9\d+) .*, ([0-9a-f]{12})", each)) for each in said]
    assert results[0] == results[1]
    assert len(results[0]) == 1, "both workers have the same vectors"


def test_hashed_features_tell_prose_from_python_with_few_weights(tmp_path):
    said = run("ps_hashed_features.py", 2, tmp_path)
    assert len(re.findall(r"9\d\.\d% right; of [\d,]+ weights 9\d% are 0", said)) == 2
