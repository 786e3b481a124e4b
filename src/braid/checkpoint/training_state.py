"""Conversion of a model and an optimizer to named tensors and numbers, and back.

Problem: `optimizer.state_dict()` numbers parameters, so a model whose parameters are created in
another order silently gets the wrong moments. Idea: everything is stored under the parameter's
name.

    model/blocks.0.attention.weight                parameters (tied ones once), persistent buffers
    optimizer/blocks.0.attention.weight/exp_avg    tensors of the optimizer's state
    optimizer_state_dict/diloco/start/0            other tensors in its state_dict(), also in lists
    own/...                                        any of the above, if values differ between ranks

    state: {"optimizer": {"groups": [{"names": [...], "lr": 0.001, ...}],
                          "numbers": {name: {...}},
                          "rest": {"diloco": {...}}}}
    state: {"generators": {name: base64 of its state}}
    state: {"tied": {"head.weight": "token.weight"}}    further name of a tensor -> its stored name

An optimizer with local steps has a method `is_own(name, tensor)`. It returns whether the tensor
with one of these names can differ between ranks.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from braid.checkpoint.loading import Checkpoint
from braid.checkpoint.plain_values import from_plain, to_plain
from braid.checkpoint.snapshot import OWN
from braid.checkpoint.stored_state import generator_states, require_like, stored_optimizer
from braid.comm import Group
from braid.errors import CheckpointError, ConfigError, message_of
from braid.runtime.torch_internals import PART_ENTRY
from braid.types import TensorSpec, dtype_name

__all__ = [
    "TIED",
    "kept_buffers",
    "merged_numbers",
    "restore_training",
    "training_numbers",
    "training_tensors",
]

Generators = Mapping[str, torch.Generator]
REST = "optimizer_state_dict"
ROOTS = ("optimizer", REST)
TIED = "tied"


def training_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, torch.Tensor]:
    """Return parameters, buffers and the optimizer's tensors by name, without a copy.

    Names of tensors that differ between ranks begin with `own/`; see `ReplicatedSnapshot`.

    Raises:
        ConfigError: The optimizer has a parameter that is not in the model, or a value that cannot
            be stored.
    """
    tensors = {f"model/{name}": tensor for name, tensor in _model_tensors(model).items()}
    if optimizer is not None:
        tensors.update(_filed(model, optimizer)[0])
    is_own = getattr(optimizer, "is_own", None)
    if is_own is None:
        return tensors
    return {OWN * bool(is_own(name, tensor)) + name: tensor for name, tensor in tensors.items()}


def kept_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's persistent buffers (those in its state dict) by name."""
    kept = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def training_numbers(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    generators: Generators | None = None,
) -> dict[str, Any]:
    """Return the values of a training that are not tensors, for a checkpoint's `state`.

    The values are equal on all ranks.

    Raises:
        ConfigError: As for `training_tensors`.
    """
    numbers: dict[str, Any] = {}
    if tied := _tied_names(model):
        numbers[TIED] = tied
    if optimizer is not None:
        numbers["optimizer"] = _filed(model, optimizer)[1]
    if generators:
        numbers["generators"] = {
            name: base64.b64encode(bytes(generator.get_state().tolist())).decode()
            for name, generator in generators.items()
        }
    return numbers


def merged_numbers(numbers: dict[str, Any], group: Group) -> dict[str, Any]:
    """Merge `training_numbers` of ranks with states of different parameters; a collective.

    Args:
        numbers: Result of `training_numbers`; equal on all ranks except for the states.
        group: The ranks; if several ranks have the state of a parameter, the first one is used.

    Raises:
        ConfigError: The ranks' optimizers have different parameters.
    """
    if "optimizer" not in numbers:
        return numbers
    optimizer_numbers = numbers["optimizer"]
    names = [sorted(one["names"]) for one in optimizer_numbers["groups"]]
    merged: dict[str, dict[str, Any]] = {}
    all_names = []
    for theirs_names, theirs in reversed(
        group.objects.all_gather((names, optimizer_numbers["numbers"]))
    ):
        all_names.append(theirs_names)
        merged.update(theirs)
    if any(theirs != names for theirs in all_names):
        counts = [sum(map(len, theirs)) for theirs in reversed(all_names)]
        msg = (
            f"the optimizers of ranks {list(group.ranks)} have {counts} parameters, but a "
            "checkpoint stores one optimizer for all ranks: make it from model.parameters() on "
            "each rank"
        )
        raise ConfigError(msg)
    return {**numbers, "optimizer": {**optimizer_numbers, "numbers": merged}}


