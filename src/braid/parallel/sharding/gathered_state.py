"""Whole state dicts of a sharded training, gathered on every rank, and their loading.

Checkpoints of `state` contain the pieces of each rank, which needs no extra memory. Whole state
dicts are for export and for programs that write their own files. Names are the unwrapped model's,
and optimizer states have parameter names, so state dicts do not depend on the sharding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from braid.checkpoint.agreed_buffers import agreed_buffers
from braid.checkpoint.training_state import kept_buffers
from braid.errors import ConfigError
from braid.parallel.sharding.engine import Sharding
from braid.parallel.sharding.flat_shard import FlatShard
from braid.types import first_few

__all__ = [
    "load_optimizer_state_dict",
    "load_state_dict",
    "optimizer_state_dict",
    "state_dict",
]


def state_dict(sharding: Sharding) -> dict[str, torch.Tensor]:
    """Return whole parameters and buffers under the names of the model; a collective.

    A tied parameter has an entry for each name, as in torch. Buffers are the same on all ranks,
    see `agreed_buffers`.

    Cost: one all_gather per unit; memory for the whole model.
    """
    whole = agreed_buffers(sharding.model, sharding.places.groups)
    for flat in sharding.flats:
        for record, value in zip(flat.records, flat.whole_values(), strict=True):
            whole.update(dict.fromkeys(record.names, value))
    names = torch.nn.Module.state_dict(sharding.model, keep_vars=True)
    return {name: whole.get(name, tensor.detach()) for name, tensor in names.items()}


def load_state_dict(
    sharding: Sharding, state: Mapping[str, torch.Tensor], *, strict: bool = True
) -> None:
    """Load whole parameters and buffers; each rank keeps its shards.

    Args:
        sharding: The engine.
        state: Tensors by name, as `state_dict` returns them; on each rank at least the tensors that
            it owns parts of.
        strict: Whether missing and unknown names are errors.

    Raises:
        ConfigError: Names are missing or unknown, or shapes differ; nothing has been changed.
    """
    records = {name: record for record in sharding.table for name in record.names}
    whole = {**sharding.ignored(), **kept_buffers(sharding.model)}
    kept = torch.nn.Module.state_dict(sharding.model, keep_vars=True).keys()
    wanted = {name: records[name].spec.shape for name in records if name in kept}
    wanted |= {name: tuple(tensor.shape) for name, tensor in whole.items()}
    problems = [
        f"{name} has the shape {list(state[name].shape)}, the model's is {list(shape)}"
        for name, shape in wanted.items()
        if name in state and tuple(state[name].shape) != tuple(shape)
    ]
    if strict and (missing := sorted(wanted.keys() - state.keys())):
        problems.append(f"{first_few(missing)} are missing")
    if strict and (unknown := sorted(state.keys() - wanted.keys() - kept)):
        problems.append(f"{first_few(unknown)} are not in the model")
    if problems:
        raise ConfigError("the state belongs to another model: " + "; ".join(problems))
    with torch.no_grad():
        for flat in sharding.flats:
            for index, record in enumerate(flat.records):
                name = next((name for name in record.names if name in state), None)
                if name is not None:
                    flat.owned[index].copy_(_cut(flat, index, state[name]))
        for name in whole.keys() & state.keys():
            whole[name].copy_(state[name])
    sharding.share_step()


def optimizer_state_dict(sharding: Sharding, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the whole state of an optimizer, with parameter names as keys; a collective.

    Returns:
        `{"state": {NAME: {...}}, "param_groups": [{"params": [NAME, ...], ...}]}`.

    Cost: one all_gather per state; memory for all states.
    """
    names = {id(owned): record.name for record, owned in sharding.owned()}
    whole: dict[str, dict[str, Any]] = {}
    for flat in sharding.flats:
        for index, record in enumerate(flat.records):
            state = _whole_state(flat, index, optimizer.state.get(flat.owned[index], {}))
            if state:
                whole[record.name] = state
    groups = [{**g, "params": [names[id(p)] for p in g["params"]]} for g in optimizer.param_groups]
    return {"state": whole, "param_groups": groups}


