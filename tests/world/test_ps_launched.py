"""`braid run --servers 3 --workers 2 --replicas 1`: servers that are killed cost nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from braid.cli.commands.roles import Roles
from braid.errors import ConfigError

COUNTS = """
import os, signal, sys, time
from functools import partial
from pathlib import Path
import torch
import braid
import braid.ps.node as node_module
from braid import ps

group = braid.init()
pid = Path(sys.argv[1]) / "pid"
over = Path(sys.argv[1]) / "over"
while "late" in sys.argv and os.environ.get("BRAID_PROCESS") == "5" and not over.exists():
    time.sleep(0.1)
with ps.join(group) as node:
    make = partial(torch.optim.SGD, lr=1.0)
    table = node.dense("count", torch.zeros(1000), make, ps.Consistency(aggregate="sum"))
    if node.role == "server" and node.number == 0:
        pid.write_text(str(os.getpid()))
    if not node.is_worker:
        node.serve()
        if node.role == "scheduler":
            over.touch()
    else:
        first = node.resume()
        if node.number == 1:
            print("begins at", first, flush=True)
        for step in range(first, 40):
            if step == 20 and node.number == 1:
                os.kill(int(pid.read_text()), signal.SIGKILL)
            if step == 30 and node.number == 1 and first == 0 and {"spare", "late"} & {*sys.argv}:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == 30 and "save" in sys.argv:
                if node.number == 0 and first == 0:
                    node_module.write_tables = lambda *args, **more: os.kill(os.getpid(), signal.SIGKILL)
                node.save(sys.argv[1], step)
            table.push(torch.full([1000], -1.0))
            assert (table.pull() == 2 * (step + 1)).all(), step
        print("counted", table.pull()[0].item())
"""


def run(tmp_path: Path, *options: str, last: str = "") -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(COUNTS)
    command = [sys.executable, "-m", "braid", "run", *options, "--log-dir", str(tmp_path / "run")]
    return subprocess.run(
        [*command, str(script), str(tmp_path), last],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.launcher
@pytest.mark.proof
def test_a_new_process_that_comes_after_the_end_ends_well(tmp_path):
    options = ("--servers", "2", "--workers", "2", "--replicas", "1", "--restarts", "2")
    done = run(tmp_path, *options, last="late")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("counted 80.0") == 2


@pytest.mark.launcher
def test_a_killed_server_costs_no_push_and_does_not_fail_the_run(tmp_path):
    done = run(tmp_path, "--servers", "2", "--workers", "2", "--replicas", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("counted 80.0") == 2
    assert "killed by signal 9 (SIGKILL); the others go on without it" in done.stderr


@pytest.mark.launcher
@pytest.mark.proof
def test_without_replicas_a_killed_server_is_the_cause(tmp_path):
    done = run(tmp_path, "--servers", "2", "--workers", "2")
    assert done.returncode == 137, done.stderr
    assert "cause    rank 1 " in done.stderr
    assert "killed by signal 9" in done.stderr


@pytest.mark.launcher
@pytest.mark.proof
def test_a_spare_goes_on_where_a_killed_worker_ended(tmp_path):
    options = ("--servers", "2", "--workers", "2", "--replicas", "1", "--spares", "1")
    done = run(tmp_path, *options, last="spare")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("counted 80.0") == 2
    assert "begins at 0" in done.stdout
    assert "begins at 30" in done.stdout


@pytest.mark.launcher
@pytest.mark.proof
def test_a_worker_that_dies_while_it_saves_keeps_no_other_in_the_barrier(tmp_path):
    done = run(
        tmp_path,
        "--servers",
        "2",
        "--replicas",
        "1",
        "--workers",
        "2",
        "--spares",
        "1",
        last="save",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("counted 80.0") == 2
    assert done.stderr.count("the others go on without it") == 2, done.stderr


@pytest.mark.launcher
def test_new_processes_take_the_roles_of_a_killed_server_and_of_a_killed_worker(tmp_path):
    options = ("--servers", "2", "--workers", "2", "--replicas", "1", "--restarts", "2")
    done = run(tmp_path, *options, last="spare")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("counted 80.0") == 2
    assert "begins at 30" in done.stdout
    assert "rank 5 takes the role of rank 1; restarts left: 1" in done.stderr
    assert "rank 6 takes the role of rank 4; restarts left: 0" in done.stderr


@pytest.mark.launcher
@pytest.mark.proof
def test_a_worker_that_dies_when_no_restart_is_left_is_the_cause(tmp_path):
    options = ("--servers", "2", "--workers", "2", "--replicas", "1", "--restarts", "1")
    done = run(tmp_path, *options, last="spare")
    assert done.returncode == 137, done.stderr
    assert "cause    rank 4 " in done.stderr


def test_restarts_are_for_ranks_that_can_be_replaced():
    roles = Roles(servers=1, workers=2, restarts=2)
    assert roles.expendable == {2, 3}
    assert roles.needed == ({2}, {3})
    assert roles.environ({})["BRAID_ON_WORKER_LOSS"] == "wait"
    assert roles.elastic is not None
    assert roles.elastic.restarts == 2
    assert Roles(servers=1, workers=2).elastic is None
    assert Roles(min_ranks=2).elastic.restarts == 3
    actors = Roles(role=("learner:1", "actor:2"), expendable_role=("actor",), restarts=1)
    assert actors.needed == ()
    assert actors.environ({})["BRAID_RESTARTS"] == "1"
    wrong = [
        (Roles(spares=1), "--spares 1 needs --min-ranks, or --servers and --workers"),
        (Roles(restarts=2), "--restarts 2 needs --min-ranks, --servers or --expendable-role"),
        (Roles(role=("a:2",), restarts=2), "needs --min-ranks, --servers or --expendable-role"),
        (Roles(servers=1, workers=1, spares=1, restarts=2), "combined with --spares 1"),
        (
            Roles(servers=1, workers=1, spares=1, on_worker_loss="shrink", restarts=2),
            "combined with --spares 1, as only",
        ),
        (
            Roles(servers=1, workers=1, on_worker_loss="shrink", restarts=2),
            "cannot be combined with --on-worker-loss shrink",
        ),
        (Roles(servers=1, workers=1, restarts=-1), "restarts must be at least 0, got -1"),
    ]
    for options, text in wrong:
        with pytest.raises(ConfigError, match=text):
            _ = (options.num_ranks(None), options.elastic)


def test_replicas_need_servers():
    with pytest.raises(ConfigError, match="--replicas 2 needs 3 servers, got --servers 2"):
        Roles(servers=2, workers=1, replicas=2).num_ranks(None)
    assert Roles(servers=2, workers=1, replicas=1).expendable == {1, 2}
    assert Roles(servers=2, workers=1, replicas=1).needed == ({1, 2},)
    assert Roles(servers=2, workers=1).expendable == frozenset()
    assert Roles(servers=2, workers=1).needed == ()
    assert Roles(servers=1, workers=2, on_worker_loss="shrink").needed == ({2, 3},)
    assert Roles(servers=1, workers=2, on_worker_loss="wait").needed == ()
    assert Roles(role=("actor:2",), expendable_role=("actor",)).needed == ()
    assert Roles(servers=1, workers=2, spares=1).expendable == {2, 3, 4}
    assert Roles(servers=1, workers=2, spares=1).num_ranks(None) == 5
