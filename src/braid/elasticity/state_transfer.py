"""Gives the state of a training to the members that do not have it.

Every replica has the whole state, so no step is lost while one of them lives. New members,
and members that could not end their last step while others could, get the state of the first member
that has seen most steps. It is taken over only when all of it has arrived: if its sender dies
meanwhile, a member still has the state that it had before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import torch
from torch import nn

from braid.checkpoint import (
    Checkpoint,
    Manifest,
    TensorEntry,
    from_plain,
    restore_training,
    to_plain,
    training_numbers,
    training_tensors,
)
from braid.checkpoint.part_states import ExtraStates
from braid.comm import Group
from braid.comm.autograd.nested import flatten
from braid.errors import CheckpointError, ConfigError, MismatchError
from braid.parallel.gradients import ParamRecord, ParamTable
from braid.runtime.tensor_buffers import checksum
from braid.runtime.torch_internals import version_of
from braid.types import TensorSpec, dtype_name, first_few

__all__ = [
    "Received",
    "Stateful",
    "TrainingState",
    "broadcast_values",
    "check_same_training",
    "compare_others",
    "fingerprint",
    "refuse_changes",
    "refuse_extra_states",
    "sums_of_others",
    "transfer",
]

DAMAGED = "the memory or the network of one of the two hosts is damaged: look at their logs"
BUFFER, OTHERS = "buffer/", "others/"  # beginnings of names
TEMPORARY = "temporary buffer "


class Stateful(Protocol):
    """An object with a state that belongs to the training, such as a learning rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Replace the state."""


class TrainingState(NamedTuple):
    """Model, optimizer and further objects of a training.

    Attributes:
        model: The model.
        optimizer: Optimizer of the model.
        others: Further objects with a state, by name.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    others: Mapping[str, Stateful]


def refuse_extra_states(model: nn.Module) -> None:
    """Raise if a module has an extra state, which forwards on other ranks may change."""
    for name in ExtraStates(model).names:
        msg = (
            f"{name or 'the model'} has an extra state, which new ranks do not receive: remove "
            "get_extra_state()"
        )
        raise ConfigError(msg)


class Received(Checkpoint):
    """State that another member has sent, which can be loaded like a checkpoint.

    Args:
        source: Name of the source of the state, for messages.
        tensors: Tensors by name.
        state: Values other than tensors.
    """

    def __init__(
        self, source: str, tensors: dict[str, torch.Tensor], state: dict[str, Any]
    ) -> None:
        entries = {
            name: TensorEntry(tuple(tensor.shape), dtype_name(tensor.dtype), ())
            for name, tensor in tensors.items()
        }
        manifest = Manifest(0, entries, {}, state)
        super().__init__(Path(source), manifest)
        self._tensors = tensors

    def read(self, name: str, box: tuple[slice, ...] | None = None) -> torch.Tensor:
        """Return a received tensor, or slices of it."""
        tensor = self._tensors[name]
        return tensor if box is None else tensor[box]


