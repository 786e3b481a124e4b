"""Pure parts of engines: nodes and shares of ranks, invitations, lines of srun, scripts and manifests."""

from __future__ import annotations

import base64
import pickle
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from braid.cli import main
from braid.cli.doctor.checks import check_engines
from braid.cli.doctor.facts import Engines
from braid.errors import ConfigError, PeerLostError
from braid.launch import Host
from braid.launch.engines.client import EngineClient
from braid.launch.engines.client_words import ClientWords
from braid.launch.engines.invitation import Invitation, forget_engine
from braid.launch.engines.kubernetes import SECRET_FILE, KubernetesManifest
from braid.launch.engines.mpi_client import command_for, shares
from braid.launch.engines.options import CLIENTS
from braid.launch.engines.ray_call import Results, check_results, read_result
from braid.launch.engines.ray_nodes import RayNode, place
from braid.launch.engines.slurm_client import allocated, lost_task
from braid.launch.engines.slurm_script import BatchScript
from braid.launch.process.processes import SignalInbox

KEY = bytes(range(32))
INVITED = Invitation(
    addresses=("tcp://10.0.0.1:9",), machine="m", nodes={0: "a", 1: "b"}, secret=KEY.hex()
)


@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=6),
    st.integers(1, 40),
    st.sampled_from(["pack", "spread"]),
)
def test_ranks_get_nodes_that_have_room(cpus: list[int], num_ranks: int, strategy: str) -> None:
    nodes = [RayNode(str(i), f"n{i}", {"CPU": float(c)}) for i, c in enumerate(cpus)]
    if num_ranks > sum(cpus):
        with pytest.raises(ConfigError, match=f"Ray has resources for {sum(cpus)} ranks of CPU=1"):
            place(nodes, num_ranks, {"CPU": 1.0}, strategy)
        return
    chosen = place(nodes, num_ranks, {"CPU": 1.0}, strategy)
    counts = {node.key: count for node, count in chosen}
    assert sum(counts.values()) == num_ranks
    assert all(0 < count <= cpus[int(key)] for key, count in counts.items())
    usable = sum(c > 0 for c in cpus)
    if strategy == "spread":
        assert len(counts) == min(usable, num_ranks)
    else:  # no node could be left out
        assert sum(sorted(cpus, reverse=True)[: len(counts) - 1]) < num_ranks


def test_a_rank_needs_all_of_its_resources() -> None:
    nodes = [RayNode("1", "a", {"CPU": 8.0, "GPU": 1.0}), RayNode("2", "b", {"CPU": 8.0})]
    with pytest.raises(ConfigError, match="free are a CPU=8 GPU=1; b CPU=8 GPU=0"):
        place(nodes, 2, {"CPU": 1.0, "GPU": 1.0})
    assert [n.name for n, _ in place(nodes, 1, {"CPU": 1.0, "GPU": 1.0})] == ["a"]


def test_an_allocation_gives_its_tasks_or_its_processors() -> None:
    job = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x2),1"}
    assert allocated(job) == (Host("n1", 2), Host("n2", 2), Host("n3", 1))
    assert allocated(job, 3) == (Host("n1", 2), Host("n2", 1))
    with pytest.raises(ConfigError, match="has 5 tasks on n1:2, n2:2, n3:1, but the job needs 6"):
        allocated(job, 6)
    by_nodes = {
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_TASKS_PER_NODE": "1(x2)",
        "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
    }
    assert allocated(by_nodes, 6) == (Host("n1", 4), Host("n2", 2))
    with pytest.raises(ConfigError, match="no nodes"):
        allocated({})


def test_lines_of_srun_tell_which_node_is_lost() -> None:
    hosts = (Host("n1", 2), Host("n2", 2))
    assert lost_task(hosts, "srun: error: Node failure on n2") == (
        1,
        "is lost to Slurm: node failure",
    )
    assert lost_task(hosts, "srun: error: n9: task 3: Killed") is None
    assert lost_task(hosts, "srun: Force Terminated StepId=18.0") is None


def test_processes_of_mpi_are_started_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/x")
    open_mpi = command_for("mpirun", "Open MPI", ("--mca", "a", "b"), "n1", ("agent",))
    assert " ".join(open_mpi) == (
        "mpirun -np 1 --host n1 --bind-to none -x PYTHONPATH --mca a b agent"
    )
    assert " ".join(command_for("mpiexec", "MPICH", (), "n1", ("agent",))) == (
        "mpiexec -hosts n1 -n 1 agent"
    )
    assert shares([("a", 2), ("b", 2)], 0) == (Host("a", 2), Host("b", 2))
    assert shares([("a", 2), ("b", 2)], 3) == (Host("a", 2), Host("b", 1))


