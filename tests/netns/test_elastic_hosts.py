"""A training over several hosts goes on when a rank or a host is lost, with the same bits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from netlab import Done, Lab, done

JOB = str(Path(__file__).parents[1] / "world" / "elastic_job.py")
HOSTFILE_JOB = str(Path(__file__).parents[1] / "world" / "hostfile_job.py")
MESH_JOB = str(Path(__file__).parents[1] / "world" / "elastic_mesh_job.py")
ROWS = "runs/*/metrics/rank1.jsonl"
OPTIONS = ("--threads", "1", "--min-ranks", "1")


def _digests(text: str) -> set[str]:
    return {line.split()[-1] for line in text.splitlines() if " 16 " in f" {line} "}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Digest of the state after a training of one rank."""
    command = [sys.executable, "-m", "braid", "run", "-n", "1", *OPTIONS, JOB]
    found = done(
        subprocess.Popen(
            command,
            cwd=tmp_path_factory.mktemp("alone"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    )
    digests = _digests(found.out)
    assert len(digests) == 1, found.text
    return digests


@pytest.mark.parametrize(
    ("death", "lost"),
    [
        pytest.param("2:3", "rank 2 on host b", marks=pytest.mark.proof),
        ("2:3:parent", "host b is gone"),
    ],
    ids=["rank", "host"],
)
def test_what_is_killed_costs_no_step_and_no_bit(lab, tmp_path, undisturbed, death, lost):
    hosts = lab(2)
    found = hosts.run("-H", "a:2,b:1", *OPTIONS, JOB, death, cwd=tmp_path)
    assert lost in found.text
    assert _digests(found.out) == undisturbed, found.text


def test_a_host_with_all_replicas_of_a_stage_is_killed(lab, tmp_path):
    """The other host has copies of the stage."""
    hosts = lab(2)
    options = ("--threads", "1", "--min-ranks", "2", "--restarts", "0", MESH_JOB)
    found = hosts.run("-H", "a:2,b:2", *options, "pp=2,dp=2", "0", "2:3", "3:3", cwd=tmp_path)
    assert found.code == 0, found.text
    assert re.search("epoch .: ranks 0, 1 go on at step 3", found.text), found.text
    alone = [sys.executable, "-m", "braid", "run", "-n", "1", *OPTIONS, MESH_JOB, "dp=1", "0"]
    last = subprocess.run(alone, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"\b12 [0-9a-f]{64}", found.out)) == {last.strip()}


def test_a_spare_that_cannot_reach_its_launcher_costs_no_step_and_no_bit(
    lab, tmp_path, undisturbed
):
    hosts = lab(2)
    options = ("-H", "a:2,b:1", "--spares", "1", "--restarts", "0", *OPTIONS)
    found = hosts.run(*options, JOB, "3:cut:600", "2:3", cwd=tmp_path)
    assert found.code == 0, found.text
    assert "epoch 1: ranks 0, 1 go on" in found.text
    assert _digests(found.out) == undisturbed, found.text


def _wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 100
    while not is_so() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert is_so()


@pytest.mark.parametrize("kind", ["killed", pytest.param("cut off", marks=pytest.mark.proof)])
def test_the_launchers_host_dies_and_no_step_is_lost(lab, tmp_path, undisturbed, kind):
    hosts = lab(2)
    saves = tmp_path / "saves"
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
    assert _digests(again.out) == undisturbed, again.text


HOROVOD_JOB = str(Path(JOB).with_name("horovod_elastic_job.py"))
FAKE_SSH = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift 2; done
host=$1; shift
exec {rsh} sh -c "$*"
"""


def _horovodrun(hosts: Lab, tmp_path: Path, names: Path, *words: str, most: int = 3) -> Done:
    """`horovodrun` on host a, with `names` as the list of hosts, to its end."""
    (tmp_path / "ssh").write_text(FAKE_SSH.format(rsh=hosts.rsh.replace("{host}", "$host")))
    (tmp_path / "discover.sh").write_text(f"#!/bin/sh\ncat {names}\n")
    for name in ("ssh", "discover.sh"):
        (tmp_path / name).chmod(0o700)
    command = (sys.executable, "-m", "braid.compat.horovod.run", "-np", str(most))
    command += (
        "--min-np",
        "1",
        "--max-np",
        str(most),
        "--host-discovery-script",
        str(tmp_path / "discover.sh"),
    )
    command += (sys.executable, HOROVOD_JOB, str(tmp_path / "out"), *words)
    path = f"{tmp_path}:{os.environ['PATH']}"
    return done(hosts.popen("a", *command, cwd=tmp_path, PATH=path))


@pytest.mark.parametrize(
    ("death", "lost"),
    [
        ("2:3", "rank 2 on host b"),
        pytest.param("2:3:host", "host b is gone", marks=pytest.mark.proof),
    ],
    ids=["rank", "host"],
)
def test_horovodrun_leaves_the_host_of_a_death_for_one_that_comes_later(lab, tmp_path, death, lost):
    hosts, names = lab(3), tmp_path / "names"
    names.write_text("a:1\nb:2\n")
    found = _horovodrun(hosts, tmp_path, names, death, "wait", f"grow:{names}=a:1,b:2,c:2")
    assert found.code == 0, found.text
    for text in (lost, "host b is blocked for the rest of the run", "host c has joined the run"):
        assert text in found.text
    results = {path.suffix: torch.load(path) for path in tmp_path.glob("out.*")}
    assert results.keys() == {".0", ".3", ".4"}
    assert all(result["same"] for result in results.values())
    assert {result["place"] for result in results.values()} == {(0, 3), (1, 3), (2, 3)}
    assert not hosts.processes("b")


def test_horovodrun_moves_with_its_state_to_hosts_that_come_later(lab, tmp_path):
    hosts, names = lab(3), tmp_path / "names"
    names.write_text("b:1\n")
    found = _horovodrun(hosts, tmp_path, names, "wait", f"grow:{names}=c:3")
    assert found.code == 0, found.text
    for text in ("host c has joined the run", "host b has left the run"):
        assert text in found.text
    results = {path.suffix: torch.load(path) for path in tmp_path.glob("out.*")}
    assert results.keys() == {".1", ".2", ".3"}
    assert all(result["same"] for result in results.values())


def test_horovodrun_moves_its_only_process_to_a_host_that_comes_later(lab, tmp_path):
    hosts, names = lab(3), tmp_path / "names"
    names.write_text("b:1\n")
    found = _horovodrun(hosts, tmp_path, names, "move", f"grow:{names}=c:1", most=1)
    assert found.code == 0, found.text
    for text in ("host c has joined the run", "host b has left the run"):
        assert text in found.text
    assert [path.suffix for path in tmp_path.glob("out.*")] == [".1"]
    assert torch.load(tmp_path / "out.1")["place"] == (0, 1)


def test_a_run_moves_to_hosts_that_its_file_gains(lab, tmp_path):
    hosts, names = lab(3), tmp_path / "names"
    names.write_text("b slots=1\n")
    job = (*OPTIONS, HOSTFILE_JOB, str(names), "")
    changes = ("3:b slots=1\nc slots=2", "2:c slots=2")
    found = hosts.run("--hostfile", str(names), "--max-ranks", "3", *job, *changes, cwd=tmp_path)
    assert found.code == 0, found.text
    for text in ("host c has joined the run", "host b has left the run"):
        assert text in found.text
    ends = {line.split("] ")[-1] for line in found.out.splitlines()}
    alone = [sys.executable, "-m", "braid", "run", "-n", "1", *job]
    last = subprocess.run(alone, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert ends == {last.strip().replace("1", "2", 1)}


def _separate(hosts: Lab, first: str, second: str) -> None:
    """Make two hosts unreachable for each other only."""
    for here, there in ((first, second), (second, first)):
        address = f"10.77.0.{1 + hosts.names.index(there)}"
        subprocess.run(hosts.on(here, ("ip", "route", "add", "unreachable", address)), check=True)


def test_horovodrun_begins_without_a_host_that_does_not_reach_another(lab, tmp_path):
    hosts, names = lab(3), tmp_path / "names"
    _separate(hosts, "b", "c")
    names.write_text("a:1\nb:1\nc:1\n")
    found = _horovodrun(hosts, tmp_path, names)
    assert found.code == 0, found.text
    assert "host c has no connection with b; the run begins without this host" in found.text
    results = [torch.load(path) for path in tmp_path.glob("out.*")]
    assert sorted(result["place"] for result in results) == [(0, 2), (1, 2)]


@pytest.mark.proof
def test_horovodrun_names_a_late_host_that_does_not_reach_another(lab, tmp_path):
    hosts, names = lab(4), tmp_path / "names"
    _separate(hosts, "b", "c")
    names.write_text("a:1\nb:1\n")
    found = _horovodrun(hosts, tmp_path, names, "wait", f"grow:{names}=a:1,b:1,c:1,d:1")
    assert found.code == 0, found.text
    text = "host c cannot reach b at 10.77.0.2 (no route); the run goes on without host c"
    assert text in found.text
    results = [torch.load(path) for path in tmp_path.glob("out.*")]
    assert sorted(result["place"] for result in results) == [(0, 3), (1, 3), (2, 3)]
    groups = sorted(result["group"] for result in results)
    assert [rank for rank, _ in groups] == [0, 1, 2]
    assert all(rank < size for rank, size in groups)
