"""Reads ranks from variables of srun, mpirun, Kubernetes or TF_CONFIG, and sets torchrun's.

    srun        SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE ...
    Open MPI    OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK ...
    MPICH       PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS
    Kubernetes  JOB_COMPLETION_INDEX, of an Indexed Job, beside WORLD_SIZE and MASTER_ADDR
    by hand     TF_CONFIG, as for programs of TensorFlow

Problem: each launcher gives rank and size under its own names, none gives the port at which ranks
meet, and in programs that read the wrong variables each process is rank 0.

Idea: one pure function from variables to torchrun's variables. Of nested launchers the innermost
counts: a batch script is not a rank of srun, and a rank of mpirun inside a step of srun takes
mpirun's variables. The port is a hash of the job's name, so that several jobs on one host use
different ports.

Source: srun(1) of Slurm 22.05, mpirun(1) of Open MPI 4.1, the PMI-1 variables of MPICH 4.0, the
documentation of Indexed Jobs of Kubernetes.
"""

from __future__ import annotations

import ipaddress
import re
import zlib
from collections.abc import Collection, Mapping
from typing import NamedTuple, TypeAlias

from braid.errors import ConfigError
from braid.runtime.rendezvous.slurm_names import expand_counts, expand_hostlist
from braid.runtime.rendezvous.tf_config import read_tf_config

__all__ = ["EngineRank", "IPNetwork", "as_torchrun", "engine_rank"]

IPNetwork: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

LOOPBACK = "127.0.0.1"
CONTRACT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
FIRST_PORT, NUM_PORTS = 20000, 10000  # below the ports that Linux assigns to programs
OPEN_MPIS_HOST = re.compile(r"tcp://([\d.,]+)")


class EngineRank(NamedTuple):
    """Rank and world size that another launcher, such as srun, gave this process.

    Attributes:
        engine: Name of the launcher: `srun`, `mpirun`, `mpiexec`, `kubernetes` or `tf_config`.
        rank: Global rank.
        world_size: Number of ranks.
        local_rank: Index of the rank on its host.
        local_world_size: Number of ranks on its host.
        node_rank: Number of its host; -1 if unknown.
        num_nodes: Number of hosts; 0 if unknown.
        first_host: Host of rank 0: its name, or all of its addresses separated by commas; empty if
            unknown.
        job: Name of the job, equal on all ranks; empty if unknown.
        port: Port at which ranks meet; 0 to derive it from the job's name.
    """

    engine: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int = -1
    num_nodes: int = 0
    first_host: str = ""
    job: str = ""
    port: int = 0

    @property
    def is_on_one_host(self) -> bool:
        """Whether all ranks are on one host."""
        return self.local_world_size == self.world_size


def engine_rank(environ: Mapping[str, str]) -> EngineRank | None:
    """Return the rank that a launcher has assigned to this process; None without one.

    Raises:
        ConfigError: Variables of a launcher are not numbers, or contradict each other.
    """
    for read in (_open_mpi, _slurm, _mpich, _kubernetes, _tf_config):
        rank = read(environ)
        if rank is not None:
            return rank
    return None


def as_torchrun(
    environ: Mapping[str, str], job: str = "", networks: Collection[IPNetwork] = ()
) -> tuple[str, dict[str, str]]:
    """Return the name of this process's launcher, and torchrun's variables for its rank.

    Args:
        environ: Environment variables.
        job: Name of the job, used if the launcher gives none.
        networks: Networks of this host. If rank 0 has several addresses, the first one in these
            networks is used.

    Returns:
        Name of the launcher, and those variables that are not yet set. Empty without a launcher,
        and if the process was started by torchrun or `braid run` inside of it.

    Raises:
        ConfigError: The variables of two launchers name different ranks, or the launcher does not
            name the place where ranks meet.
    """
    inner = any(environ.get(name) for name in ("BRAID_STORE", "TORCHELASTIC_RUN_ID"))
    inner = inner or all(environ.get(name) for name in CONTRACT)  # a program's own launcher
    rank = None if inner else engine_rank(environ)
    if rank is None:
        return "", {}
    for name, value in (("RANK", rank.rank), ("WORLD_SIZE", rank.world_size)):
        existing = environ.get(name, "")
        if existing and existing != str(value):
            msg = (
                f"two launchers have started this process: {rank.engine} gives {name}={value}, and "
                f"{name}={existing} is set. Unset {name}, or start the program in one way"
            )
            raise ConfigError(msg)
    first_host = LOOPBACK if rank.is_on_one_host else rank.first_host
    address = environ.get("MASTER_ADDR", "") or _meeting_address(first_host, networks)
    if not address:
        msg = (
            f"{rank.engine} does not name the host of rank 0: set MASTER_ADDR to its host on all "
            f"ranks, and MASTER_PORT to a free port ({_how(rank.engine)})"
        )
        raise ConfigError(msg)
    name = rank.job or (job if rank.is_on_one_host else "")  # of the proxy of this host
    if not (name or environ.get("MASTER_PORT")):
        msg = f"{rank.engine} does not name the job: set MASTER_PORT to a free port on all ranks"
        raise ConfigError(msg)
    values = {
        "RANK": rank.rank,
        "WORLD_SIZE": rank.world_size,
        "LOCAL_RANK": rank.local_rank,
        "LOCAL_WORLD_SIZE": rank.local_world_size,
        "GROUP_RANK": max(0, rank.node_rank),
        "GROUP_WORLD_SIZE": rank.num_nodes or (1 if rank.is_on_one_host else ""),
        "MASTER_ADDR": address,
        "MASTER_PORT": rank.port or FIRST_PORT + zlib.crc32(name.encode()) % NUM_PORTS,
        "BRAID_RUN_ID": f"{rank.engine}-{name or environ.get('MASTER_PORT')}",
    }
    return rank.engine, {
        key: str(value) for key, value in values.items() if value != "" and not environ.get(key)
    }


