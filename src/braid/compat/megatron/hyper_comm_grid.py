"""`megatron.core.hyper_comm_grid`: groups along any dims of a grid of ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from braid.compat.megatron.failure import GroupNotInitializedError, UsageError
from braid.compat.megatron.groups import check_initialized, create_group
from braid.compat.megatron.rank_generator import generate_masked_orthogonal_rank_groups
from braid.errors import raise_all

__all__ = ["HyperCommGrid"]


class HyperCommGrid:
    """A grid of ranks with named dims, and the groups along some of the dims.

    Args:
        shape: Length of each dim, the fastest varying dim first.
        dim_names: Names of the dims.
        rank_offset: First rank.
        backend: None, "braid", "nccl" or "gloo"; a group of braid replaces all of them.

    Raises:
        UsageError: Shape, names and number of ranks do not fit; the message has all problems.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dim_names: Sequence[str],
        rank_offset: int = 0,
        backend: str | None = None,
    ) -> None:
        self.shape, self.dim_names = list(shape), list(dim_names)
        self.rank_offset, self.backend = rank_offset, backend
        self.size = math.prod(shape)
        self._groups: dict[str, Any] = {}
        problems = []
        if len(shape) != len(dim_names) or len(set(dim_names)) != len(dim_names):
            problems.append(
                f"shape {self.shape} needs {len(shape)} different dim_names, one per dim, got "
                f"{self.dim_names}"
            )
        if any(length < 1 for length in shape):
            problems.append(f"shape {self.shape} must have lengths of at least 1")
        if rank_offset < 0:
            problems.append(f"rank_offset must not be negative, got {rank_offset}")
        world_size = _world_size()
        if self.size + rank_offset > world_size:
            problems.append(
                f"shape {self.shape} from rank {rank_offset} needs {self.size + rank_offset} "
                f"ranks, but the job has {world_size}: choose a smaller shape"
            )
        raise_all(problems, UsageError)

    def create_pg(self, dims: str | Sequence[str], **kwargs: Any) -> Any:
        """Create the groups along some dims; all ranks call this.

        Args:
            dims: Dims along which the ranks of a group differ.
            kwargs: `timeout` and `group_desc`, as in `torch.distributed.new_group`.

        Returns:
            The group of this rank; None if it is outside of the grid.

        Raises:
            KeyError: These groups exist already.
        """
        check_initialized()
        key = self._key(dims)
        if key in self._groups:
            msg = (
                f"groups along {key} have been created already: call get_pg({key!r}) for this "
                "rank's group"
            )
            raise KeyError(msg)
        local_group = None
        for ranks in self.get_rank_enum(dims):
            made = create_group(ranks, backend=self.backend, **kwargs)
            local_group = made if dist.get_rank() in ranks else local_group
        self._groups[key] = local_group
        return local_group

    def get_pg(self, dims: str | Sequence[str]) -> Any:
        """Return the group of this rank along some dims.

        Raises:
            KeyError: `create_pg` has not been called for these dims.
        """
        key = self._key(dims)
        if key not in self._groups:
            msg = f"groups along {key} have not been created: call create_pg first, on all ranks"
            raise KeyError(msg)
        return self._groups[key]

    def get_rank_enum(self, dims: str | Sequence[str]) -> list[list[int]]:
        """Return the ranks of all groups along some dims."""
        names = self._names(dims)
        groups = generate_masked_orthogonal_rank_groups(
            self.size, self.shape, [name in names for name in self.dim_names]
        )
        return [[rank + self.rank_offset for rank in group] for group in groups]

    def _key(self, dims: str | Sequence[str]) -> str:
        return "-".join(self._names(dims))

    def _names(self, dims: str | Sequence[str]) -> list[str]:
        """Return the names of dims, the slowest varying dim first."""
        names = [dims] if isinstance(dims, str) else list(dims)
        if unknown := [name for name in names if name not in self.dim_names]:
            msg = f"unknown dim {', '.join(unknown)}: the grid has {', '.join(self.dim_names)}"
            raise UsageError(msg)
        return [name for name in reversed(self.dim_names) if name in names]


def _world_size() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    msg = (
        "the number of ranks is not known: call torch.distributed.init_process_group('braid') "
        "first, or set WORLD_SIZE"
    )
    raise GroupNotInitializedError(msg)
