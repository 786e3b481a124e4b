"""The claims of `test_launch_engines.py` on the real engines: Ray, Slurm, Open MPI, each skipped where it is not installed.

Slurm is two nodes of this machine (two slurmd by name, no cgroups); Ray is two raylets; mpirun starts on this machine.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import ray_functions
from engine_starts import (
    ELASTIC,
    ELASTIC_JOB,
    ENGINES,
    MARK,
    agents_of,
    digests_in,
    nothing_left,
    on_engine,
    run,
    undisturbed_digests,
    wait_for_ranks,
)

from braid.errors import PeerLostError
from braid.launch import ElasticLimits, ray
from braid.launch.engines.slurm_script import BatchScript
from support.launch_conformance import CLAIMS

pytestmark = [pytest.mark.procs, pytest.mark.launcher, pytest.mark.proof]
LIMIT_S = 60.0
HOSTFILE_JOB = str(Path(__file__).with_name("hostfile_job.py"))
NODES, CPUS = ("n1", "n2"), 8
DAEMONS = ("munged", "slurmctld", "slurmd")
WORDS = {"slurm": ("--nodes=2",), "ray": ("--strategy=spread",), "mpi": ()}
# the first of two nodes gets two of three ranks
WORDS_OF_THREE = {
    "slurm": ("--engine-options", "--nodes=2"),
    "ray": ("--engine-options", "--strategy=spread"),
    "mpi": ("-H", f"localhost:2,{socket.gethostname()}:1"),
}
NODE_FAILURE = "scontrol update nodename=n2 state=down reason=test"
DRAIN = (
    r"node=$(tr '\0' '\n' < /proc/$RAY_RAYLET_PID/cmdline | sed -n 's/^--node_id=//p'); "
    f"{sys.executable} -m ray.scripts.scripts drain-node --address $RAY_ADDRESS --node-id $node "
    "--reason DRAIN_NODE_REASON_PREEMPTION --reason-message preempted "
    "--deadline-remaining-seconds 60"
)
CONFIG = """\
ClusterName=braid
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={place}/munge/socket
CredType=cred/munge
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool.%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.%n.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=2
InactiveLimit=0
KillWait=5
MinJobAge=300
JobRequeue=1
PropagateResourceLimits=NONE
"""


Train = Callable[..., tuple[int, set[str], str]]


class Missing(Exception):
    """An engine is not installed."""


CLUSTER = """\
import subprocess, sys
from ray.cluster_utils import Cluster
cluster = Cluster()
for num_cpus in (3, 2):  # the head first: it gets the first ranks
    cluster.add_node(num_cpus=num_cpus)
print(cluster.address, flush=True)
for line in sys.stdin:  # a number of processors for a new node, or how Ray loses that node
    if line.strip().isdecimal():
        node = cluster.add_node(num_cpus=int(line))
    elif line == "kill\\n":
        cluster.remove_node(node)
    else:
        words = "-m ray.scripts.scripts drain-node --reason DRAIN_NODE_REASON_PREEMPTION"
        words += f" --address {cluster.address} --node-id {node.node_id}"
        words += " --reason-message preempted --deadline-remaining-seconds 60"
        subprocess.run([sys.executable, *words.split()], check=True)
