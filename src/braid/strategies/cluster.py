"""Clusters: the processes of a training, with their jobs, tasks and addresses.

    TFConfigClusterResolver     TF_CONFIG of the environment, as TensorFlow's programs have it
    LaunchedClusterResolver     ranks of `braid run`, torchrun, srun, mpirun or Kubernetes

`braid.init()` reads TF_CONFIG as well, so a program that is started with it needs no launcher.

Source: TensorFlow 2.21, `tf.distribute.cluster_resolver`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Protocol

from braid.runtime.rendezvous.environment import JobEnvironment
from braid.runtime.rendezvous.tf_config import read_tf_config

__all__ = ["ClusterResolver", "LaunchedClusterResolver", "TFConfigClusterResolver"]

ClusterSpec = Mapping[str, Sequence[str]]  # addresses of the tasks of each job


class ClusterResolver(Protocol):
    """Says which task of which job this process is.

    Attributes:
        task_type: Name of this process's job, such as `worker`.
        task_id: Number of this process in its job.
    """

    task_type: str
    task_id: int

    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of all tasks, by job."""
        ...


class TFConfigClusterResolver:
    """Reads `TF_CONFIG`: `{"cluster": {"worker": ["host:port"]}, "task": {"type": "worker", ...}}`.

    Args:
        environ: Environment variables; those of this process when None.

    Raises:
        ConfigError: TF_CONFIG is not set, or makes no sense; see `read_tf_config`.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        config = read_tf_config(os.environ if environ is None else environ)
        self._jobs = config.jobs
        self.task_type, self.task_id = config.task_type, config.task_id

    def cluster_spec(self) -> ClusterSpec:
        """See `ClusterResolver`."""
        return self._jobs


class LaunchedClusterResolver:
    """Reads what a launcher has set for its ranks: all are workers, and rank 0 is the first.

    Args:
        environment: The rank's environment; that of this process when None.
    """

    def __init__(self, environment: JobEnvironment | None = None) -> None:
        environment = JobEnvironment.from_os() if environment is None else environment
        self.task_type, self.task_id = "worker", environment.rank
        self._size = environment.world_size

    def cluster_spec(self) -> ClusterSpec:
        """Return as many workers as there are ranks; a launcher gives them no addresses."""
        return {"worker": [f"rank{rank}" for rank in range(self._size)]}
