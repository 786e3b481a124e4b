"""Variables of srun, mpirun, MPICH and Kubernetes as torchrun's, and what does not fit together."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import ConfigError
from braid.runtime.rendezvous.engine_ranks import FIRST_PORT, NUM_PORTS, as_torchrun, engine_rank
from braid.runtime.rendezvous.environment import JobEnvironment
from braid.runtime.rendezvous.slurm_names import expand_counts, expand_hostlist

SRUN = {  # rank 2 of 4, as srun 22.05 says it on the second node of `srun -N2 -n4`
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
MPIRUN = {  # of Open MPI 4.1
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "660996096.0;tcp://10.0.0.1,192.168.1.1:55103",
    "PMIX_NAMESPACE": "660996097",
}
MPIEXEC = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"}
KUBERNETES = {
    "JOB_COMPLETION_INDEX": "2",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "train-0.train",
    "HOSTNAME": "train-2",
}
ENGINES: dict[str, dict[str, str]] = {
    "srun": SRUN,
    "mpirun": MPIRUN,
    "mpiexec": MPIEXEC,
    "kubernetes": KUBERNETES,
}


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_says_the_same_rank(engine: str) -> None:
    environ = ENGINES[engine]
    found, values = as_torchrun(environ, job="of the proxy")
    assert found == engine
    read = JobEnvironment.parse({**environ, **values}, found)
    assert (read.rank, read.world_size, read.launched_by) == (2, 4, engine)
    assert read.has_torch_store
    assert FIRST_PORT <= read.master_port < FIRST_PORT + NUM_PORTS


def test_places_of_ranks_are_those_of_the_engine() -> None:
    values = {engine: as_torchrun(environ, "job")[1] for engine, environ in ENGINES.items()}
    assert [values[e]["LOCAL_RANK"] for e in ENGINES] == ["0", "0", "2", "0"]
    assert [values[e]["LOCAL_WORLD_SIZE"] for e in ENGINES] == ["2", "2", "4", "1"]
    addresses = [values[e].get("MASTER_ADDR", "") for e in ENGINES]
    assert addresses == ["n1", "10.0.0.1", "127.0.0.1", ""]  # the last one is set already
    assert values["srun"]["GROUP_RANK"] == "1"


@pytest.mark.parametrize(
    ("networks", "expected"),
    [
        (["192.168.1.0/24"], "192.168.1.1"),  # the first one is a bridge of rank 0's host
        (["10.0.0.0/8", "192.168.1.0/24"], "10.0.0.1"),
        (["172.16.0.0/16"], "10.0.0.1"),  # behind a router
        ([], "10.0.0.1"),
    ],
)
def test_ranks_meet_in_a_network_that_they_share(networks: list[str], expected: str) -> None:
    own = [ip_network(network) for network in networks]
    assert as_torchrun(MPIRUN, networks=own)[1]["MASTER_ADDR"] == expected


def test_jobs_of_one_host_meet_at_other_ports() -> None:
    ports = {as_torchrun({**MPIEXEC}, job=f"{pid}")[1]["MASTER_PORT"] for pid in range(1000, 1020)}
    assert len(ports) > 15
    same = {
        as_torchrun({**SRUN, "SLURM_PROCID": r, "SLURM_NODEID": n})[1]["MASTER_PORT"]
        for r, n in (("0", "0"), ("3", "1"))
    }
    assert len(same) == 1


@pytest.mark.parametrize(
    ("environ", "engine"),
    [
        ({}, ""),
        ({**SRUN, "BRAID_STORE": "tcp://127.0.0.1:1"}, ""),  # braid run inside of a step
        ({**SRUN, "TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"}, ""),
        # a batch script, and salloc's shell, are no steps
        ({k: v for k, v in SRUN.items() if not k.startswith("SLURM_STEP")}, ""),
        ({**SRUN, "SLURM_STEP_ID": "4294967290", **MPIRUN}, "mpirun"),  # mpirun in a batch job
        ({**SRUN, **MPIRUN, "SLURM_PROCID": "0"}, "mpirun"),  # whose daemons srun has started
        ({**SRUN, "PMI_RANK": "2", "PMI_SIZE": "4"}, "srun"),  # srun --mpi=pmi2
        ({**SRUN, **MPIEXEC, "PMI_SIZE": "8", "PMI_RANK": "5", "MPI_LOCALNRANKS": "8"}, "mpiexec"),
        ({"JOB_COMPLETION_INDEX": "1"}, ""),  # a job that is none of ours
        ({**MPIRUN, "RANK": "2", "WORLD_SIZE": "4"}, "mpirun"),  # a script has said the same
        # a program's own launcher, such as mp.spawn in one task of srun
        ({**SRUN, "RANK": "1", "WORLD_SIZE": "9", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, ""),
    ],
)
def test_the_innermost_launcher_counts(environ: Mapping[str, str], engine: str) -> None:
    assert as_torchrun(environ, "job")[0] == engine


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({**MPIRUN, "RANK": "0"}, "mpirun gives RANK=2, and RANK=0 is set. Unset RANK"),
        ({**SRUN, "WORLD_SIZE": "8"}, "srun gives WORLD_SIZE=4, and WORLD_SIZE=8 is set"),
        (
            {**MPIRUN, "OMPI_COMM_WORLD_SIZE": "four"},
            "must be numbers: OMPI_COMM_WORLD_SIZE='four'",
        ),
        (
            {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
            "contradict each other, start the program with srun: 4 tasks",
        ),
        ({**SRUN, "SLURM_STEP_NODELIST": "n[1-"}, "is not a list in Slurm's form"),
        ({**MPIEXEC, "MPI_LOCALNRANKS": "2"}, "does not name the host of rank 0: set MASTER_ADDR"),
        (
            {**MPIRUN, "PMIX_NAMESPACE": "", "OMPI_MCA_ess_base_jobid": ""},
            "does not name the job: set MASTER_PORT",
        ),
        (  # each host has a proxy of its own
            {**MPIEXEC, "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "a"},
            "does not name the job: set MASTER_PORT",
        ),
    ],
)
def test_what_does_not_fit_together_is_named(environ: Mapping[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem.replace("(", r"\(")):
        as_torchrun(environ, "of the proxy" if "PMI_RANK" in environ else "")


def test_an_engine_that_gives_no_rank_is_none() -> None:
    assert engine_rank({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}) is None


@given(
    st.lists(
        st.tuples(
            st.from_regex(r"[a-z]{1,4}-?", fullmatch=True),
            st.lists(st.integers(0, 30), max_size=4, unique=True),
        ),
        max_size=4,
    )
)
def test_lists_of_nodes_are_expanded_in_their_order(parts: list[tuple[str, list[int]]]) -> None:
    text = ",".join(f"{name}[{','.join(map(str, ns))}]" if ns else name for name, ns in parts)
    wanted = [f"{name}{n}" for name, ns in parts for n in (ns or [""])]
    assert expand_hostlist(text) == wanted


@pytest.mark.parametrize(
    "text",
    ["n[1-", "n[2-1]", "n[1-2-3]", "n[1-]", "n[]", "n[1-2", "a,,b", "n[x]", "n[1-99999999]", ","],
)
def test_a_list_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a list in Slurm's form"):
        expand_hostlist(text)


def test_names_may_have_several_brackets() -> None:
    assert expand_hostlist("r[1-2]n[07-08]x") == ["r1n07x", "r1n08x", "r2n07x", "r2n08x"]


def test_counts_are_expanded() -> None:
    assert expand_counts("3,1") == [3, 1]
    assert expand_counts("") == []
    for text in ("4(x", "x", "4(x99999999)"):
        with pytest.raises(ConfigError, match="is not a list in Slurm's form"):
            expand_counts(text)
