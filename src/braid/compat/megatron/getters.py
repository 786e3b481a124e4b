"""Factories for the functions of `parallel_state` that differ only in the kind of group.

get_tensor_model_parallel_group = group_of("tp")
get_tensor_model_parallel_world_size = size_of("tp")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from braid.compat.megatron.state import NAMES, STATE

__all__ = ["first_of", "group_of", "rank_of", "set_rank_of", "set_size_of", "size_of"]


F = TypeVar("F", bound=Callable[..., Any])


class GroupGetter(Protocol):
    """Function of Megatron's `parallel_state` that returns a process group."""

    def __call__(self, check_initialized: bool = True) -> Any:
        """Return the group; raise if there is none and `check_initialized`, else return None."""


def group_of(kind: str) -> GroupGetter:
    """Return a function that returns this rank's group of a kind, such as `tp`."""

    def group(check_initialized: bool = True) -> Any:
        return STATE.group(kind, check_initialized=check_initialized)

    return _documented(group, f"Return the {NAMES[kind]}.")


def size_of(kind: str, *, alone: int | None = None) -> Callable[[], int]:
    """Return a function that returns the number of ranks in this rank's group of a kind.

    Args:
        kind: Kind of group, such as `tp`; see `group_plan`.
        alone: Result if torch.distributed is not initialized; raises an error when None.
    """

    def size() -> int:
        return STATE.size(kind) if alone is None or _is_known(kind, "size") else alone

    return _documented(size, f"Return the number of ranks of the {NAMES[kind]}.")


def rank_of(kind: str, *, alone: int | None = None) -> Callable[[], int]:
    """Return a function that returns this rank's position in its group of a kind; see `size_of`."""

    def rank() -> int:
        return STATE.rank(kind) if alone is None or _is_known(kind, "rank") else alone

    return _documented(rank, f"Return the rank in the {NAMES[kind]}.")


def first_of(kind: str) -> Callable[[], int]:
    """Return a function that returns the first global rank of this rank's group of a kind."""

    def first() -> int:
        return STATE.members(kind)[0]

    return _documented(first, f"Return the first global rank of the {NAMES[kind]}.")


def set_size_of(kind: str) -> Callable[[int | None], None]:
    """Return a function that sets the number of ranks that the function of `size_of` returns."""

    def set_size(world_size: int | None) -> None:
        STATE.override(f"{kind} size", world_size)

    return _documented(set_size, f"Set the number of ranks of the {NAMES[kind]}; None resets it.")


def set_rank_of(kind: str) -> Callable[[int | None], None]:
    """Return a function that sets the rank, which `rank_of`'s function then returns."""

    def set_rank(rank: int | None) -> None:
        STATE.override(f"{kind} rank", rank)

    return _documented(set_rank, f"Set the rank in the {NAMES[kind]}; None resets it.")


def _is_known(kind: str, what: str) -> bool:
    """Return whether a value is overridden, or torch.distributed is initialized."""
    return f"{kind} {what}" in STATE.overrides or dist.is_initialized()


def _documented(function: F, text: str) -> F:
    function.__doc__ = text
    return function
