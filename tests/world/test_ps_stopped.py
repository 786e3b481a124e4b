"""A worker that is stopped for longer than the limit of silence: removed, told, and left out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.launcher

STOPS = """
import os, select, signal, sys
from dataclasses import replace
from functools import partial
from pathlib import Path
import torch
import braid
from braid import ps
from braid.ps import rendezvous

rendezvous.VAN = replace(rendezvous.VAN, heartbeat_s=0.2, lost_after_s=1.0)
rule, folder = sys.argv[1], Path(sys.argv[2])
staleness = {"bsp": 0, "quorum": 0, "ssp": 1, "asynchronous": float("inf")}[rule]
quorum = 1 if rule == "quorum" else None
consistency = ps.Consistency(staleness=staleness, quorum=quorum, late="apply", aggregate="sum")

def stop_myself():
    (folder / "pid").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)

group = braid.init()
with ps.join(group) as node:
    table = node.dense("w", torch.zeros(4), partial(torch.optim.SGD, lr=1.0), consistency)
    if not node.is_worker:
        node.serve()
        sys.exit()
    first = node.resume()
    is_first = not (folder / "pid").exists()
    office = node.postoffice
    life = office.directory.lives[0]
    if first == 0:
        node.barrier("begin")
    accepted = first
    for step in range(first, 6):
        if step == 2 and node.number == 0 and is_first:
            stop_myself()
        if step == 3 and node.number == 1:  # once the other one is removed, or has a successor
            office.wait_until(lambda: office.directory.lives.get(0) not in {life, None}
                              if sys.argv[3] == "replace" else 0 not in office.directory.workers)
            if sys.argv[4] == "early":
                os.kill(int((folder / "pid").read_text()), signal.SIGCONT)
        grad = torch.zeros(4)
        grad[node.number] = -1
        table.wait(table.push(grad))
        accepted += 1
    node.barrier("end")
    print("counted", node.number, accepted, table.pull().tolist(), flush=True)
if node.number == 1 and sys.argv[4] == "late":
    os.kill(int((folder / "pid").read_text()), signal.SIGCONT)
"""


def run(tmp_path: Path, rule: str, policy: str, when: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(STOPS)
    how = ["--spares", "1"] if policy == "replace" else ["--on-worker-loss", policy]
    command = [sys.executable, "-m", "braid", "run", "--servers", "1", "--workers", "2", *how]
    command += ["--log-dir", str(tmp_path / "run"), str(script), rule, str(tmp_path), policy, when]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


FAST = [("bsp", "shrink", "early")]
CASES = [
    pytest.param(*case, marks=[] if case in FAST else pytest.mark.proof)
    for rule in ("bsp", "ssp", "quorum", "asynchronous")
    for policy in ("shrink", "replace")
    for when in ("early", "late")
    for case in [(rule, policy, when)]
]


@pytest.mark.parametrize(("rule", "policy", "when"), CASES)
def test_a_worker_that_comes_back_learns_that_it_was_removed(tmp_path, rule, policy, when):
    done = run(tmp_path, rule, policy, when)
    assert done.returncode == 0, done.stderr
    assert re.search(
        "StaleError: worker.0 (was removed from the run|is left behind).*(go|goes) on without",
        done.stderr,
    ), done.stderr
    counted = dict(re.findall(r"counted (\d) \d (\[.*\])", done.stdout))
    assert sorted(counted) == (["0", "1"] if policy == "replace" else ["1"]), done.stdout
    values = [6.0, 6.0] if policy == "replace" else [2.0, 6.0]
    assert counted["1"] == str([*values, 0.0, 0.0])