def load_optimizer_state_dict(
    sharding: Sharding, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Load the result of `optimizer_state_dict`, on any number of ranks.

    Raises:
        ConfigError: Parameter groups differ from the optimizer's.
    """
    places = sharding.places_by_name()
    names = {id(owned): record.name for record, owned in sharding.owned()}
    mine = [[names[id(p)] for p in g["params"]] for g in optimizer.param_groups]
    theirs = [list(g["params"]) for g in state["param_groups"]]
    if list(map(sorted, mine)) != list(map(sorted, theirs)):
        msg = (
            f"the state's parameter groups (sizes {list(map(len, theirs))}) differ from the "
            f"optimizer's (sizes {list(map(len, mine))}): create the optimizer with the same groups"
        )
        raise ConfigError(msg)
    numbers = {name: i for i, name in enumerate(n for group_names in mine for n in group_names)}
    cut = {}
    for name, values in state["state"].items():
        flat, index = places[name]
        if flat.pieces[index].numel:
            cut[numbers[name]] = {
                key: _cut(flat, index, value)
                if isinstance(value, torch.Tensor) and value.shape == flat.shapes[index]
                else value
                for key, value in values.items()
            }
    groups = [
        {**group, "params": [numbers[name] for name in group_names]}
        for group, group_names in zip(state["param_groups"], mine, strict=True)
    ]
    optimizer.load_state_dict({"state": cut, "param_groups": groups})


def _whole_state(flat: FlatShard, index: int, local_state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the whole state of a parameter; empty if no rank has one."""
    group, device = flat.places.group, flat.master_device
    facts = _Facts.of(flat, index, local_state)
    table = [_Facts(*entry) for entry in group.objects.all_gather(tuple(facts))]
    owner = next((rank for rank, known in enumerate(table) if known.numel), 0)
    state = dict(table[owner].plain)
    for key, dtype in table[owner].cut.items():
        value = local_state[key] if key in local_state else _empty((0,), dtype, device)
        parts = [_empty((known.numel,), dtype, device) for known in table]
        group.all_gather(value.detach().reshape(-1), out=parts)
        state[key] = torch.cat(parts).view(flat.shapes[index])
    for key, (shape, dtype) in table[owner].small.items():
        is_here = group.rank == owner
        value = local_state[key].detach().to(device) if is_here else _empty(shape, dtype, device)
        state[key] = group.broadcast(value.clone(), owner)
    return state


class _Facts(NamedTuple):
    """Metadata of the state of a parameter on one rank.

    Attributes:
        numel: Number of elements of the rank's piece.
        cut: Dtypes of states with an element for each element of the piece, by name.
        small: Shapes and dtypes of other tensors.
        plain: Values that are not tensors.
    """

    numel: int
    cut: dict[str, str]
    small: dict[str, tuple[tuple[int, ...], str]]
    plain: dict[str, Any]

    @classmethod
    def of(cls, flat: FlatShard, index: int, state: Mapping[str, Any]) -> _Facts:
        """Return the metadata of `state`, this rank's state of parameter number `index`."""
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        cut = {key: str(x.dtype) for key, x in tensors.items() if _is_cut(flat, index, x)}
        return cls(
            flat.pieces[index].numel,
            cut,
            {k: (tuple(x.shape), str(x.dtype)) for k, x in tensors.items() if k not in cut},
            {key: value for key, value in state.items() if key not in tensors},
        )


def _empty(shape: Sequence[int], dtype: str, device: torch.device) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, dtype.removeprefix("torch."))
    return torch.empty(tuple(shape), dtype=kind, device=device)


def _is_cut(flat: FlatShard, index: int, value: Any) -> bool:
    """Return whether a state has an element for each element of this rank's piece."""
    owned = flat.owned[index]
    return isinstance(value, torch.Tensor) and value.shape == owned.shape and value.dim() > 0


def _cut(flat: FlatShard, index: int, value: torch.Tensor) -> torch.Tensor:
    """Return this rank's piece of a whole tensor, in new memory."""
    piece = flat.pieces[index]
    part = value.detach().reshape(-1)[piece.begin : piece.end].to(flat.master_device, copy=True)
    return part.view(flat.owned[index].shape)