def test_an_invitation_hides_its_secret_and_numbers_nodes() -> None:
    line = INVITED.for_node(1).to_line()
    read = Invitation.from_line(line)
    assert read.number({"SLURM_PROCID": "0"}) == 1
    assert INVITED.number({"SLURM_PROCID": "3"}) == 3
    assert KEY.hex() not in repr(read)
    assert line.count(b"\n") == 1
    with pytest.raises(ConfigError, match="the number of this node is unknown"):
        INVITED.number({})
    with pytest.raises(ConfigError, match="it got no instructions on stdin"):
        Invitation.from_line(b"")


def test_ranks_do_not_see_the_variables_of_the_agents_process() -> None:
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_ID": "0",
        "OMPI_COMM_WORLD_RANK": "0",
        "PMI_FD": "3",
        "HOME": "/",
    }
    forget_engine(environ)
    assert sorted(environ) == ["HOME", "SLURM_JOB_ID"]


def test_words_of_a_client_are_its_own_or_the_engines() -> None:
    words = ["--num-ranks=4", "--strategy", "spread", "--partition=gpu"]
    read = ClientWords.parse(words, {"strategy"}, others=True)
    assert (read.num_ranks, dict(read), read.rest) == (
        4,
        {"strategy": "spread"},
        ("--partition=gpu",),
    )
    with pytest.raises(ConfigError, match="has no option --partition: it has --strategy"):
        ClientWords.parse(words, {"strategy"})
    with pytest.raises(ConfigError, match="--strategy needs a value"):
        ClientWords.parse(["--strategy"], {"strategy"})


def test_an_engine_that_is_gone_is_the_reason_for_the_loss_of_its_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone.py").write_text(
        "from braid.launch.engines.client_words import FromClient\n"
        "FromClient(hosts=(('a', 1), ('b', 1))).send()\n"
        "FromClient(lost=1, why='was drained').send()\n"
        "raise SystemExit('[11-25 23:54 E 20508] rpc.h:204: cannot reach the head node')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(CLIENTS, "ray", "gone")
    with SignalInbox() as inbox, EngineClient("ray") as client:
        assert client.hosts(20.0, print, inbox) == (Host("a", 1), Host("b", 1))
        lost = client.why_lost(0, 20.0)
        assert lost == "is lost with ray: cannot reach the head node"
        assert client.why_lost(1, 20.0) == "was drained"


def test_a_batch_script_is_valid_and_saves_before_its_time_is_over(tmp_path: Path) -> None:
    file = tmp_path / "job.sh"
    words = ["-n", "8", "--nodes", "2", "--cpus", "4", "--gpus", "1", "--time", "4:00:00"]
    words += ["--min-ranks", "6"]
    more = ["--options", "--account=physics", "--out", str(file)]
    assert main(["slurm", "script", *words, *more, "train.py", "--lr", "0.1 x"]) == 0
    text = file.read_text()
    assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0
    for option in ("ntasks=8", "nodes=2", "cpus-per-task=4", "gpus-per-task=1", "account=physics"):
        assert f"#SBATCH --{option}\n" in text
    assert "#SBATCH --signal=B:USR1@120\n" in text
    assert "#SBATCH --no-kill\n" in text
    assert "braid run --on slurm -n 8 --resume auto --min-ranks 6 --threads 4 --log-dir " in text
    assert "train.py --lr '0.1 x' &\n" in text


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"command": ()}, "there is no program to run"),
        ({"num_ranks": 0}, "must be at least 1"),
        ({"options": "gpu"}, "'gpu' is not an option of sbatch"),
        ({"partition": "a\nb"}, "must be on one line"),
        ({"name": "my job"}, "the name may contain only letters, digits, dots and dashes"),
    ],
)
def test_a_batch_script_that_cannot_work_is_refused(
    changes: dict[str, object], problem: str
) -> None:
    given = {"command": ("train.py",), "num_ranks": 2, **changes}
    with pytest.raises(ConfigError, match=problem):
        BatchScript(**given)


class Unloadable(Exception):
    """An exception that pickles, and does not unpickle."""

    def __init__(self, a: str, b: str) -> None:
        super().__init__(f"{a} {b}")


