"""Explains NCCL's error about ranks that share a GPU.

NCCL refuses such ranks with the first collective, as an "invalid usage" with the PCI bus of the GPU
in the last line of its text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from braid.errors import ConfigError

__all__ = ["shared_gpu_error"]

DUPLICATE = re.compile(
    r"Duplicate GPU detected ?: rank (\d+) and rank (\d+) both on CUDA device (\w+)"
)


def shared_gpu_error(text: str, ranks: Sequence[int]) -> ConfigError | None:
    """Return an error that names the ranks which share a GPU; None for other texts.

    Args:
        text: Text of an exception of NCCL.
        ranks: Global ranks of the members of its group.
    """
    match = DUPLICATE.search(text)
    if match is None:
        return None
    first, second = sorted(ranks[int(member)] for member in match.groups()[:2])
    msg = (
        f"ranks {first} and {second} are both on the GPU at PCI bus {match[3]}, and NCCL needs a "
        "GPU for each rank: call torch.cuda.set_device(local_rank) before the first operation. "
        "Ranks that must share a GPU can use the group of braid.init() without NCCL, which copies "
        "their tensors through page-locked memory"
    )
    return ConfigError(msg)
