"""The table that `--check-build` prints, in horovodrun's format.

A separate process imports torch: the launcher does not import it, and a broken installation must
not break the table.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec

from braid._version import __version__

__all__ = ["build_table", "check_build"]

FRONT = "braid.compat.horovod.torch"
QUESTION = """
import json, torch
from torch import distributed as d
nccl = d.is_available() and d.is_nccl_available()
print(json.dumps({"torch": torch.__version__, "nccl": nccl, "cuda": torch.cuda.is_available()}))
"""
LIMIT_S = 120.0  # a cold start of torch from a shared file system


def check_build() -> str:
    """Return the table of frameworks and operations of this installation."""
    facts: dict[str, object] = {}
    try:
        answer = subprocess.run(
            [sys.executable, "-c", QUESTION],
            capture_output=True,
            check=True,
            timeout=LIMIT_S,
            stdin=subprocess.DEVNULL,
        )
        facts = json.loads(answer.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        pass  # torch is missing or broken
    return build_table(facts, has_front=find_spec(FRONT) is not None)


def build_table(facts: Mapping[str, object], *, has_front: bool) -> str:
    """Return the table of `--check-build` for these properties of torch.

    Args:
        facts: `torch`: version of torch; `nccl`: whether torch has NCCL; `cuda`: whether it finds a
            GPU. Empty without torch.
        has_front: Whether `braid.compat.horovod.torch` is installed.
    """
    torch = facts.get("torch", "")
    nccl = bool(facts.get("nccl"))
    unseen = "" if not nccl or facts.get("cuda") else " (no GPU is seen here)"
    groups = {
        "Available Frameworks": {
            "TensorFlow": False,
            f"PyTorch {torch}".rstrip(): bool(torch) and has_front,
            "MXNet": False,
        },
        "Available Controllers": {
            "MPI": False,
            "Gloo": False,
            "braid: shared memory and sockets": True,
        },
        "Available Tensor Operations": {
            f"NCCL{unseen}": nccl,
            "DDL": False,
            "CCL": False,
            "MPI": False,
            "Gloo": False,
            "braid: shared memory and sockets": True,
        },
    }
    lines = [f"braid {__version__}, as Horovod:"]
    for title, rows in groups.items():
        lines += ["", f"{title}:"]
        lines += [f"    [{'X' if there else ' '}] {name}" for name, there in rows.items()]
    return "\n".join(lines)
