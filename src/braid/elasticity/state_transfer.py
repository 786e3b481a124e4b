"""Gives the state of a training to the members that do not have it.

Every replica has the whole state, so no step is lost while one of them lives. Members that come,
and those whose last step was broken while others could end it, get the state of the first member
that has seen most steps. It is taken over only when all of it has arrived: if its sender dies
meanwhile, a member still has the state that it had before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from braid.checkpoint import (
    Checkpoint,
    Manifest,
    TensorEntry,
    restore_training,
    training_numbers,
    training_tensors,
)
from braid.comm import Group
from braid.errors import MismatchError
from braid.parallel.gradients.hashing import checksum
from braid.types import dtype_name

__all__ = ["Stateful", "TrainingState", "transfer"]


class Stateful(Protocol):
    """An object whose state belongs to the training, such as a learning rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Replace the state."""
        ...


class TrainingState(NamedTuple):
    """Objects whose states belong together.

    Attributes:
        model: The model.
        optimizer: Its optimizer.
        others: Further objects by name.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    others: Mapping[str, Stateful]


class _Received(Checkpoint):
    """State in memory, to be loaded as from a checkpoint."""

    def __init__(self, rank: int, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        entries = {
            name: TensorEntry(tuple(tensor.shape), dtype_name(tensor.dtype), ())
            for name, tensor in tensors.items()
        }
        manifest = Manifest(0, entries, {}, state)
        super().__init__(Path(f"the state of rank {rank}"), manifest)
        self._tensors = tensors

    def read(self, name: str, box: tuple[slice, ...] | None = None) -> torch.Tensor:
        tensor = self._tensors[name]
        return tensor if box is None else tensor[box]


def transfer(
    group: Group, num_steps: Sequence[int], state: TrainingState, progress: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Give all members the state of the first one that has seen most steps; a collective.

    Args:
        group: The members.
        num_steps: Number of steps that the state of each has seen; -1 for a newcomer.
        state: State of this member; replaced if another has seen more steps.
        progress: Plain values beside it.

    Returns:
        The values of the member whose state it is.

    Raises:
        MismatchError: Members that have seen as many steps have different states.

    Cost: no bytes if all members have seen as many steps; else one broadcast of the state.
    """
    newest = max(num_steps)
    root = num_steps.index(newest)
    _compare(group, num_steps, state)
    if min(num_steps) == newest >= 0:
        return progress
    tensors = training_tensors(state.model, state.optimizer)
    values: dict[str, Any] = {}
    if group.rank == root:
        values = {
            "specs": {n: (list(t.shape), dtype_name(t.dtype)) for n, t in tensors.items()},
            "numbers": training_numbers(state.model, state.optimizer),
            "others": {name: other.state_dict() for name, other in state.others.items()},
            "progress": dict(progress),
        }
    values = group.objects.broadcast(values, root)
    needs = group.rank != root and (newest < 0 or num_steps[group.rank] != newest)
    received = {}
    for name, (shape, dtype) in values["specs"].items():
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        if group.rank == root:
            tensor.copy_(tensors[name].detach())
        group.broadcast(tensor, root)
        if needs:
            received[name] = tensor
    if needs:
        source = _Received(group.ranks[root], received, values["numbers"])
        restore_training(source, state.model, state.optimizer)
        for name, other in state.others.items():
            other.load_state_dict(values["others"][name])
    newest_progress: Mapping[str, Any] = values["progress"]
    return newest_progress


def _compare(group: Group, num_steps: Sequence[int], state: TrainingState) -> None:
    """Check that members that have seen as many steps have the same parameters."""
    names, params = zip(*state.model.named_parameters(), strict=True)
    own = torch.tensor([checksum(param) for param in params], dtype=torch.int64)
    table = group.all_gather(own).view(group.size, -1)
    root = num_steps.index(max(num_steps))
    if num_steps[root] < 0:
        return  # before the first step everyone gets the state of one
    for rank in range(group.size):
        differing = (table[rank] != table[root]).nonzero().flatten().tolist()
        if num_steps[rank] == num_steps[root] and differing:
            msg = (
                f"after {num_steps[root]} steps rank {group.ranks[rank]} has other values of "
                f"{names[differing[0]]!r} than rank {group.ranks[root]}: something changes "
                "parameters outside of the optimizer, or is not deterministic"
            )
            raise MismatchError(msg)