cluster.shutdown()
"""


@contextmanager
def slurm(place: Path) -> Iterator[str]:
    """Start a Slurm; gives its configuration file."""
    missing = [name for name in DAEMONS if not shutil.which(name, path="/usr/sbin:/usr/bin")]
    if missing or os.geteuid() != 0:
        msg = f"needs root and Slurm (slurm-wlm, munge): {', '.join(missing) or 'no root'}"
        raise Missing(msg)
    for parent in (place, *place.parents):  # munge's user passes through
        if parent != Path("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o011)
        else:
            break
    munge = place / "munge"
    munge.mkdir(mode=0o755)
    (place / "state").mkdir()
    (munge / "key").write_bytes(os.urandom(1024))
    (munge / "key").chmod(0o400)
    for path in (munge, munge / "key"):
        shutil.chown(path, "munge", "munge")
    config = place / "slurm.conf"
    lines = [CONFIG.format(place=place)]
    for number, name in enumerate(NODES, 1):
        (place / f"spool.{name}").mkdir()
        lines.append(
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={17000 + number} "
            f"CPUs={CPUS} RealMemory=4000 State=UNKNOWN\n"
        )
    lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n")
    config.write_text("".join(lines))
    environ = {**os.environ, "SLURM_CONF": str(config)}
    as_munge = ["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups"]
    names = ("socket", "pid-file", "log-file", "seed-file")
    files = [f"--{name}={munge / name.partition('-')[0]}" for name in names]
    subprocess.run(
        [*as_munge, "/usr/sbin/munged", f"--key-file={munge / 'key'}", *files, "--force"],
        check=True,
    )
    subprocess.run(["/usr/sbin/slurmctld", "-c", "-i"], env=environ, check=True)
    for name in NODES:
        subprocess.run(["/usr/sbin/slurmd", "-N", name], env=environ, check=True)
    try:
        deadline_s = time.monotonic() + LIMIT_S
        while _output("sinfo", "-h", "-N", "-t", "idle", "-o", "%N", **environ).split() != [*NODES]:
            assert time.monotonic() < deadline_s, "Slurm's nodes do not come up"
            time.sleep(0.1)
        yield str(config)
    finally:
        subprocess.run(["scancel", "-u", "root"], env=environ, check=False)
        for file in (*place.glob("slurm*.pid"), munge / "pid"):
            _end(int(file.read_text()))


@contextmanager
def ray_cluster(place: Path) -> Iterator[str]:
    """Start a Ray cluster of two nodes; gives its address. Lines to the file `nodes` change it."""
    if find_spec("ray") is None:
        msg = "needs Ray: pip install 'braid-train[ray]'"
        raise Missing(msg)
    environ = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    cluster = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        cwd=place,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert cluster.stdin is not None
    assert cluster.stdout is not None
    (place / "nodes").symlink_to(f"/proc/{os.getpid()}/fd/{cluster.stdin.fileno()}")
    with cluster:
        yield cluster.stdout.readline().strip()
        cluster.stdin.close()
        cluster.wait(LIMIT_S)


def _output(*words: str, **environ: str) -> str:
    return subprocess.run(words, env=environ, capture_output=True, text=True, check=False).stdout


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)
    deadline_s = time.monotonic() + 10.0
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)


@contextmanager
def mpi(place: Path) -> Iterator[str]:
    """Find mpirun, which needs nothing to run."""
    if shutil.which("mpirun") is None:
        msg = "needs MPI: apt-get install openmpi-bin"
        raise Missing(msg)
    yield str(place)


STARTS = {"slurm": ("SLURM_CONF", slurm), "ray": ("RAY_ADDRESS", ray_cluster), "mpi": ("", mpi)}


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Value of each engine's variable; the reason why it is not here begins with `needs`."""
    found = {}
    with ExitStack() as stack:
        for name, (_, start) in STARTS.items():
            try:
                found[name] = stack.enter_context(start(tmp_path_factory.mktemp(name)))
            except Missing as exc:
                found[name] = str(exc)
        yield found


