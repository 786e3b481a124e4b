"""Commands on engines of clusters: files for Slurm and Kubernetes, and a bench of launchers."""

from __future__ import annotations

from typing import Annotated

import tyro

from braid.errors import ConfigError
from braid.runtime.option_types import Command, Ranks, Text

__all__ = ["k8s_manifest", "slurm_script"]


def slurm_script(
    command: Command = (),
    *,
    n: Ranks = 1,
    nodes: int = 0,
    cpus: int = 1,
    gpus: int = 0,
    time: Text = "",
    partition: Text = "",
    name: str = "braid",
    module: Annotated[bool, tyro.conf.arg(aliases=["-m"])] = False,
    options: Text = "",
    out: Text = "",
) -> int:
    """Write a batch script for Slurm whose job saves, is requeued and resumes.

    Two minutes before its time limit, and when it is preempted, ranks get SIGTERM, save a
    checkpoint and end; the job is requeued and goes on from there (`--resume auto`).

    Args:
        command: Script and its arguments: everything after SCRIPT belongs to it.
        n: Number of ranks.
        nodes: Number of nodes; 0 for Slurm's choice.
        cpus: Processors of each rank.
        gpus: GPUs of each rank.
        time: Time limit, such as 4:00:00 (default: the partition's).
        partition: Partition (default: the cluster's).
        name: Name of the job.
        module: SCRIPT is the name of a Python module.
        options: Further options of sbatch, such as "--account=physics --exclusive".
        out: File for the script (default: standard output).
    """
    import shlex

    from braid.launch.engines.slurm_script import BatchScript

    script = BatchScript(
        command=command,
        num_ranks=n,
        nodes=nodes,
        cpus_per_rank=cpus,
        gpus_per_rank=gpus,
        time=time,
        partition=partition,
        name=name,
        is_module=module,
        options=tuple(shlex.split(options)),
    )
    return _write(script.text(), out, f"submit it with sbatch {out}")


def k8s_manifest(
    command: Command = (),
    *,
    image: Text = "",
    name: str = "braid",
    nodes: int = 1,
    n: Ranks = 1,
    gpus: int = 0,
    cpus: Text = "",
    memory: Text = "",
    module: Annotated[bool, tyro.conf.arg(aliases=["-m"])] = False,
    out: Text = "",
) -> int:
    """Write a manifest for Kubernetes: an Indexed Job with its service and a new secret.

    Pod 0 shows the output of all ranks and the error block: kubectl logs -l job-name=NAME.

    Args:
        command: Script and its arguments: everything after SCRIPT belongs to it.
        image: Image of the container, which has braid and the script.
        name: Name of the job.
        nodes: Number of pods.
        n: Number of ranks of each pod.
        gpus: GPUs of each pod.
        cpus: Processors of each pod, such as 4.
        memory: Memory of each pod, such as 16Gi.
        module: SCRIPT is the name of a Python module.
        out: File for the manifest, which holds the secret (default: standard output).
    """
    import secrets

    from braid.launch.engines.kubernetes import KubernetesManifest
    from braid.runtime.wire import SECRET_BYTES

    manifest = KubernetesManifest(
        name=name,
        image=image,
        command=command,
        nodes=nodes,
        ranks_per_node=n,
        gpus=gpus,
        cpus=cpus,
        memory=memory,
        is_module=module,
    )
    text = manifest.text(secrets.token_bytes(SECRET_BYTES))
    return _write(text, out, f"start it with kubectl apply -f {out}")


def _write(text: str, out: str, hint: str) -> int:
    """Write a file that only this user reads, or print the text."""
    import os

    if not out:
        print(text, end="")
        return 0
    try:
        fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            os.fchmod(fd, 0o600)  # also of a file that was there
            file.write(text)
    except OSError as exc:
        msg = f"{out} cannot be written: {exc.strerror}"
        raise ConfigError(msg) from exc
    print(f"{out}: {hint}")
    return 0
