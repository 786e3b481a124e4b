"""`megatron.core.hyper_comm_grid`: groups along any dims of a grid of ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from braid.compat.megatron.failure import GroupNotInitializedError, UsageError
from braid.compat.megatron.groups import check_initialized, create_group
from braid.compat.megatron.rank_generator import generate_masked_orthogonal_rank_groups
from braid.errors import raise_all

__all__ = ["HyperCommGrid"]


BASE = "base"


class _View(NamedTuple):
    """A shape of the ranks of a grid."""

    name: str
    shape: list[int]
    dim_names: list[str]
    shared_dims: Sequence[str] = ()
    base: _View | None = None  # the grid itself, if this is another view

    def names(self, dims: str | Sequence[str]) -> list[str]:
        """Return the names of dims, the slowest varying dim first."""
        names = [dims] if isinstance(dims, str) else list(dims)
        if unknown := [name for name in names if name not in self.dim_names]:
            msg = f"unknown dim {', '.join(unknown)}: the grid has {', '.join(self.dim_names)}"
            raise UsageError(msg)
        return [name for name in reversed(self.dim_names) if name in names]


class _Key(NamedTuple):
    view: str
    dims: str


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
        self._groups: dict[_Key, Any] = {}
        self._views = {BASE: _View(BASE, self.shape, self.dim_names)}
        problems = _problems(self.shape, self.dim_names)
        if rank_offset < 0:
            problems.append(f"rank_offset must not be negative, got {rank_offset}")
        world_size = _world_size()
        if self.size + rank_offset > world_size:
            problems.append(
                f"shape {self.shape} from rank {rank_offset} needs {self.size + rank_offset} "
                f"ranks, but the job has {world_size}: choose a smaller shape"
            )
        raise_all(problems, UsageError)

    def register_view(
        self,
        name: str,
        shape: Sequence[int],
        dim_names: Sequence[str],
        shared_dims: Sequence[str] | None = None,
    ) -> None:
        """Register another shape of the same ranks, such as for experts.

        Args:
            name: Name of the view, for the argument `view` of the other methods.
            shape: Length of each dim, the fastest varying dim first.
            dim_names: Names of the dims.
            shared_dims: Dims with the same groups as in the grid, alone and together; groups along
                these dims are the grid's.

        Raises:
            UsageError: The view exists, or does not fit the grid; the message has all problems.
        """
        view, shared = _View(name, list(shape), list(dim_names)), list(shared_dims or ())
        problems = [f"the view {name!r} exists: use another name"] if name in self._views else []
        problems += _problems(view.shape, view.dim_names)
        if math.prod(view.shape) != self.size:
            problems.append(
                f"shape {view.shape} of the view {name!r} has {math.prod(view.shape)} ranks, but "
                f"the grid has {self.size}"
            )
        missing = [x for x in shared if x not in self.dim_names or x not in view.dim_names]
        if missing or len(set(shared)) != len(shared):
            problems.append(f"shared_dims {shared} must be different dims of the grid and the view")
        raise_all(problems, UsageError)
        base = self._views[BASE]
        for dims in ([name] for name in shared):
            problems += self._unequal(view, dims)
        problems += self._unequal(view, shared) if len(shared) > 1 and not problems else []
        raise_all(problems, UsageError)
        self._views[name] = view._replace(shared_dims=tuple(shared), base=base)

    def create_pg(
        self, dims: str | Sequence[str], *, view: str | None = None, **kwargs: Any
    ) -> Any:
        """Create the groups along some dims; all ranks call this.

        Args:
            dims: Dims along which the ranks of a group differ.
            view: Name of a view; None for the grid itself.
            kwargs: `timeout` and `group_desc`, as in `torch.distributed.new_group`.

        Returns:
            The group of this rank; None if it is outside of the grid.

        Raises:
            KeyError: These groups exist already, or the view does not.
        """
        check_initialized()
        key = self._key(dims, view)
        if key in self._groups:
            msg = (
                f"groups along {key.dims} have been created already: call "
                f"get_pg({_arguments(dims, key)}) for this rank's group"
            )
            raise KeyError(msg)
        local_group = None
        for ranks in self.get_rank_enum(dims, view=view):
            made = create_group(ranks, backend=self.backend, **kwargs)
            local_group = made if dist.get_rank() in ranks else local_group
        self._groups[key] = local_group
        return local_group

    def get_pg(self, dims: str | Sequence[str], *, view: str | None = None) -> Any:
        """Return the group of this rank along some dims.

        Raises:
            KeyError: `create_pg` has not been called for these dims, or the view does not exist.
        """
        key = self._key(dims, view)
        if key not in self._groups:
            msg = (
                f"groups along {key.dims} have not been created: call "
                f"create_pg({_arguments(dims, key)}) first, on all ranks"
            )
            raise KeyError(msg)
        return self._groups[key]

    def get_rank_enum(
        self, dims: str | Sequence[str], *, view: str | None = None
    ) -> list[list[int]]:
        """Return the ranks of all groups along some dims, of the grid or of a view."""
        return self._ranks(self._view(view), dims)

    def is_current_rank_in_grid(self) -> bool:
        """Return whether this rank belongs to the grid."""
        return bool(self.rank_offset <= dist.get_rank() < self.rank_offset + self.size)

    def destroy(self) -> None:
        """End all groups of this rank that the grid has created."""
        groups = [group for group in self._groups.values() if group is not None]
        self._groups.clear()
        for group in groups:
            dist.destroy_process_group(group)

    def _ranks(self, view: _View, dims: str | Sequence[str]) -> list[list[int]]:
        names = view.names(dims)
        groups = generate_masked_orthogonal_rank_groups(
            self.size, view.shape, [name in names for name in view.dim_names]
        )
        return [[rank + self.rank_offset for rank in group] for group in groups]

    def _unequal(self, view: _View, dims: Sequence[str]) -> list[str]:
        """Return the problem of shared dims with other groups in a view than in the grid."""
        here, there = self._ranks(self._views[BASE], dims), self._ranks(view, dims)
        if here == there:
            return []
        return [f"shared_dims {list(dims)} have ranks {there} in the view, but {here} in the grid"]

    def _view(self, name: str | None) -> _View:
        key = BASE if name is None else name
        if key not in self._views:
            known = ", ".join(self._views)
            msg = f"unknown view {key!r}: the grid has {known}; call register_view first"
            raise KeyError(msg)
        return self._views[key]

    def _key(self, dims: str | Sequence[str], name: str | None) -> _Key:
        """Return the key of groups; groups along shared dims belong to the grid itself."""
        view = self._view(name)
        names = view.names(dims)
        if view.base is not None and all(dim in view.shared_dims for dim in names):
            view = view.base
        return _Key(view.name, "-".join(view.names(names)))


def _arguments(dims: str | Sequence[str], key: _Key) -> str:
    """Return the text of arguments that select groups, for an error."""
    return repr(dims) if key.view == BASE else f"{dims!r}, view={key.view!r}"


def _problems(shape: Sequence[int], dim_names: Sequence[str]) -> list[str]:
    """Return the problems of a shape and the names of its dims."""
    problems = []
    if len(shape) != len(dim_names) or len(set(dim_names)) != len(dim_names):
        problems.append(
            f"shape {list(shape)} needs {len(shape)} different dim_names, one per dim, got "
            f"{list(dim_names)}"
        )
    if any(length < 1 for length in shape):
        problems.append(f"shape {list(shape)} must have lengths of at least 1")
    return problems


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
