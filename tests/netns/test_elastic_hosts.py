"""A training over several hosts goes on when a rank or a host is lost, with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

JOB = str(Path(__file__).parents[1] / "world" / "elastic_job.py")
OPTIONS = ("--threads", "1", "--min-ranks", "1")


def _digests(text: str) -> set[str]:
    return {line.split()[-1] for line in text.splitlines() if " 16 " in f" {line} "}


@pytest.mark.parametrize(
    ("death", "lost"),
    [("2:3", "rank 2 on host b"), ("2:3:parent", "host b is gone")],
    ids=["rank", "host"],
)
def test_what_is_killed_costs_no_step_and_no_bit(lab, tmp_path, death, lost):
    hosts = lab(2)
    alone = hosts.run("-H", "a:1", *OPTIONS, JOB, cwd=tmp_path)
    found = hosts.run("-H", "a:2,b:1", *OPTIONS, JOB, death, cwd=tmp_path)
    assert lost in found.text
    assert len(_digests(alone.out)) == 1, alone.text
    assert _digests(found.out) == _digests(alone.out), found.text