def transfer(
    group: Group, num_steps: Sequence[int], state: TrainingState, progress: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Copy the state with the most steps, from the first such member, to all; a collective.

    Args:
        group: The members.
        num_steps: Number of steps that each member's state includes; -1 for a newcomer.
        state: State of this member; replaced if another member's state includes more steps.
        progress: Further plain values of this member.

    Returns:
        `progress` of the member that has sent the state.

    Raises:
        MismatchError: Members after the same number of steps have different states.

    Cost: one broadcast of the state, unless all members have the same number of steps.
    """
    newest = max(num_steps)
    root = num_steps.index(newest)
    _compare(group, num_steps, state)
    if min(num_steps) == newest >= 0:
        return progress
    tensors = training_tensors(state.model, state.optimizer)
    buffers = {f"{BUFFER}{name}": b for name, b in state.model.named_buffers()}  # also temporary
    tensors.update(buffers)
    values: dict[str, Any] = {}
    if group.rank == root:
        others = {n: to_plain(o.state_dict(), f"{OTHERS}{n}", tensors) for n, o in _others(state)}
        values = {
            "specs": {
                n: (list(t.shape), dtype_name(t.dtype), checksum(t)) for n, t in tensors.items()
            },
            "numbers": training_numbers(state.model, state.optimizer),
            "others": others,
            "progress": dict(progress),
        }
    values = group.objects.broadcast(values, root)
    needs = group.rank != root and (newest < 0 or num_steps[group.rank] != newest)
    received = {}
    part = group.split(0 if needs or group.rank == root else None, key=group.rank != root)
    newest_progress: Mapping[str, Any] = values["progress"]
    if part is None:
        return newest_progress  # this member has the state, and does not wait for others
    for name, (shape, dtype, _) in values["specs"].items():
        if needs:
            tensor = received[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        else:
            tensor = tensors[name].detach().to("cpu").contiguous()
        part.broadcast(tensor, 0)
    part.close()
    if needs:
        sums = {name: sum_ for name, (_, _, sum_) in values["specs"].items()}
        damaged = [name for name, tensor in received.items() if checksum(tensor) != sums[name]]
        if damaged:
            msg = f"{first_few(damaged)} arrived with other values than were sent: {DAMAGED}"
            raise CheckpointError(msg)  # not a loss of a member, after which all would try again
        stored = {n: t for n, t in received.items() if not n.startswith((BUFFER, OTHERS))}
        number = group.context.health.number(group.ranks[root])
        source = Received(f"the state of rank {number}", stored, values["numbers"])
        restore_training(source, state.model, state.optimizer)
        for name, buffer in buffers.items():
            buffer.data.copy_(received[name])
        for name, other in _others(state):
            other.load_state_dict(from_plain(values["others"][name], received.__getitem__))
    return newest_progress


def check_same_training(
    group: Group, num_steps: Sequence[int], state: TrainingState, progress: Mapping[str, Any]
) -> None:
    """Raise MismatchError if this member has other objects than the newest member; a collective.

    Only a member that differs raises, so the remaining members can continue without it.

    Args:
        group: The members.
        num_steps: See `transfer`.
        state: Whole model, optimizer and other objects of this member.
        progress: See `transfer`; it has the number of the training in its program.
    """
    newest = max(num_steps)
    root = num_steps.index(newest)
    training, facts = progress["training"], _facts(state)
    theirs, expected = group.objects.broadcast((training, facts), root)
    if theirs != training:
        msg = (
            f"this rank joins training {training} of its program, but the other ranks are in "
            f"training {theirs}: call braid.elastic once per program, or resume each stage "
            "separately"
        )
        raise MismatchError(msg)
    differences = [
        f"{name} is {facts.get(name, 'missing')} here and {expected.get(name, 'missing')} there"
        for name in expected | facts
        if facts.get(name) != expected.get(name)
        # a forward may make temporary buffers, and change their shapes
        and not (name.startswith(TEMPORARY) and (name not in facts or num_steps[group.rank] >= 0))
    ]
    orders = [
        [name for name in names if name.startswith("parameter ")] for names in (facts, expected)
    ]
    if not differences and orders[0] != orders[1]:
        differences.append("parameters have another order")
    if differences:
        msg = (
            "this rank has other objects than the other ranks: "
            f"{first_few(differences, separator='; ')}. Make the same model, optimizer and other "
            "objects on all ranks"
        )
        raise MismatchError(msg)


def compare_others(group: Group, state: TrainingState | None) -> None:
    """Raise if further objects (`others`) differ between members of a mesh; a collective.

    Args:
        group: The members.
        state: Objects of this member; None if it has none.

    Raises:
        MismatchError: States differ, such as averages of the weights of one stage.
    """
    sums = {} if state is None else sums_of_others(state)
    expected: dict[str, tuple[int, int]] = {}
    numbers = map(group.context.health.number, group.ranks)
    for rank, theirs in zip(numbers, group.objects.all_gather(sums), strict=True):
        for name, value in theirs.items():
            first, known = expected.setdefault(name, (rank, value))
            if value != known:
                msg = (
                    f"{name} has other values on rank {rank} than on rank {first}, but new ranks "
                    "receive one state of it: pass objects that are the same on all ranks, such "
                    "as a scheduler"
                )
                raise MismatchError(msg)


def broadcast_values(group: Group, root: int, value: Any) -> Any:
    """Return the root's nested values, which may have tensors, on all members; a collective."""
    tensors: dict[str, torch.Tensor] = {}
    packed = to_plain(value, "value", tensors) if group.rank == root else None
    specs = {n: (list(t.shape), dtype_name(t.dtype)) for n, t in tensors.items()}
    packed, specs = group.objects.broadcast((packed, specs), root)
    received = {}
    for name, (shape, dtype) in specs.items():
        received[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        if group.rank == root:
            received[name].copy_(tensors[name])
        group.broadcast(received[name], root)
    return from_plain(packed, received.__getitem__)


def fingerprint(state: TrainingState) -> dict[str, str]:
    """Return texts by name that differ after an update of the training has changed an object.

    They contain the options of the optimizer and the states of further objects. For tensors, they
    contain only the number of writes.
    """
    groups = [{k: v for k, v in g.items() if k != "params"} for g in state.optimizer.param_groups]
    texts = {"the optimizer's options": _text(groups)}
    return texts | {name: _text(other.state_dict()) for name, other in _others(state)}


def refuse_changes(
    state: TrainingState, before: Mapping[str, str], records: Sequence[ParamRecord]
) -> None:
    """Raise if the state was changed outside of an update, since ranks could then differ.

    Args:
        state: Model, optimizer and other objects of the training.
        before: `fingerprint` of these objects after the last update.
        records: Trained parameters; they must not be frozen or unfrozen either.

    Raises:
        ConfigError: An object, or `requires_grad` of a parameter, has changed.
    """
    now = fingerprint(state)
    changed = [name for name, text in now.items() if before[name] != text]
    if changed:
        msg = (
            f"{changed[0]} changed outside of the function update=, which would make ranks "
            "differ: change it in update=, such as by scheduler.step(). There, "
            "training.ends_epoch is True in the last step of a pass"
        )
        raise ConfigError(msg)
    for record in records:
        if record.param.requires_grad != record.spec.requires_grad:
            word = "frozen" if record.spec.requires_grad else "unfrozen"
            msg = (
                f"{record.name} was {word} after braid.elastic was called: begin another "
                "braid.elastic for the next stage of the training"
            )
            raise ConfigError(msg)


def _facts(state: TrainingState) -> dict[str, str]:
    """Return a text for each object of a training; equal on ranks that can train together."""
    groups = {p: n for n, g in enumerate(state.optimizer.param_groups) for p in g["params"]}
    facts = {
        "optimizer": type(state.optimizer).__name__,
        "number of parameter groups": str(len(state.optimizer.param_groups)),
    } | {f"object {name}": type(other).__name__ for name, other in _others(state)}
    for record in ParamTable.of(state.model).records:
        text = str(record).removeprefix(record.name).strip()
        place = groups.get(record.param, "none")
        facts[f"parameter {record.name}"] = f"{text} (parameter group {place})"
    kept = training_tensors(state.model)
    for name, buffer in state.model.named_buffers():
        kind = "buffer " if f"model/{name}" in kept else TEMPORARY
        facts[f"{kind}{name}"] = str(TensorSpec(tuple(buffer.shape), dtype_name(buffer.dtype)))
    return facts


def _text(value: Any) -> str:
    without, tensors = flatten(value)
    return f"{without} {list(map(version_of, tensors))}"


def sums_of_others(state: TrainingState) -> dict[str, int]:
    """Return a checksum of the state of each further object, by name."""
    sums = {}
    for name, other in _others(state):
        plain, tensors = flatten(other.state_dict())
        sums[name] = crc32(f"{plain} {list(map(checksum, tensors))}".encode())
    return sums


def _others(state: TrainingState) -> list[tuple[str, Stateful]]:
    return list(state.others.items())


def _compare(group: Group, num_steps: Sequence[int], state: TrainingState) -> None:
    """Check that members after the same number of steps have the same parameters."""
    root = num_steps.index(max(num_steps))
    if num_steps[root] < 0 or num_steps.count(num_steps[root]) == 1:
        return  # before the first step everyone gets the state of one
    names, params = zip(*state.model.named_parameters(), strict=True)
    has_newest = num_steps[group.rank] == num_steps[root]
    sums = torch.tensor([checksum(p) if has_newest else 0 for p in params], dtype=torch.int64)
    table = group.all_gather(sums).view(group.size, -1)
    for rank in range(group.size):
        differing = (table[rank] != table[root]).nonzero().flatten().tolist()
        if num_steps[rank] == num_steps[root] and differing:
            number, first = (group.context.health.number(group.ranks[r]) for r in (rank, root))
            msg = (
                f"after {num_steps[root]} steps rank {number} has other values of "
                f"{names[differing[0]]!r} than rank {first}: something changes "
                "parameters outside of the optimizer, or is not deterministic"
            )
            raise MismatchError(msg)
