"""Claims of launchers, wherever they start ranks: each claim on this host, by a remote shell, on Ray, Slurm and MPI.

Engines are stand-ins here (tests/fakes), with the variables and the words of the real ones; `make proof` has the real
ones (tests/world/test_launch_real_engines.py).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from engine_starts import ENGINES, MARK, nothing_left, on_engine, run

from braid.cli import main
from braid.errors import ConfigError
from braid.launch import Hosts, JobSpec, Outcome, QuietConsole, Supervisor, parse_hosts
from braid.launch.cluster.several_hosts import HostsSupervisor
from support.launch_conformance import CLAIMS, NUM_RANKS
from support.leaks import no_leaks

pytestmark = [pytest.mark.procs, pytest.mark.launcher]
FAKES = Path(__file__).parents[1] / "fakes"
LIMIT_S = 30.0


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for all engines: two nodes of two processors each."""
    monkeypatch.setenv("PATH", f"{FAKES / 'bin'}{os.pathsep}{os.environ['PATH']}")
    paths = filter(None, (str(FAKES), os.environ.get("PYTHONPATH", "")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("FAKE_SLURM_CPUS", "4")
    monkeypatch.setenv("FAKE_RAY_NODES", "a:2,b:2")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def here(job: JobSpec, console: QuietConsole) -> Outcome:
    return Supervisor(console).run(job)


def by_shell(job: JobSpec, console: QuietConsole) -> Outcome:
    where = Hosts(hosts=parse_hosts("a:2,b:1"), rsh="env FAKE_HOST={host}", environ=(MARK,))
    return HostsSupervisor(console).run(job, where)


STARTS = {"local": here, "ssh": by_shell, **{engine: on_engine(engine) for engine in ENGINES}}


@pytest.fixture(name="nothing_left")
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    with nothing_left(request.node.nodeid):
        yield


# in the fast tests, an engine shows what depends on how it starts, signals and reports; all of it in `make proof`
FAST = {
    "local": set(CLAIMS),
    "ssh": {"ranks_know_their_places", "a_killed_rank_is_named"},
    "ray": {"ranks_know_their_places", "an_exception_is_named", "a_signal_ends_all_ranks"},
    "slurm": {"ranks_know_their_places", "a_signal_ends_all_ranks"},
    "mpi": {"ranks_know_their_places", "a_killed_rank_is_named"},
}
CASES = [
    pytest.param(launcher, claim, marks=[] if claim in FAST[launcher] else [pytest.mark.proof])
    for launcher in STARTS
    for claim in CLAIMS
]


@pytest.mark.parametrize(("launcher", "claim"), CASES)
@pytest.mark.usefixtures("engines", "nothing_left")
def test_every_launcher_keeps_each_claim(launcher: str, claim: str, tmp_path: Path) -> None:
    CLAIMS[claim](STARTS[launcher], tmp_path)


@pytest.mark.usefixtures("engines", "nothing_left")
def test_jobs_of_several_engines_run_at_the_same_time(tmp_path: Path) -> None:
    program = ("-m", "support.launched", "places")
    jobs = [run("--on", e, "-n", "2", "--log-dir", e, *program, cwd=tmp_path) for e in ENGINES]
    done = [job.communicate(timeout=LIMIT_S) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0, 0], done
    assert all("[rank 1] line 1999 of rank 1" in out for out, _ in done)


@pytest.mark.usefixtures("engines", "nothing_left")
def test_ranks_end_when_ray_takes_their_node_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draining = tmp_path / "draining"
    draining.write_text("")
    monkeypatch.setenv("FAKE_RAY_DRAINING", str(draining))
    job = run("--on", "ray", "-n", "3", "-m", "support.launched", "wait", cwd=tmp_path)
    assert job.stdout is not None
    waiting: set[str] = set()
    while len(waiting) < 3:
        waiting.add(job.stdout.readline())
    *_, agent = [
        process
        for process in psutil.Process(job.pid).children(recursive=True)
        if process.cmdline()[-1:] == ["braid.launch.engines.joined_agent"]
    ]
    actor = agent.parent()
    assert actor is not None
    draining.write_text(str(actor.pid))
    _, text = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 143, text
    assert re.search("SIGTERM received on host [ab], passing it on to all ranks", text), text


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ("ray", "lost its Ray actor"),
        ("slurm", "was ended by Slurm: Killed"),
        pytest.param("mpi", "mpirun, exit code 137", marks=pytest.mark.proof),
    ],
)
@pytest.mark.usefixtures("engines", "nothing_left")
def test_a_killed_agent_is_named_with_the_reason_of_its_engine(
    engine: str, reason: str, tmp_path: Path
) -> None:
    program = ("-m", "support.launched", "wait")
    job = run("--on", engine, "-n", "3", "--grace", "0.2", *program, cwd=tmp_path)
    assert job.stdout is not None
    waiting: set[str] = set()
    while len(waiting) < 3:
        waiting.add(job.stdout.readline())
    (victim,) = [
        process
        for process in psutil.Process(job.pid).children(recursive=True)
        if process.cmdline()[-1:] == ["braid.launch.engines.joined_agent"]
    ][-1:]
    # an actor's process is the agent's parent; Slurm and MPI start agents themselves
    victim = victim.parent() if engine == "ray" else victim
    begin_s = time.monotonic()
    victim.send_signal(signal.SIGKILL)
    _, text = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 1
    assert "HostLost" in text
    assert reason in text
    assert "affected" in text or engine == "mpi"  # whose only host is gone
    assert time.monotonic() - begin_s < LIMIT_S


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--on", "nope"], "--on must be one of ray, slurm, mpi, got 'nope'"),
        (
            ["--on", "ray", "-n", "9"],
            "resources for 4 ranks of CPU=1, but the job needs 9: free are a CPU=2",
        ),
        (
            ["--on", "slurm", "-n", "9"],
            "node configuration is not available. Ask for less. Free are n1 2 of 2",
        ),
        (["--on", "ray", "-n", "0"], "-n must be at least 1, got 0"),
        (["--on", "ray", "-H", "a:2"], "--on ray chooses the nodes itself: leave -H"),
        (["--on", "ray", "--nnodes", "2"], "--on ray starts braid on all nodes: leave --nnodes"),
        (["--engine-options", "--time=1"], "'--time=1' needs an engine"),
        (["--on", "slurm", "--engine-options", "'"], "cannot be split into words"),
        (["--on", "ray", "--engine-options", "--strategy=heap"], "must be one of pack, spread"),
        (["--on", "ray", "--engine-options", "--resources GPU=x"], "must be such as CPU=2,GPU=1"),
        (["--on", "ray", "--engine-options", "--gpu 1"], "has no option --gpu: it has --address"),
        (["--on", "mpi", "-H", "a:0"], "slots of a must be a number from 1"),
        (["--on", "ray", "--stdin", "0"], "--stdin 0 needs a job on this host"),
    ],
)
@pytest.mark.usefixtures("engines")
def test_mistakes_are_named_before_anything_starts(
    words: list[str], problem: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "job.py"
    script.write_text("")
    assert main(["run", *words, str(script)]) == 2
    assert problem in capfd.readouterr().err


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        ("ray", "no Ray cluster runs here: start one with `ray start --head`"),
        ("slurm", "Slurm is not installed here: no salloc on PATH"),
        ("mpi", "MPI is not installed here: neither mpirun nor mpiexec is on PATH"),
    ],
)
def test_an_engine_that_is_not_here_is_named(
    engine: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("PYTHONPATH", str(FAKES))
    monkeypatch.delenv("FAKE_RAY_NODES", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    job = JobSpec(command=("support.launched", "places"), kind="module", num_ranks=NUM_RANKS)
    with pytest.raises(ConfigError, match=problem), no_leaks():
        on_engine(engine)(job, QuietConsole())


@pytest.fixture
def first_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Makes a shell script that is found instead of a program."""

    def make(name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return make


@pytest.mark.usefixtures("engines", "nothing_left")
def test_a_node_that_cannot_start_braid_is_named(first_on_path) -> None:
    first_on_path(
        "srun",
        "#!/bin/sh\ncase $1 in --test-only) exit 0;; esac\n"
        "echo 'python: No module named braid' >&2\nexit 1\n",
    )
    job = JobSpec(command=("support.launched", "places"), kind="module", num_ranks=NUM_RANKS)
    with pytest.raises(ConfigError, match="host n1 has no agent: python: No module named braid"):
        on_engine("slurm")(job, QuietConsole())


@pytest.mark.usefixtures("engines", "nothing_left")
def test_a_node_without_an_agent_is_named_with_the_reason_of_its_engine(first_on_path) -> None:
    begin = '#!/bin/sh\ncase "$*" in *"--host b"*) exit 7;; esac\n'
    first_on_path("mpirun", f'{begin}exec {FAKES}/bin/mpirun "$@"\n')
    job = JobSpec(command=("support.launched", "places"), kind="module", num_ranks=2)
    with pytest.raises(ConfigError, match=r"host b has no agent: ended with .*mpirun, exit code 7"):
        on_engine("mpi", ("--hosts=a:1,b:1",))(job, QuietConsole())


@pytest.mark.usefixtures("engines", "nothing_left")
def test_nodes_that_do_not_come_are_waited_for_so_long_only(first_on_path) -> None:
    first_on_path(
        "salloc",
        "#!/bin/sh\necho 'salloc: job 8 queued and waiting for resources' >&2\nexec sleep 60\n",
    )
    job = JobSpec(command=("support.launched", "places"), kind="module", num_ranks=NUM_RANKS)
    with pytest.raises(ConfigError, match="no nodes within 1 s: salloc: job 8 queued"):
        on_engine("slurm", start_limit_s=1.0)(job, QuietConsole())


@pytest.mark.usefixtures("engines", "nothing_left")
def test_a_signal_ends_the_wait_for_nodes(tmp_path: Path, first_on_path) -> None:
    first_on_path("salloc", "#!/bin/sh\ntouch waits\nexec sleep 60\n")
    job = run("--on", "slurm", "-n", "2", "-m", "support.launched", "places", cwd=tmp_path)
    deadline_s = time.monotonic() + LIMIT_S
    while not (tmp_path / "waits").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    _, text = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 2
    assert "SIGTERM received before slurm gave nodes" in text


@pytest.mark.usefixtures("engines", "nothing_left")
def test_what_an_engine_has_started_ends_with_the_launcher(first_on_path) -> None:
    first_on_path(
        "mpirun",
        '#!/bin/sh\ncase "$*" in *--version*) echo "Open MPI";; *-np*) sleep 60;; '
        '*) echo "@ here 2";; esac\n',
    )
    job = JobSpec(command=("support.launched", "places"), kind="module", num_ranks=2)
    with pytest.raises(ConfigError, match="did not join within 1 s"):
        on_engine("mpi", start_limit_s=1.0)(job, QuietConsole())


SURVIVING = """
import os, signal, sys, torch, braid
group = braid.init()
group.all_reduce(torch.ones(1))
if group.rank == int(sys.argv[2]):
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("shard-7 is missing")
for _ in range(10**6):
    group.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize(
    ("how", "rank", "cause"),
    [
        ("kill", "1", "RankLost: died; mpirun may say how"),
        pytest.param("raise", "1", "ValueError: shard-7 is missing", marks=pytest.mark.proof),
        pytest.param("kill", "0", "RankLost: died; mpirun may say how", marks=pytest.mark.proof),
        pytest.param("raise", "0", "ValueError: shard-7 is missing", marks=pytest.mark.proof),
    ],
)
@pytest.mark.usefixtures("engines", "nothing_left")
def test_survivors_without_a_launcher_print_one_block(
    how: str, rank: str, cause: str, tmp_path: Path
) -> None:
    script = tmp_path / "job.py"
    script.write_text(SURVIVING)
    command = ["mpirun", "-np", "3", sys.executable, str(script), how, rank]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=2 * LIMIT_S)
    assert done.returncode != 0
    assert done.stderr.count("braid: run stopped") == 1, done.stderr
    block = done.stderr[done.stderr.index("braid: run stopped") :]
    assert f"cause    rank {rank}" in block
    assert cause in block
    others = [str(other) for other in range(3) if str(other) != rank]
    if (how, rank) != ("kill", "0"):  # whose store is gone, so that each survivor knows itself
        assert f"ranks {','.join(others)} were waiting in all_reduce" in block
    assert done.stderr.count("Traceback") == (how == "raise")