def restore_training(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    generators: Generators | None = None,
) -> None:
    """Load a checkpoint into a model, an optimizer and generators.

    Raises:
        CheckpointError: The checkpoint has another model or optimizer (the message has a table of
            the differences), has per-rank tensors of another number of ranks, or has an invalid
            field (the message names it). Nothing has changed, except where the message mentions it.
    """
    params = _model_tensors(model)
    checkpoint.require_own(["model", *ROOTS] if optimizer is not None else ["model"])
    checkpoint.require(
        {
            f"model/{name}": TensorSpec(tuple(t.shape), dtype_name(t.dtype))
            for name, t in params.items()
        }
    )
    states = generator_states(checkpoint.path, checkpoint.manifest.state, generators or {})
    if optimizer is not None:
        loaded = _optimizer_state(checkpoint, model, optimizer)
        try:
            optimizer.load_state_dict(loaded)
        except (AttributeError, IndexError, LookupError, TypeError, ValueError) as exc:
            msg = (
                f"{type(optimizer).__name__} cannot load state.optimizer of {checkpoint.path} "
                f"({type(exc).__name__}: {message_of(exc)}) and may have loaded a part of it: make "
                "a new optimizer, and use another checkpoint of this run"
            )
            raise CheckpointError(msg) from exc
    with torch.no_grad():
        for name, tensor in params.items():
            tensor.copy_(checkpoint.read(f"model/{name}"))
    for name, generator in (generators or {}).items():
        generator.set_state(states[name])


