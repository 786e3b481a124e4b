"""A parameter server over several hosts: servers are killed, and no push is lost."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

COUNTS = """
import os, sys, time
from functools import partial
from pathlib import Path
import torch
import braid
from braid import ps

here = Path(sys.argv[1])
group = braid.init()
with ps.join(group) as node:
    make = partial(torch.optim.SGD, lr=1.0)
    table = node.dense("count", torch.zeros(100_000), make, ps.Consistency(aggregate="sum"))
    if node.role == "server":
        (here / f"pid{node.number}").write_text(str(os.getpid()))
    if not node.is_worker:
        node.serve()
    else:
        for step in range(60):
            table.push(torch.full([100_000], -1.0))
            assert (table.pull() == step + 1).all(), step
            if step == 20:
                (here / "ready").write_text("")
                while not (here / "done").exists():
                    time.sleep(0.01)
        print("counted", table.pull()[0].item())
"""


def trained(hosts, tmp_path: Path, fault) -> str:
    """Train on hosts a (scheduler), b and c (servers), d (worker); strike once in the middle."""
    script = tmp_path / "train.py"
    script.write_text(COUNTS)

    def strike() -> None:
        deadline_s = time.monotonic() + 60
        while not (tmp_path / "ready").exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        if not (tmp_path / "over").exists():
            fault()
        (tmp_path / "done").write_text("")

    thread = threading.Thread(target=strike)
    thread.start()
    roles = ("--servers", "2", "--workers", "1", "--replicas", "1")
    ranks = ("-H", "a:1,b:1,c:1,d:1", *roles)
    try:
        done = hosts.run(*ranks, str(script), str(tmp_path), cwd=tmp_path)
    finally:
        (tmp_path / "over").write_text("")  # also where the run failed before
        (tmp_path / "ready").write_text("")
        thread.join()
    assert done.code == 0, done.text
    assert "counted 60.0" in done.out
    return done.text


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.proof
def test_a_server_that_is_killed_on_another_host_costs_no_push(lab, tmp_path, number):
    hosts = lab(4)

    def kill() -> None:
        pid = (tmp_path / f"pid{number}").read_text()
        hosts.ip("netns", "exec", hosts.prefix + "bc"[number], "kill", "-9", pid)

    assert "the others go on without it" in trained(hosts, tmp_path, kill)