@pytest.fixture
def engine(
    request: pytest.FixtureRequest, clusters: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> str:
    """The name of an engine that is up."""
    name: str = request.param
    if clusters[name].startswith("needs"):
        pytest.skip(clusters[name])
    if variable := STARTS[name][0]:
        monkeypatch.setenv(variable, clusters[name])
    return name


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
@pytest.mark.parametrize("claim", CLAIMS)
def test_a_real_engine_keeps_each_claim(
    engine: str, claim: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with nothing_left(request.node.nodeid):
        CLAIMS[claim](on_engine(engine, WORDS[engine]), tmp_path)


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_a_killed_agent_is_named_within_a_second(
    engine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    options = " ".join(WORDS[engine])
    words = ["--engine-options", options] if options else []
    program = ("-m", "support.launched", "wait")
    mark = request.node.nodeid
    with nothing_left(mark):
        words += ["--env", MARK, "-n", "3", "--grace", "0.2"]
        job = run("--on", engine, *words, *program, cwd=tmp_path)
        assert job.stdout is not None
        waiting: set[str] = set()
        while len(waiting) < 3:
            waiting.add(job.stdout.readline())
        agents = agents_of(mark)
        victim = agents[-1].parent() if engine == "ray" else agents[-1]
        assert victim is not None
        victim.send_signal(signal.SIGKILL)
        _, text = job.communicate(timeout=LIMIT_S)
        assert job.returncode == 1
        # Open MPI takes two seconds to end, and survivors do not wait for its reason
        reasons = {
            "ray": "lost its Ray actor",
            "slurm": "was ended by Slurm",
            "mpi": "has closed the connection",
        }
        assert "HostLost" in text
        assert reasons[engine] in text
    assert psutil.wait_procs(agents, timeout=5.0)[1] == []


@pytest.mark.parametrize("engine", ["slurm", "mpi"], indirect=True)
def test_a_program_that_the_engine_starts_directly_finds_its_rank(
    engine: str, tmp_path: Path
) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import os, torch, braid\ngroup = braid.init()\n"
        "x = group.all_reduce(torch.tensor([1.0 + group.rank]))\n"
        "line = f\"{group.rank} {group.size} {os.environ['LOCAL_RANK']} {x.item()}\\n\"\n"
        "os.write(1, line.encode())  # as a whole: engines do not keep lines together\n"
    )
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    starts = {
        "slurm": ["srun", "-N", "2", "-n", "3", "--ntasks-per-node=2"],
        "mpi": ["mpirun", "--oversubscribe", "-np", "3"],
    }
    done = subprocess.run(
        [*starts[engine], sys.executable, str(script)],
        env={**os.environ, **as_root},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    locals_ = {"slurm": ["0", "1", "0"], "mpi": ["0", "1", "2"]}[engine]
    assert lines == [f"{rank} 3 {locals_[rank]} 6.0" for rank in range(3)]


@pytest.mark.parametrize("engine", ["slurm"], indirect=True)
def test_more_than_slurm_has_is_refused_at_once(engine: str, tmp_path: Path) -> None:
    begin_s = time.monotonic()
    job = run("--on", engine, "-n", "400", "-m", "support.launched", "places", cwd=tmp_path)
    _, text = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 2
    assert "Requested node configuration is not available. Ask for less. Free are n1 8 of 8" in text
    assert time.monotonic() - begin_s < LIMIT_S / 4


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    return undisturbed_digests(tmp_path_factory.mktemp("alone"))


@pytest.fixture
def train(
    engine: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Train:
    """`train("2:3:notified", "kill -TERM $1")`: three ranks on two nodes, and a fault.

    The lines are a program that a rank runs with the process id of its agent. Gives the exit code,
    digests and messages.
    """
    monkeypatch.setenv("SAVES", str(tmp_path / "saves"))
    options = ("--on", engine, *WORDS_OF_THREE[engine], "-n", "3", "--env", f"{MARK},SAVES")

    def start(fault: str = "", *lines: str) -> tuple[int, set[str], str]:
        fault += f":{_script(tmp_path, *lines)}" if lines else ""
        with nothing_left(request.node.nodeid):
            job = run(*options, *ELASTIC, ELASTIC_JOB, fault, cwd=tmp_path)
            (tmp_path / "launcher").write_text(f"{job.pid}")
            out, text = job.communicate(timeout=LIMIT_S)
            wait_for_ranks(request.node.nodeid)
        return job.returncode, digests_in(out), text

    return start


def _script(place: Path, *lines: str) -> Path:
    """Write a program that a rank runs with the process id of its agent."""
    script = place / "script"
    script.write_text("\n".join(["#!/bin/sh -ex", *lines, ""]))
    script.chmod(0o700)
    return script


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
@pytest.mark.parametrize(
    ("death", "lost"),
    [("2:3", "rank 2 on host"), ("2:3:parent", "is gone: its agent")],
    ids=["rank", "agent"],
)
def test_what_a_real_engine_loses_costs_no_step_and_no_bit(
    train: Train, death: str, lost: str, undisturbed: set[str]
) -> None:
    code, digests, text = train(death)
    assert code == 0, text
    assert lost in text
    assert digests == undisturbed, text


@pytest.mark.parametrize("engine", ["slurm", "mpi"], indirect=True)
def test_ranks_leave_a_node_with_an_agent_that_is_asked_to_end(
    train: Train, undisturbed: set[str]
) -> None:
    code, digests, text = train("2:3:notified", "kill -TERM $1")
    assert code == 0, text
    assert "its ranks leave the run" in text
    assert digests == undisturbed, text


def _check_saved(train: Train, undisturbed: set[str], saves: Path) -> None:
    """Check that ranks have saved their last step, and that the next run continues with it."""
    (saved,) = saves.iterdir()
    assert int(saved.name.removeprefix("step-")) >= 4  # ranks notice it a moment later
    code, digests, text = train()
    assert code == 0, text
    assert digests == undisturbed, text


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_ranks_save_when_their_launcher_is_killed(
    train: Train, undisturbed: set[str], tmp_path: Path
) -> None:
    code, digests, text = train("0:3:notified", f"kill -KILL $(cat {tmp_path / 'launcher'})")
    assert (code, digests) == (-9, set()), text
    _check_saved(train, undisturbed, tmp_path / "saves")


@pytest.mark.parametrize("engine", ["ray"], indirect=True)
@pytest.mark.usefixtures("engine")
def test_a_function_on_ray_has_the_results_of_the_ranks_that_finish() -> None:
    elastic = ElasticLimits(min_ranks=1, restarts=0)
    assert ray.run(ray_functions.train, num_workers=2, elastic=elastic) == [10]
    with pytest.raises(PeerLostError, match="rank 1 returned no result"):
        ray.run(ray_functions.end, num_workers=2)


@pytest.mark.parametrize("engine", ["ray"], indirect=True)
@pytest.mark.parametrize(
    ("line", "lost"),
    [(DRAIN, "its ranks leave the run"), ("kill -KILL $RAY_RAYLET_PID", "is gone: its agent")],
    ids=["drained", "killed"],
)
def test_a_node_that_ray_takes_away_costs_no_step_and_no_bit(
    line: str,
    lost: str,
    train: Train,
    undisturbed: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ray_cluster(tmp_path) as address:  # other tests need all nodes
        monkeypatch.setenv("RAY_ADDRESS", address)
        code, digests, text = train("2:3:notified", f"export RAY_ADDRESS={address}", line)
    assert code == 0, text
    assert lost in text
    assert digests == undisturbed, text


@pytest.mark.parametrize("engine", ["ray"], indirect=True)
@pytest.mark.parametrize(
    ("changes", "num_ranks", "lost"),
    [
        (("3:2\n", "2:drain\n"), 2, "its ranks leave the run"),
        (("3:2\n", "2:kill\n", "3:2\n"), 3, "is gone: its agent"),
    ],
    ids=["drained", "killed"],
)
@pytest.mark.usefixtures("engine")
def test_a_rank_joins_in_place_on_a_node_that_ray_gets_and_leaves_with_it(
    changes: tuple[str, ...],
    num_ranks: int,
    lost: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    def ends(options: str, *changes: str) -> tuple[set[str], str]:
        words = (*options.split(), "--threads", "1", HOSTFILE_JOB, str(tmp_path / "nodes"), "")
        job = run(*words, *changes, cwd=tmp_path)
        out, text = job.communicate(timeout=LIMIT_S)
        assert job.returncode == 0, text
        return set(re.findall(r"(\d \d+ [0-9a-f]+)$", out, re.MULTILINE)), text

    (alone,), _ = ends("-n 1 --min-ranks 1")
    options = "--on ray --engine-options --resources=CPU=2 --min-ranks 2 --max-ranks 3"
    with nothing_left(request.node.nodeid), ray_cluster(tmp_path) as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        found, text = ends(f"{options} --env {MARK}", *changes)
    assert found == {alone.replace("1", str(num_ranks), 1)}, text
    assert re.search(r"host \S+ has joined the run\n.*epoch 1: ranks 0, 1, 2 go on", text), text
    assert lost in text


@pytest.mark.parametrize("engine", ["slurm"], indirect=True)
def test_ranks_save_when_slurm_signals_the_job(
    train: Train, undisturbed: set[str], tmp_path: Path
) -> None:
    code, digests, text = train("2:3:notified", "scancel --signal=TERM $SLURM_JOB_ID")
    assert (code, digests) == (143, set()), text
    _check_saved(train, undisturbed, tmp_path / "saves")


@pytest.mark.parametrize("engine", ["slurm"], indirect=True)
def test_a_node_that_is_down_for_slurm_costs_no_step_and_no_bit(
    train: Train, undisturbed: set[str]
) -> None:
    code, digests, text = train("2:3:notified", NODE_FAILURE)
    assert code == 0, text
    assert "host n2 is gone: its agent" in text
    assert digests == undisturbed, text


@pytest.mark.parametrize("engine", ["slurm"], indirect=True)
@pytest.mark.usefixtures("engine")
def test_a_batch_script_goes_on_when_a_node_is_down(
    undisturbed: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAVES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    program = _script(tmp_path, NODE_FAILURE)
    script = BatchScript(
        num_ranks=3,
        min_ranks=1,
        nodes=2,
        command=(ELASTIC_JOB, f"2:3:notified:{program}"),
        options="--wait --output=out",
    )
    (tmp_path / "job.sh").write_text(script.text())
    done = subprocess.run(["sbatch", "job.sh"], cwd=tmp_path, check=False, timeout=LIMIT_S)
    text = (tmp_path / "out").read_text()
    assert done.returncode == 0, text
    assert "host n2 is gone: its agent" in text
    assert digests_in(text) == undisturbed, text