def _optimizer_state(
    checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Return the argument of `load_state_dict`, in the current optimizer's order."""
    kept = stored_optimizer(checkpoint.path, checkpoint.manifest.state)
    names = _names_of(model, optimizer)
    mine = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    theirs = kept.names
    kind = type(optimizer).__name__
    if kept.type != kind or list(map(sorted, mine)) != list(map(sorted, theirs)):
        saved = f"from {kept.type} with {_groups_text(theirs)}" if kept.type else "empty"
        msg = (
            f"the optimizer is {kind} with {_groups_text(mine)}, but the state in "
            f"{checkpoint.path} is {saved}{_first_other(mine, theirs)}: make the same "
            "optimizer as for the checkpoint, or load the model without it"
        )
        raise CheckpointError(msg)
    order = {name: index for index, name in enumerate(n for group in mine for n in group)}
    if strangers := sorted(kept.numbers.keys() - order.keys()):
        msg = (
            f"state.optimizer.numbers of {checkpoint.path} contains {strangers[0]!r}, which is "
            f"not a parameter of {kind}: use another checkpoint of this run"
        )
        raise CheckpointError(msg)
    state: dict[int, dict[str, Any]] = {
        order[name]: {key: from_plain(value, checkpoint.read) for key, value in entries.items()}
        for name, entries in kept.numbers.items()
    }
    for full in checkpoint.names():
        root, _, tail = full.partition("/")
        name, _, key = tail.rpartition("/")
        if root == "optimizer" and name in order:
            state.setdefault(order[name], {})[key] = checkpoint.read(full)
    groups = [
        {
            **{
                key: _tuples(from_plain(value, checkpoint.read))
                for key, value in theirs_group.items()
                if key != "names"
            },
            "params": [order[name] for name in members],
        }
        for theirs_group, members in zip(kept.groups, mine, strict=True)
    ]
    for number, (group, here) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        for key in group.keys() & here.keys():
            field = f"optimizer.groups[{number}].{key}"
            require_like(checkpoint.path, field, group[key], here[key])
    in_order: list[str] = []

    def read(name: str) -> torch.Tensor:
        in_order.append(name)
        return checkpoint.read(name)

    rest = {key: from_plain(x, read) for key, x in kept.rest.items()}
    if in_order and mine != theirs:
        msg = (
            f"parameters of {kind} are in another order than in {checkpoint.path}, where "
            f"{in_order[0]!r} is stored by position, not by parameter: make the model and the "
            "optimizer in the same order as for the checkpoint"
        )
        raise CheckpointError(msg)
    return {**rest, "state": state, "param_groups": groups}


def _groups_text(groups: Sequence[Sequence[str]]) -> str:
    """Describe parameter groups as text, such as `2 groups of 3 and 1 parameters`."""
    sizes = [str(len(group)) for group in groups]
    if len(sizes) > 4:
        return f"{len(sizes)} groups of {sum(map(len, groups))} parameters in all"
    listed = " and ".join([", ".join(sizes[:-1])] * (len(sizes) > 1) + sizes[-1:])
    plural = "s" * (sizes != ["1"])
    return f"{len(sizes)} group{'s' * (len(sizes) != 1)} of {listed or 0} parameter{plural}"


def _first_other(mine: Sequence[Sequence[str]], theirs: Sequence[Sequence[str]]) -> str:
    """Return a clause that names a parameter in another group, if groups have equal sizes."""
    if list(map(len, mine)) != list(map(len, theirs)):
        return ""
    pairs = enumerate(zip(mine, theirs, strict=True))
    other = next(((n, sorted({*a} - {*b})) for n, (a, b) in pairs if {*a} != {*b}), None)
    return f", and group {other[0]} there has no {other[1][0]}" if other else ""


def _filed(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the optimizer's tensors by name, and its other values for JSON."""
    names = _names_of(model, optimizer)
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for param, entries in optimizer.state.items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer/{names[param]}/{key}"] = value
            else:
                plain = to_plain(value, f"{REST}/state/{names[param]}/{key}", tensors)
                numbers.setdefault(names[param], {})[key] = plain
    groups = [
        {
            "names": [names[p] for p in group["params"]],
            **{
                key: to_plain(value, f"{REST}/param_groups/{number}/{key}", tensors)
                for key, value in group.items()
                if key != "params"
            },
        }
        for number, group in enumerate(optimizer.param_groups)
    ]
    rest = {
        key: to_plain(value, f"{REST}/{key}", tensors)
        for key, value in optimizer.state_dict().items()
        if key not in {"state", "param_groups", PART_ENTRY}
    }
    kind = type(optimizer).__name__
    return tensors, {"type": kind, "groups": groups, "numbers": numbers, "rest": rest}


def _model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by name; tied parameters occur once."""
    return {**dict(model.named_parameters()), **kept_buffers(model)}


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Return the other names of tied tensors in `state_dict`, with their stored names."""
    kept = _model_tensors(model)
    names = {id(tensor): name for name, tensor in reversed(kept.items())}
    return {
        name: names[id(tensor)]
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name not in kept and id(tensor) in names
    }


def _names_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    names = {param: name for name, param in model.named_parameters()}
    strangers = [p for group in optimizer.param_groups for p in group["params"] if p not in names]
    if strangers:
        msg = (
            f"optimizer has {len(strangers)} parameters that are not the model's, the first of "
            f"shape {list(strangers[0].shape)}: make the optimizer from model.parameters()"
        )
        raise ConfigError(msg)
    return names  # type: ignore[return-value]  # keys are Parameters


def _tuples(value: Any) -> Any:
    """Convert lists to tuples, because older checkpoints have betas as a list."""
    return tuple(value) if isinstance(value, list) else value