@pytest.mark.parametrize(
    ("results", "error", "words"),
    [
        ({0: (1, None)}, PeerLostError, "rank 1 returned no result"),
        ({0: (None, SystemExit(0))}, PeerLostError, "ranks 0, 1 returned no result"),
        ({0: (1, None), 1: (None, TypeError("of a class"))}, TypeError, "of a class"),
    ],
)
def test_a_rank_without_a_value_is_an_error(
    results: Results, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        check_results(results, 2)
    check_results({0: (None, None), 1: (None, None)}, 2)


def test_a_result_that_cannot_be_unpickled_hides_no_failure() -> None:
    value, error = read_result(pickle.dumps((None, Unloadable("a", "b"))))
    assert value is None
    assert isinstance(error, TypeError)
    assert "cannot be unpickled" in str(error)


def manifest(**changes: object) -> KubernetesManifest:
    given = {"name": "train", "image": "me/train:1", "command": ("train.py", "--lr", "1")}
    return KubernetesManifest(**{**given, "nodes": 2, "ranks_per_node": 4, "gpus": 4, **changes})


def test_a_manifest_has_a_secret_a_service_and_a_job() -> None:
    text = manifest(memory="16Gi").text(KEY)
    secret, service, job = yaml.safe_load_all(text)
    assert [part["kind"] for part in (secret, service, job)] == ["Secret", "Service", "Job"]
    assert base64.b64decode(secret["data"]["secret"]) == KEY
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert job["spec"]["completionMode"] == "Indexed"
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert container["command"] == [
        *("braid", "run", "--nnodes", "2", "--node-rank", "$(BRAID_NODE)"),
        *("--rdzv", "tcp://train-0.train:29400", "-n", "4", "train.py", "--lr", "1"),
    ]
    assert container["resources"]["limits"] == {"memory": "16Gi", "nvidia.com/gpu": "4"}
    assert pod["volumes"][0]["secret"]["defaultMode"] == 0o600  # as `Secret.from_file` wants it
    assert container["volumeMounts"][0]["mountPath"] == SECRET_FILE
    assert {"name": "BRAID_SECRET_FILE", "value": SECRET_FILE} in container["env"]


def test_a_manifest_is_what_kubernetes_takes() -> None:
    checker = pytest.importorskip("kubernetes_validate", reason="needs the extra k8s")
    for min_ranks in (0, 5):
        for part in yaml.safe_load_all(manifest(min_ranks=min_ranks).text(KEY)):
            checker.validate(part, "1.32", strict=True)


def test_pods_of_an_elastic_job_may_fail_but_for_the_first() -> None:
    fixed, elastic = (
        list(yaml.safe_load_all(manifest(min_ranks=least).text(KEY)))[-1]["spec"]
        for least in (0, 5)
    )
    assert fixed["backoffLimit"] == 0
    assert "backoffLimit" not in elastic
    assert elastic["backoffLimitPerIndex"] == 0
    assert elastic["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    (container,) = elastic["template"]["spec"]["containers"]
    assert container["command"][-5:-3] == ["--min-ranks", "5"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"name": "Train_1"}, "the name must have at most 48 lower-case letters"),
        ({"image": ""}, "a container image or a script is missing"),
        ({"nodes": 0}, "must be at least 1"),
        ({"min_ranks": 9}, "--min-ranks must be from 0 to the number of ranks, 8, got 9"),
        ({"memory": "16 GB"}, "must be such as 4, 500m or 16Gi, got '16 GB'"),
    ],
)
def test_a_manifest_that_cannot_work_is_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        manifest(**changes)


def test_the_command_writes_a_manifest_that_only_its_user_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    words = ["--image", "me/train:1", "--nodes", "2", "-n", "2", "--out", str(file)]
    assert main(["k8s", "manifest", *words, "-m", "pkg.train", "--steps", "3"]) == 0
    assert file.stat().st_mode & 0o777 == 0o600
    assert '"-m", "pkg.train", "--steps", "3"]' in file.read_text()
    assert f"kubectl apply -f {file}" in capsys.readouterr().out
    file.chmod(0o644)  # of an earlier one
    assert main(["k8s", "manifest", *words, "train.py"]) == 0
    assert file.stat().st_mode & 0o777 == 0o600
    capsys.readouterr()
    assert main(["k8s", "manifest", *words[:-1], str(tmp_path), "train.py"]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_doctor_says_under_which_engine_it_runs() -> None:
    assert check_engines(Engines()).fact == "none: ranks start on this host"
    rank = check_engines(Engines(rank="srun, rank 2 of 4", installed=("Slurm",)))
    assert (rank.verdict, rank.fact) == ("ok", "srun, rank 2 of 4; here are Slurm")
    inside = check_engines(Engines(allocation="Slurm job 7 on n[1-2]"))
    assert (inside.verdict, "--on slurm" in inside.advice) == ("note", True)
    assert check_engines(Engines(problem="two launchers")).verdict == "problem"
