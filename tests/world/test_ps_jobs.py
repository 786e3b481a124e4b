"""Jobs on real data: word vectors and hashed features, on a parameter server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from example_runs import run_example

pytestmark = [pytest.mark.launcher, pytest.mark.proof]


def run(example: str, servers: int, tmp_path: Path) -> str:
    roles = ("--servers", str(servers), "--workers", "2")
    return run_example(example, tmp_path / f"{servers}", *roles, timeout_s=280)


def test_word_vectors_know_pairs_and_are_the_same_with_1_and_3_servers(tmp_path):
    said = [run("ps_word_vectors.py", servers, tmp_path) for servers in (1, 3)]
    results = [set(re.findall(r"score (0\.9\d+) .*, ([0-9a-f]{12})", each)) for each in said]
    assert results[0] == results[1]
    assert len(results[0]) == 1, "both workers have the same vectors"


def test_hashed_features_tell_prose_from_python_with_few_weights(tmp_path):
    said = run("ps_hashed_features.py", 2, tmp_path)
    assert len(re.findall(r"9\d\.\d% right; of [\d,]+ weights 9\d% are 0", said)) == 2
