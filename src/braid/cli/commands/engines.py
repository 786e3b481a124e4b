"""Commands that write files for Slurm and Kubernetes."""

from __future__ import annotations

from typing import Annotated

import tyro

from braid.errors import ConfigError
from braid.launch.engines.kubernetes import KubernetesManifest
from braid.launch.engines.slurm_script import BatchScript
from braid.runtime.option_types import Text

__all__ = ["k8s_manifest", "slurm_script"]


def slurm_script(script: Annotated[BatchScript, tyro.conf.arg(name="")], *, out: Text = "") -> int:
    """Write a batch script for Slurm, for a job that saves, is requeued and resumes.

    Two minutes before its time limit, and when it is preempted, ranks get SIGTERM, save a
    checkpoint and end; the job is requeued and resumes from there (`--resume auto`).

    Args:
        script: Job to write.
        out: File for the script (default: standard output).
    """
    return _write(script.text(), out, f"submit it with sbatch {out}")


def k8s_manifest(
    manifest: Annotated[KubernetesManifest, tyro.conf.arg(name="")], *, out: Text = ""
) -> int:
    """Write a manifest for Kubernetes: an Indexed Job with its service and a new secret.

    Pod 0 shows the output of all ranks and the error block: kubectl logs -l job-name=NAME.

    Args:
        manifest: Job to write.
        out: File for the manifest, which holds the secret (default: standard output).
    """
    import secrets

    from braid.runtime.wire import SECRET_BYTES

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
            os.fchmod(fd, 0o600)  # also for an existing file
            file.write(text)
    except OSError as exc:
        msg = f"{out} cannot be written: {exc.strerror}; choose another path"
        raise ConfigError(msg) from exc
    print(f"{out}: {hint}")
    return 0
