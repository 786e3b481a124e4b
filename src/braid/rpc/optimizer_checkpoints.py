"""Checkpoints of optimizers for parameters that live in several nodes.

    params/3               the fourth parameter that DistributedOptimizer was given
    optimizer/3/exp_avg    its state

Parameters are identified by their position among all parameters, not by node, so that a run can
resume on other nodes. The format is described in `braid.checkpoint`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from braid.checkpoint import ReplicatedSnapshot, open_last, save_alone
from braid.checkpoint.plain_values import from_plain, to_plain
from braid.errors import CheckpointError
from braid.rpc.names import register

__all__ = ["Part", "read", "write"]


@register
class Part(NamedTuple):
    """Parameters and optimizer states of one node, in a checkpoint.

    Attributes:
        params: Values of the parameters.
        states: State of each parameter in the optimizer.
        settings: Settings of the groups with parameters on the node.
    """

    params: list[torch.Tensor]
    states: list[dict[str, Any]]
    settings: list[dict[str, Any]]


def write(
    directory: str | os.PathLike[str],
    parts: Sequence[tuple[Sequence[int], Sequence[int], Part]],
    *,
    step: int,
    keep: int | None,
) -> Path:
    """Write the parameters and states of all nodes as a checkpoint.

    Args:
        directory: Directory of checkpoints.
        parts: For each node, the positions of its parameters and of its groups, and its `Part`.
        step: Number of completed steps.
        keep: Number of checkpoints to keep; all when None.
    """
    tensors: dict[str, torch.Tensor] = {}
    states: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    for places, numbers, part in parts:
        for place, param, state in zip(places, part.params, part.states, strict=True):
            tensors[f"params/{place}"] = param
            states[str(place)] = to_plain(state, f"optimizer/{place}", tensors)
        for number, settings in zip(numbers, part.settings, strict=True):
            groups[str(number)] = to_plain(settings, f"groups/{number}", {})
    state = {"optimizer": {"states": states, "groups": groups}}
    return save_alone(directory, [ReplicatedSnapshot(tensors)], step=step, state=state, keep=keep)


def read(
    directory: str | os.PathLike[str],
    places: Sequence[tuple[Sequence[int], Sequence[int]]],
    num_groups: int,
    shapes: Sequence[Sequence[Sequence[int]]],
) -> tuple[int, list[Part]]:
    """Return the step of the last checkpoint, and the `Part` of each node.

    Args:
        directory: Directory of checkpoints.
        places: For each node, the positions of its parameters and of its groups.
        num_groups: Number of groups.
        shapes: For each node the shapes of its parameters.

    Raises:
        CheckpointError: No checkpoint exists, it is damaged, or has other parameters or groups.
    """
    checkpoint = open_last(directory)
    kept = checkpoint.manifest.state.get("optimizer", {})
    states, groups = kept.get("states", {}), kept.get("groups", {})
    wanted = sorted(place for positions, _ in places for place in positions)
    if sorted(map(int, states)) != wanted or sorted(map(int, groups)) != list(range(num_groups)):
        msg = (
            f"{checkpoint.path} has {len(states)} parameters in {len(groups)} groups, but this "
            f"optimizer has {len(wanted)} in {num_groups}: make it with the references of the "
            "saved run, in the same order"
        )
        raise CheckpointError(msg)
    parts = [
        Part(
            [checkpoint.read(f"params/{place}") for place in positions],
            [from_plain(states[str(place)], checkpoint.read) for place in positions],
            [from_plain(groups[str(number)], checkpoint.read) for number in numbers],
        )
        for positions, numbers in places
    ]
    for (positions, _), wants, part in zip(places, shapes, parts, strict=True):
        for place, want, param in zip(positions, wants, part.params, strict=True):
            if list(param.shape) != list(want):
                msg = (
                    f"parameter {place} has shape {list(param.shape)} in {checkpoint.path}, but "
                    f"{list(want)} here: make the optimizer with the references of the saved "
                    "run, in the same order"
                )
                raise CheckpointError(msg)
    return checkpoint.manifest.step, parts
