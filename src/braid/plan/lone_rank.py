"""A group with only one existing rank, to run one rank's shard of sharded layers.

Its collectives send nothing and record the bytes that they would send. So shards of layers can be
measured, or their operations counted, without the other ranks.
"""

from __future__ import annotations

from typing import Any

import torch

from braid.comm import Group

__all__ = ["LoneRank"]


class _Done:
    """Work that has ended."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Return immediately."""


class LoneRank(Group):
    """Group whose only process is rank 0, to run one rank's shard of sharded layers alone.

    Args:
        size: Number of ranks.

    Attributes:
        reduced: Bytes of each all-reduce since `clear`.
    """

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size
        self.ranks = tuple(range(size))
        self.reduced: list[int] = []

    def all_reduce(self, x: Any, op: str = "sum", **options: Any) -> Any:
        """Count the bytes of an all_reduce of `x`, which stays unchanged."""
        del op
        self.reduced.append(x.nbytes)
        if options.get("async_op"):
            return _Done()
        out = options.get("out")
        if out is None:
            return x
        return out if out.is_meta else out.copy_(x)

    def all_gather(self, x: Any, **_: Any) -> Any:
        """Return the gathered tensor for the case that all ranks pass the same `x`."""
        return torch.cat([x] * self.size)

    def starting(self, **_: Any) -> Any:
        """Return the group; its operations complete immediately."""
        return self

    def __repr__(self) -> str:
        """Return the size."""
        return f"LoneRank(of {self.size})"
