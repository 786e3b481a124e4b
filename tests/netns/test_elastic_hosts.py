"""A training over several hosts goes on when a rank or a host is lost, with the same bits."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from netlab import done

JOB = str(Path(__file__).parents[1] / "world" / "elastic_job.py")
ROWS = "runs/*/metrics/rank1.jsonl"
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


def _wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 100
    while not is_so() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert is_so()


@pytest.mark.parametrize("kind", ["killed", pytest.param("cut off", marks=pytest.mark.proof)])
def test_the_launchers_host_dies_and_no_step_is_lost(lab, tmp_path, kind):
    hosts = lab(2)
    saves = tmp_path / "saves"
    alone = hosts.run("-H", "a:1", *OPTIONS, JOB, cwd=tmp_path)
    death = "0:5:host" if kind == "killed" else "0:5:stuck"
    options = ("-H", "a:1,b:2", "--rsh", hosts.rsh, "--env", "SAVES", *OPTIONS)
    with hosts.braid("a", *options, JOB, death, cwd=tmp_path, SAVES=str(saves)) as launcher:
        try:
            if kind == "cut off":
                _wait_until(lambda: any('"step":5' in p.read_text() for p in tmp_path.glob(ROWS)))
                hosts.cut("a")  # but for the pipes of the agents
            _wait_until((saves / "step-00000005").exists)
        finally:
            launcher.kill()
    _wait_until(lambda: not hosts.processes("b"))
    assert [path.name for path in saves.iterdir()] == ["step-00000005"]
    again = done(hosts.braid("b", "-n", "1", *OPTIONS, JOB, cwd=tmp_path, SAVES=str(saves)))
    assert _digests(again.out) == _digests(alone.out), again.text
