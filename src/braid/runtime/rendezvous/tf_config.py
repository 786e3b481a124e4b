"""Reads TF_CONFIG, the variable by which programs of TensorFlow know their peers.

    {"cluster": {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]},
     "task": {"type": "worker", "index": 0}}

The tasks of a job are a list of addresses, or a mapping from task numbers to addresses. Ranks are
numbered in the order of `JOBS`, so rank 0 is the chief, or the first worker without one.

Tasks of the job `spare`, which TensorFlow does not have, replace lost workers.

Source: TensorFlow 2.21, `tf.distribute.cluster_resolver.TFConfigClusterResolver`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from braid.errors import ConfigError, raise_all

__all__ = ["read_tf_config"]

VARIABLE = "TF_CONFIG"
HOST = re.compile(r"[\w.-]+|\[[\da-fA-F:]+\]", re.ASCII)
JOBS = ("chief", "master", "worker", "ps", "spare")


class TFConfig(NamedTuple):
    """A cluster, and the task of this process.

    Attributes:
        jobs: Addresses (`host:port`) of the tasks of each job.
        task_type: Name of this process's job.
        task_id: Number of this process in its job.
    """

    jobs: dict[str, tuple[str, ...]]
    task_type: str
    task_id: int

    @property
    def addresses(self) -> list[str]:
        """Addresses of all tasks, in the order of ranks."""
        return [address for job in JOBS for address in self.jobs.get(job, ())]

    @property
    def rank(self) -> int:
        """Rank of this process."""
        before = JOBS[: JOBS.index(self.task_type)]
        return sum(len(self.jobs.get(job, ())) for job in before) + self.task_id


def read_tf_config(environ: Mapping[str, str]) -> TFConfig:
    """Read the cluster and this process's task.

    Raises:
        ConfigError: TF_CONFIG is not set or is not JSON, a job has gaps, an address has no port or
            occurs twice, or the task is not in the cluster; the message names all problems.
    """
    text = environ.get(VARIABLE, "")
    if not text:
        msg = f"{VARIABLE} is not set: set it in each process, or start them with `braid run -n N`"
        raise ConfigError(msg)
    try:
        config = json.loads(text)
    except ValueError as exc:
        msg = f"{VARIABLE} is not JSON: {exc}"
        raise ConfigError(msg) from None
    problems: list[str] = []
    jobs = _jobs(config, problems)
    task = config.get("task") if isinstance(config, dict) else None
    task = task if isinstance(task, dict) else {}
    kind, index = task.get("type"), task.get("index")
    if not problems:
        if not task:
            problems.append('the object has no "task" with the type and the index of this process')
        elif not isinstance(kind, str) or kind not in jobs:
            problems.append(f"task type {kind!r} is not a job of the cluster: {', '.join(jobs)}")
        elif type(index) is not int or not 0 <= index < len(jobs[kind]):
            problems.append(
                f"task index {index!r} is not a task of {kind}: its {len(jobs[kind])} tasks are "
                f"numbered from 0 to {len(jobs[kind]) - 1}"
            )
    raise_all(f"{VARIABLE}: {problem}" for problem in problems)
    assert isinstance(kind, str), "it is a job"
    assert isinstance(index, int), "it is a task's number"
    return TFConfig(jobs, kind, index)


def _jobs(config: Any, problems: list[str]) -> dict[str, tuple[str, ...]]:
    cluster = config.get("cluster") if isinstance(config, dict) else None
    if not isinstance(cluster, dict) or not cluster:
        problems.append('the object has no "cluster" with the addresses of jobs')
        return {}
    jobs: dict[str, tuple[str, ...]] = {}
    for job, tasks in cluster.items():
        if job not in JOBS:
            problems.append(f"job {job!r} is unknown: jobs are {', '.join(JOBS)}")
        elif not isinstance(tasks, (dict, list)) or not tasks:
            problems.append(f"job {job} must be a list of addresses, got {tasks!r}")
        elif isinstance(tasks, dict) and {*tasks} != {str(i) for i in range(len(tasks))}:
            numbers = ", ".join(sorted(tasks))
            problems.append(
                f"tasks of {job} have the numbers {numbers}: number them from 0, without gaps"
            )
        else:
            ordered = (
                tasks if isinstance(tasks, list) else [tasks[str(i)] for i in range(len(tasks))]
            )
            jobs[job] = tuple(map(str, ordered))
    addresses = [address for tasks in jobs.values() for address in tasks]
    for address in addresses:
        host, _, port = address.rpartition(":")
        known = HOST.fullmatch(host) and port.isascii() and port.isdecimal()
        if not known or not 0 < int(port) < 1 << 16:
            problems.append(f"{address!r} is not host:port")
    twice = [address for address, count in Counter(addresses).items() if count > 1]
    problems += [
        f"there are {len(jobs[job])} tasks of {job}, but at most one is allowed"
        for job in JOBS[:2]
        if len(jobs.get(job, ())) > 1
    ]
    problems += [f"{address} is the address of two tasks" for address in twice]
    return jobs
