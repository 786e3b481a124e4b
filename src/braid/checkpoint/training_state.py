"""Model and optimizer as named tensors and numbers, and back.

Problem: `optimizer.state_dict()` counts parameters, so a model whose parameters are created in another order silently gets
the wrong moments. Idea: everything is filed under the parameter's name.

    model/blocks.0.attention.weight                     parameters (tied ones once) and persistent buffers
    optimizer/blocks.0.attention.weight/exp_avg         tensors of the optimizer's state
    state: {"optimizer": {"groups": [{"names": [...], "lr": 0.001, ...}], "numbers": {name: {...}}}}
    state: {"generators": {name: base64 of its state}}
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from braid.checkpoint.loading import Checkpoint
from braid.errors import CheckpointError, ConfigError
from braid.types import TensorSpec

__all__ = ["restore_training", "training_numbers", "training_tensors"]

Generators = Mapping[str, torch.Generator]


def training_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, torch.Tensor]:
    """Parameters, buffers and the optimizer's tensors by name; not copied.

    Raises:
        ConfigError: The optimizer holds a parameter that the model does not.
    """
    tensors = {f"model/{name}": tensor for name, tensor in _model_tensors(model).items()}
    if optimizer is not None:
        names = _names_of(model, optimizer)
        for param, entries in optimizer.state.items():
            for key, value in entries.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"optimizer/{names[param]}/{key}"] = value
    return tensors


def training_numbers(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    generators: Generators | None = None,
) -> dict[str, Any]:
    """What of a training is no tensor, for a checkpoint's `state`."""
    numbers: dict[str, Any] = {}
    if optimizer is not None:
        names = _names_of(model, optimizer)
        numbers["optimizer"] = {
            "type": type(optimizer).__name__,
            "groups": [
                {"names": [names[p] for p in group["params"]], **_plain(group)}
                for group in optimizer.param_groups
            ],
            "numbers": {
                names[param]: scalars
                for param, entries in optimizer.state.items()
                if (scalars := _plain(entries))
            },
        }
    if generators:
        numbers["generators"] = {
            name: base64.b64encode(bytes(generator.get_state().tolist())).decode()
            for name, generator in generators.items()
        }
    return numbers


def restore_training(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    generators: Generators | None = None,
) -> None:
    """Put a checkpoint's values into a model, an optimizer and generators.

    Raises:
        CheckpointError: The checkpoint is of another model or optimizer: the table of what differs;
            nothing has been changed.
    """
    params = _model_tensors(model)
    checkpoint.require(
        {
            f"model/{name}": TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch."))
            for name, t in params.items()
        }
    )
    if optimizer is not None:
        loaded = _optimizer_state(checkpoint, model, optimizer)
        optimizer.load_state_dict(loaded)
    with torch.no_grad():
        for name, tensor in params.items():
            tensor.copy_(checkpoint.read(f"model/{name}"))
    kept = checkpoint.manifest.state.get("generators", {})
    for name, generator in (generators or {}).items():
        if name not in kept:
            msg = f"expected the state of generator {name!r} in {checkpoint.path}, found {sorted(kept)}"
            raise CheckpointError(msg)
        raw = bytearray(base64.b64decode(kept[name]))
        generator.set_state(torch.frombuffer(raw, dtype=torch.uint8))


def _optimizer_state(
    checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """What `load_state_dict` wants: numbered in the order of the optimizer that is here."""
    kept = checkpoint.manifest.state.get("optimizer", {})
    names = _names_of(model, optimizer)
    mine = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    theirs = [group.get("names") for group in kept.get("groups", [])]
    kind = type(optimizer).__name__
    if kept.get("type") != kind or list(map(sorted, mine)) != [sorted(t or []) for t in theirs]:
        found = f"{kept.get('type', 'no optimizer')} with {[len(t or []) for t in theirs]}"
        msg = (
            f"expected the state of {kind} with groups of {[len(group) for group in mine]} parameters in "
            f"{checkpoint.path}, found {found}: use the optimizer and groups that it was made with"
        )
        raise CheckpointError(msg)
    order = {name: index for index, name in enumerate(n for group in mine for n in group)}
    state: dict[int, dict[str, Any]] = {
        order[name]: dict(scalars) for name, scalars in kept.get("numbers", {}).items()
    }
    for full in checkpoint.manifest.tensors:
        root, _, rest = full.partition("/")
        name, _, key = rest.rpartition("/")
        if root == "optimizer" and name in order:
            state.setdefault(order[name], {})[key] = checkpoint.read(full)
    groups = [
        {
            **{k: _tuples(v) for k, v in theirs_group.items() if k != "names"},
            "params": [order[name] for name in members],
        }
        for theirs_group, members in zip(kept["groups"], mine, strict=True)
    ]
    return {"state": state, "param_groups": groups}


def _model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, tied ones once, and the buffers that `state_dict` would hold."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    kept = model.state_dict().keys()
    tensors.update({name: b for name, b in model.named_buffers() if name in kept})
    return tensors


def _names_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    names = {param: name for name, param in model.named_parameters()}
    strangers = [p for group in optimizer.param_groups for p in group["params"] if p not in names]
    if strangers:
        msg = (
            f"expected an optimizer of the model's own parameters, found {len(strangers)} others, the first of "
            f"shape {list(strangers[0].shape)}: make the optimizer from model.parameters()"
        )
        raise ConfigError(msg)
    return names  # type: ignore[return-value]  # keys are Parameters


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in values.items()
        if key != "params" and isinstance(value, (int, float, str, bool, tuple, list, type(None)))
    }


def _tuples(value: Any) -> Any:
    """JSON has no tuples; betas must be one."""
    return tuple(value) if isinstance(value, list) else value
