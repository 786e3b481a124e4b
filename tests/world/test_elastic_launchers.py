"""Elastic runs on several hosts, on engines and without their launcher lose no step and no bit."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_starts import (
    ELASTIC,
    ELASTIC_JOB,
    MARK,
    digests_in,
    nothing_left,
    undisturbed_digests,
    wait_for_ranks,
)

pytestmark = [pytest.mark.procs, pytest.mark.launcher]
MESH_JOB = str(Path(__file__).with_name("elastic_mesh_job.py"))
HOSTFILE_JOB = str(Path(__file__).with_name("hostfile_job.py"))
FAKES = Path(__file__).parents[1] / "fakes"
LIMIT_S = 240.0
PROOF = pytest.mark.proof
HOSTS = ("-H", "a:2,b:1", "--rsh", "env FAKE_HOST={host}", "--env", f"{MARK},SAVES")
WAYS = {
    "one": ("-n", "1"),
    "here": ("-n", "3"),
    "mesh": ("-n", "4"),
    "ssh": HOSTS,
    "ray": ("--on", "ray", "-n", "3"),
    "slurm": ("--on", "slurm", "-n", "3"),
    "mpi": ("--on", "mpi", "-n", "3", "-H", "a:2,b:1"),
}
RUN = "main(['run', *(word.replace('PID', str(os.getpid())) for word in sys.argv[1:])])"
RUN = f"import os, sys; from braid.cli import main; sys.exit({RUN})"
RUN_WITH_LITTLE_TIME = """
import os, sys
from braid.launch import JobSpec, Supervisor
from braid.launch.process.job import ElasticLimits
command = [word.replace("PID", str(os.getpid())) for word in sys.argv[1:]]
limits = ElasticLimits(min_ranks=1)
Supervisor().run(JobSpec(command=command, num_ranks=2, elastic=limits, interrupt_limit_s=0.5))
"""


@pytest.fixture(autouse=True)
def _engines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[None]:
    """Stand-ins of engines, and a directory for checkpoints; nothing may be left at the end."""
    monkeypatch.setenv("PATH", f"{FAKES / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{FAKES}{os.pathsep}{os.environ['PYTHONPATH']}")
    monkeypatch.setenv("FAKE_SLURM_CPUS", "4")
    monkeypatch.setenv("FAKE_RAY_NODES", "a:2,b:2")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("SAVES", str(tmp_path / "saves"))
    monkeypatch.chdir(tmp_path)
    with nothing_left(request.node.nodeid):
        yield
        wait_for_ranks(request.node.nodeid)


def _logs() -> str:
    return "".join(path.read_text() for path in Path("runs").glob("*/rank*.log"))


def _start(code: str, *words: str) -> tuple[int, str]:
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    return done.returncode, done.stdout + done.stderr


def _train(way: str, *deaths: str, job: str = ELASTIC_JOB) -> tuple[int, set[str], str]:
    code, text = _start(RUN, *WAYS[way], *ELASTIC, job, *deaths)
    return code, digests_in(text), text


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SAVES", "")
        return undisturbed_digests(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(
    ("way", "death", "lost"),
    [
        ("slurm", "2:3:parent", "HostLost: host n2 is gone: its agent"),
        pytest.param("ray", "2:3:parent", "host b is gone: its agent", marks=PROOF),
        pytest.param("mpi", "2:3:parent", "host b is gone: its agent", marks=PROOF),
        pytest.param("slurm", "2:3", "rank 2 on host n2", marks=PROOF),
        pytest.param("ray", "2:3", "rank 2 on host b", marks=PROOF),
        pytest.param("mpi", "2:3", "rank 2 on host b", marks=PROOF),
    ],
)
def test_what_an_engine_loses_costs_no_step_and_no_bit(undisturbed, way, death, lost):
    code, digests, text = _train(way, death)
    assert code == 0, text
    assert lost in text
    assert digests == undisturbed, text


def test_a_rank_joins_in_place_on_a_node_that_ray_gets(monkeypatch, tmp_path):
    nodes = tmp_path / "nodes"
    nodes.write_text("a:1,b:1")
    monkeypatch.setenv("FAKE_RAY_NODES", str(nodes))

    def ends(*words: str) -> tuple[set[str], str]:
        code, text = _start(RUN, "--threads", "1", *words)
        assert code == 0, text
        return set(re.findall(r"(\d \d+ [0-9a-f]+)$", text, re.MULTILINE)), text

    job = (HOSTFILE_JOB, str(nodes), "")
    options = ("--on", "ray", "--min-ranks", "2", "--max-ranks", "3", "--spares", "1")
    grown, text = ends(*options, *job, "3:a:1,b:1,c:4")
    (alone,), _ = ends("-n", "1", "--min-ranks", "1", *job)
    assert grown == {alone.replace("1", "3", 1)}, text
    assert "braid: 2 ranks on a:1,b:1" in text
    assert "braid: host c has joined the run" in text


@pytest.mark.parametrize("way", ["ssh", pytest.param("slurm", marks=PROOF)])
def test_new_ranks_do_not_start_on_a_host_that_was_asked_to_end(undisturbed, way):
    options = ("--min-ranks", "1", "--restarts", "1", "--threads", "1", "--log-dir", "run")
    code, text = _start(RUN, *WAYS[way], *options, ELASTIC_JOB, "2:3:drain")
    assert code == 0, text
    assert digests_in(text) == undisturbed
    lines = Path("run/events/launcher.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    hosts = {event["rank"]: event["host"] for event in events if event["kind"] == "started"}
    assert hosts[3] == hosts[0] != hosts[2]
    assert re.search("rank 2 on host [bn2]+ .* was asked to end, and leaves the run", text), text


@pytest.mark.parametrize("way", [pytest.param("here", marks=PROOF), "ssh"])
def test_ranks_whose_launcher_is_killed_save_their_step(undisturbed, way, request):
    code, digests, text = _train(way, "0:5:kill:PID")
    assert code == -9, text
    assert digests == set()
    wait_for_ranks(request.node.nodeid)
    (saved,) = Path("saves").iterdir()
    assert int(saved.name.removeprefix("step-")) >= 6  # agents notice it a moment later
    code, digests, text = _train("one")
    assert digests == undisturbed, text


@pytest.mark.parametrize(
    "deaths",
    [
        ("0:5:kill:PID", "2:5:parent"),
        pytest.param(("2:5:kill:PID", "0:5:parent"), marks=PROOF),
    ],
)
def test_ranks_that_lose_their_launcher_and_a_host_save_their_step(undisturbed, deaths, request):
    code, digests, text = _train("ssh", *deaths)
    assert code == -9, text
    assert digests == set()
    wait_for_ranks(request.node.nodeid)
    (saved,) = Path("saves").iterdir()  # also no file in which they have met
    assert saved.name == "step-00000005"
    code, digests, text = _train("one")
    assert digests == undisturbed, text


@pytest.mark.proof
def test_a_member_of_the_last_epoch_may_die_too(undisturbed, request):
    code, digests, text = _train("here", "0:5:kill:PID", "2:5", "1:agreed")
    assert (code, digests) == (-9, set()), text
    wait_for_ranks(request.node.nodeid)
    assert [saved.name for saved in Path("saves").iterdir()] == ["step-00000005"], _logs()
    code, digests, text = _train("one")
    assert digests == undisturbed, text


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(12))
def test_seeded_deaths_of_ranks_and_launcher_lose_no_step(undisturbed, seed, request):
    rng = random.Random(seed)
    step, (first, *others) = rng.randrange(1, 14), rng.sample(range(3), 3)
    died = [
        f"{rank}:{step + rng.randrange(2)}{rng.choice(['', ':update'])}"
        for rank in others[: rng.randint(1, 2)]
    ]
    code, digests, text = _train("ssh", f"{first}:{step}:kill:PID", *died)
    assert (code, digests) == (-9, set()), text
    wait_for_ranks(request.node.nodeid)
    assert max(int(saved.name[5:]) for saved in Path("saves").iterdir()) >= step, died
    code, digests, text = _train("one")
    assert digests == undisturbed, text


@pytest.mark.proof
@pytest.mark.parametrize("mesh", [("pp=2,dp=2", "0"), ("dp=4", "3"), ("pp=4", "0")])
def test_parts_of_a_state_are_saved_when_a_rank_dies_with_the_launcher(mesh, monkeypatch, request):
    deaths = "3:5:PID"
    code, digests, text = _train("mesh", *mesh, deaths, job=MESH_JOB)
    assert (code, digests) == (-9, set()), text
    wait_for_ranks(request.node.nodeid)
    (saved,) = Path("saves").iterdir()
    assert saved.name == "step-00000005"
    assert "Error" not in _logs()
    _, resumed, text = _train("one", "dp=1", "0", job=MESH_JOB)
    monkeypatch.setenv("SAVES", "")
    _, alone, _ = _train("one", "dp=1", "0", job=MESH_JOB)
    assert len(alone) == 1
    assert resumed == alone, text


def test_a_rank_that_outlives_its_launcher_too_long_is_killed_with_its_children():
    code, text = _start(RUN_WITH_LITTLE_TIME, ELASTIC_JOB, "0:5:kill:PID", "1:5:stuck")
    assert code == -9, text  # `_engines` sees whether anything is left
    assert not Path("saves").exists()
