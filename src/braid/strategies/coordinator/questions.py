"""Functions of braid that a coordinator asks workers to call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from braid.ps.storage import State
from braid.rpc.names import register
from braid.strategies.parameter_server.variables import ServerVariables

__all__ = ["export", "iterator_of", "oldest_task", "values"]


@register
def oldest_task(variables: ServerVariables) -> int:
    """Return the number of the oldest task that servers do not know to be finished."""
    return variables.oldest_task()


@register
def export(variables: ServerVariables) -> dict[str, State]:
    """Return values and optimizer state of each variable, by name."""
    return variables.export()


@register
def values(variables: ServerVariables) -> dict[str, torch.Tensor]:
    """Return the current values of all variables, by name."""
    variables.pull_all()
    return variables.values()


@register
def iterator_of(dataset_fn: Callable[..., Iterable[Any]]) -> Iterator[Any]:
    """Return a new iterator over the data set that `dataset_fn` makes."""
    return iter(dataset_fn())
