"""Rules by which optimizers can be sharded, and the step on the pieces of this rank.

by elements   each element changes by its own gradient and state: any cut gives the same bits
whole         rules look at the shape or the norm of a parameter: each belongs to one rank
not at all    LBFGS takes inner products of all parameters; SparseAdam takes sparse gradients
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch

from braid.errors import ConfigError
from braid.sharding.engine import Sharding

__all__ = ["attach", "needs_whole"]

BY_ELEMENTS = frozenset(
    [
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
        "Lion",
    ]
)
WHOLE = frozenset(
    [
        "Adafactor",
        "Muon",
        "LARS",
        "LAMB",
        "Lamb",
        "Lars",
        "FusedLAMB",
        "NovoGrad",
        "Shampoo",
        "SOAP",
        "Kron",
        "PSGD",
        "Prodigy",
    ]
)
REFUSED = {
    "LBFGS": "it takes inner products of all parameters at once",
    "SparseAdam": "it takes sparse gradients, which are not summed in flat vectors",
}


def needs_whole(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's rule needs whole parameters.

    Optimizers that are not known are taken to need them, with a warning.

    Raises:
        ConfigError: The optimizer cannot be sharded.
    """
    kinds = [kind.__name__ for kind in type(optimizer).__mro__]
    name = kinds[0]
    for kind in kinds:
        if kind in REFUSED:
            msg = (
                f"{name} cannot be sharded: {REFUSED[kind]}. Use DistributedDataParallel, or "
                "another optimizer such as AdamW"
            )
            raise ConfigError(msg)
    if name in BY_ELEMENTS:
        return False
    if name not in WHOLE:
        warnings.warn(
            f"{name} is not known to change each element by itself, so each parameter belongs to "
            "one rank: pass whole=False if it does, or whole=True to silence this",
            UserWarning,
            stacklevel=3,
        )
    return True


def attach(sharding: Sharding, optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer step on this rank's pieces, in place; states that it has are cut.

    Args:
        sharding: Engine whose model has the optimizer's parameters.
        optimizer: Optimizer of the model, made before or after sharding.

    Raises:
        ConfigError: The optimizer cannot be sharded, or not like this, or has other parameters.
    """
    _check(sharding, optimizer)
    places = {}
    for flat in sharding.flats:
        for index, record in enumerate(flat.records):
            places[id(record.param)] = places[id(flat.owned[index])] = (flat, index)
    for group in optimizer.param_groups:
        group["params"] = [
            flat.owned[index] for flat, index in (places[id(p)] for p in group["params"])
        ]
    states = dict(optimizer.state)
    optimizer.state.clear()
    for param, state in states.items():
        flat, index = places[id(param)]
        if flat.pieces[index].numel:
            piece, shape = flat.pieces[index], flat.shapes[index]
            optimizer.state[flat.owned[index]] = {
                name: _cut(value, shape, piece.begin, piece.end, whole=flat.whole)
                for name, value in state.items()
            }
    reference = weakref.ref(sharding)

    def after_step(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        engine = reference()
        if engine is not None:
            engine.share_step()

    optimizer.register_step_post_hook(after_step)


def _check(sharding: Sharding, optimizer: torch.optim.Optimizer) -> None:
    problems = []
    params = [p for group in optimizer.param_groups for p in group["params"]]
    known = {id(record.param) for record in sharding.table}
    known |= {id(owned) for _, owned in sharding.owned()}
    strangers = [p for p in params if id(p) not in known]
    if strangers:
        problems.append(
            f"the optimizer has {len(strangers)} parameters that are not the model's, the first "
            f"of shape {list(strangers[0].shape)}: make it from model.parameters()"
        )
    if needs_whole(optimizer) and not sharding.options.whole:
        problems.append(
            f"{type(optimizer).__name__} needs whole parameters, and elements were divided: pass "
            "whole=True"
        )
    if problems:
        raise ConfigError("; ".join(problems))


def _cut(value: Any, shape: torch.Size, begin: int, end: int, *, whole: bool) -> Any:
    """Return what this rank owns of a state; states of another shape are kept as they are."""
    if whole or not isinstance(value, torch.Tensor) or value.shape != shape or not shape:
        return value
    return value.reshape(-1)[begin:end].clone()