def _meeting_address(addresses: str, networks: Collection[IPNetwork]) -> str:
    """Return the first of a host's addresses that lies in one of some networks, or the first."""
    first, *others = addresses.split(",")
    if not others:  # the name of a host
        return first
    ips = [ipaddress.ip_address(address) for address in (first, *others)]
    return str(next((ip for ip in ips if any(ip in network for network in networks)), first))


def _open_mpi(environ: Mapping[str, str]) -> EngineRank | None:
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    rank, size, local, local_size = _numbers(
        environ, "OMPI_COMM_WORLD_", "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"
    )
    hosts = OPEN_MPIS_HOST.search(environ.get("OMPI_MCA_orte_hnp_uri", ""))
    # mpirun runs rank 0 on its own host by default
    first = hosts[1] if hosts is not None else ""
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    return EngineRank("mpirun", rank, size, local, local_size, first_host=first, job=job)


def _slurm(environ: Mapping[str, str]) -> EngineRank | None:
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    if not step.isdecimal() or "SLURM_STEP_NUM_TASKS" not in environ:  # the batch script
        return None
    rank, size, local, node = _numbers(
        environ, "SLURM_", "PROCID", "STEP_NUM_TASKS", "LOCALID", "NODEID"
    )
    mpich = _mpich(environ)
    if mpich is not None and (mpich.rank, mpich.world_size) != (rank, size):
        return mpich  # Slurm has started MPICH's launcher, which has started this process
    tasks = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    names = expand_hostlist(environ.get("SLURM_STEP_NODELIST", ""))
    if len(tasks) != len(names) or sum(tasks) != size or not node < len(tasks):
        msg = (
            f"Slurm's variables contradict each other, start the program with srun: {size} "
            f"tasks, SLURM_STEP_TASKS_PER_NODE={environ.get('SLURM_STEP_TASKS_PER_NODE', '')} "
            f"and SLURM_STEP_NODELIST={environ.get('SLURM_STEP_NODELIST', '')}"
        )
        raise ConfigError(msg)
    job = f"{environ.get('SLURM_JOB_ID', '')}.{step}"
    return EngineRank("srun", rank, size, local, tasks[node], node, len(names), names[0], job)


def _mpich(environ: Mapping[str, str]) -> EngineRank | None:
    if "PMI_RANK" not in environ or "PMI_SIZE" not in environ:
        return None
    rank, size = _numbers(environ, "PMI_", "RANK", "SIZE")
    if "MPI_LOCALRANKID" not in environ:  # another launcher with PMI, which does not name the host
        return None
    local, local_size = _numbers(environ, "MPI_LOCAL", "RANKID", "NRANKS")
    return EngineRank("mpiexec", rank, size, local, local_size)


def _kubernetes(environ: Mapping[str, str]) -> EngineRank | None:
    if "JOB_COMPLETION_INDEX" not in environ or not environ.get("WORLD_SIZE"):
        return None
    rank, size = _numbers(environ, "", "JOB_COMPLETION_INDEX", "WORLD_SIZE")
    job = environ.get("HOSTNAME", "").rpartition("-")[0]
    return EngineRank("kubernetes", rank, size, 0, 1, rank, size, job=job)


def _tf_config(environ: Mapping[str, str]) -> EngineRank | None:
    if not environ.get("TF_CONFIG"):
        return None
    config = read_tf_config(environ)
    addresses, rank = config.addresses, config.rank
    hosts = [address.rpartition(":")[0].strip("[]") for address in addresses]
    here, names = hosts[rank], list(dict.fromkeys(hosts))
    return EngineRank(
        "tf_config",
        rank,
        len(hosts),
        hosts[:rank].count(here),
        hosts.count(here),
        names.index(here),
        len(names),
        hosts[0],
        addresses[0],
        int(addresses[0].rpartition(":")[2]),
    )


def _numbers(environ: Mapping[str, str], prefix: str, *names: str) -> tuple[int, ...]:
    """Return variables as numbers."""
    wrong = [name for name in names if not environ.get(prefix + name, "").isdecimal()]
    if wrong:
        shown = ", ".join(f"{prefix}{name}={environ.get(prefix + name, '')!r}" for name in wrong)
        msg = f"these variables of the launcher must be numbers: {shown}"
        raise ConfigError(msg)
    return tuple(int(environ[prefix + name]) for name in names)


def _how(engine: str) -> str:
    return {
        "mpirun": "-x MASTER_ADDR=HOST -x MASTER_PORT=29500",
        "mpiexec": "-genv MASTER_ADDR HOST -genv MASTER_PORT 29500",
        "kubernetes": "see `braid k8s manifest`",
    }.get(engine, "in the environment of the job")
