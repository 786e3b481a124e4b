"""Clusters: the processes of a training, with their jobs, tasks and addresses.

    TFConfigClusterResolver     TF_CONFIG of the environment, as TensorFlow's programs have it
    LaunchedClusterResolver     ranks of `braid run`, torchrun, srun, mpirun or Kubernetes
    RayClusterResolver          ranks of `braid.launch.ray.run`
    SlurmClusterResolver        tasks of srun, with their hosts
    KubernetesClusterResolver   pods of an Indexed Job, with their names

`braid.init()` reads TF_CONFIG as well, so a program that is started with it needs no launcher.

Source: TensorFlow 2.21, `tf.distribute.cluster_resolver`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from braid.errors import ConfigError
from braid.runtime.rendezvous.engine_ranks import EngineRank, as_torchrun, engine_rank
from braid.runtime.rendezvous.environment import JobEnvironment
from braid.runtime.rendezvous.slurm_names import expand_counts, expand_hostlist
from braid.runtime.rendezvous.tf_config import read_tf_config

__all__ = [
    "ClusterResolver",
    "KubernetesClusterResolver",
    "LaunchedClusterResolver",
    "RayClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "resolver_of_tf_config",
]

ClusterSpec = Mapping[str, Sequence[str]]  # addresses of the tasks of each job


class ClusterResolver(Protocol):
    """Interface for the job and task number of this process, and the addresses of all tasks.

    Attributes:
        task_type: Name of this process's job, such as `worker`.
        task_id: Number of this process in its job.
    """

    task_type: str
    task_id: int

    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of all tasks, by job."""


class _Cluster:
    """Base of the resolvers, with methods that are not part of `ClusterResolver`.

    Attributes:
        environment: Name of the environment; empty, as of TensorFlow's resolvers.
    """

    environment = ""
    task_type = "worker"
    task_id = 0
    _jobs: ClusterSpec

    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of all tasks, by job; see `ClusterResolver.cluster_spec`."""
        return self._jobs

    def master(self, task_type: str | None = None, task_id: int | None = None) -> str:
        """Return the address of a task; of the chief or the first worker by default.

        Raises:
            ConfigError: The cluster does not contain the task.
        """
        if task_type is None:
            task_type = "chief" if self._jobs.get("chief") else "worker"
        tasks, number = self._jobs.get(task_type, ()), task_id or 0
        if not 0 <= number < len(tasks):
            msg = (
                f"the cluster has {len(tasks)} tasks of {task_type}, so task {number} does not "
                "exist: correct the index"
            )
            raise ConfigError(msg)
        return tasks[number]

    def num_accelerators(self) -> dict[str, int]:
        """Return the number of this process's GPUs, by kind."""
        return {"GPU": torch.cuda.device_count()}


class TFConfigClusterResolver(_Cluster):
    """Reads `TF_CONFIG`: `{"cluster": {"worker": ["host:port"]}, "task": {"type": "worker", ...}}`.

    Args:
        environ: Environment variables; `os.environ` when None.

    Raises:
        ConfigError: TF_CONFIG is not set, or is not valid; see `read_tf_config`.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        config = read_tf_config(os.environ if environ is None else environ)
        self._jobs = config.jobs
        self.task_type, self.task_id = config.task_type, config.task_id


def resolver_of_tf_config() -> TFConfigClusterResolver | None:
    """Return a resolver for TF_CONFIG; None if it is not set or a launcher assigns the ranks."""
    return TFConfigClusterResolver() if as_torchrun(os.environ)[0] == "tf_config" else None


class LaunchedClusterResolver(_Cluster):
    """Reads the environment variables of a launcher: each rank is the worker of that number.

    Launchers do not publish addresses of ranks, so `cluster_spec` has names: `rank0`, `rank1`, ...

    Args:
        environment: The rank's environment; read from `os.environ` when None.
    """

    def __init__(self, environment: JobEnvironment | None = None) -> None:
        environment = JobEnvironment.from_os() if environment is None else environment
        self.task_id = environment.place
        self._jobs = {"worker": [f"rank{rank}" for rank in range(environment.world_size)]}


class RayClusterResolver(LaunchedClusterResolver):
    """Reads the rank that `braid.launch.ray.run` sets in the environment, as `braid run` does."""


class SlurmClusterResolver(_Cluster):
    """Reads the variables of a step of Slurm: each task is a worker.

    Args:
        port_base: Port of the first task of each host.
        environ: Environment variables; `os.environ` when None.

    Raises:
        ConfigError: This process is not a task of srun, or the variables contradict each other.
    """

    def __init__(self, port_base: int = 8888, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self.task_id = _rank_of("srun", environ).rank
        hosts = expand_hostlist(environ["SLURM_STEP_NODELIST"])
        counts = expand_counts(environ["SLURM_STEP_TASKS_PER_NODE"])
        self._jobs = {
            "worker": [
                f"{host}:{port_base + number}"
                for host, count in zip(hosts, counts, strict=True)
                for number in range(count)
            ]
        }


class KubernetesClusterResolver(_Cluster):
    """Reads the variables of an Indexed Job of Kubernetes: each pod is a worker.

    Args:
        port: Port of each pod.
        environ: Environment variables; `os.environ` when None.

    Raises:
        ConfigError: This process is not part of an Indexed Job with WORLD_SIZE, or MASTER_ADDR is
            not the name of pod 0, such as `job-0.service`.
    """

    def __init__(self, port: int = 8470, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        rank = _rank_of("kubernetes", environ)
        first = environ.get("MASTER_ADDR", "")
        job, number, service = first.partition("-0.")
        if not number:
            msg = f"MASTER_ADDR must be the name of pod 0, such as job-0.service, got {first!r}"
            raise ConfigError(msg)
        self.task_id = rank.rank
        self._jobs = {"worker": [f"{job}-{i}.{service}:{port}" for i in range(rank.world_size)]}


def _rank_of(engine: str, environ: Mapping[str, str]) -> EngineRank:
    """Return the rank that an engine has assigned to this process.

    Raises:
        ConfigError: Another engine, or none, has started this process.
    """
    rank = engine_rank(environ)
    if rank is None or rank.engine != engine:
        starter = "no engine" if rank is None else rank.engine
        msg = (
            f"{starter} has started this process, not {engine}: use LaunchedClusterResolver under "
            "`braid run`, TFConfigClusterResolver with TF_CONFIG"
        )
        raise ConfigError(msg)
    return rank
