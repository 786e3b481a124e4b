"""Converts layers and containers of torch.nn to plain data, and back without their constructors.

Problem: programs send networks to other processes. A pickled module runs code of the sender.

Idea: a module is the name of its class, which must be a class of `torch.nn.modules`, and the
attributes that torch keeps apart: parameters, buffers and submodules, which are numbers of
entries in lists, and other attributes, which are plain data. Shared parameters and submodules are
one entry, so that they stay shared. Submodules come before the modules that contain them.

    Sequential(Linear, ReLU, same Linear)    tensors [weight, bias]
                                             modules [Linear, ReLU, Sequential {0: 0, 1: 1, 2: 0}]

What a peer sends can name no other class and no method of a class: a stranger cannot replace the
forward of a layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from braid.errors import CommError
from braid.rpc.outcomes import RpcError
from braid.runtime.torch_internals import (
    own_buffers,
    own_modules,
    own_parameters,
    reset_flat_weights,
    transient_buffers,
)

__all__ = ["layer_of", "parts_of"]

_BASE = frozenset(vars(nn.Module()))  # attributes of all modules
_CLASS = frozenset(vars(nn.Module))  # with None for a function that would replace the forward
_DERIVED = frozenset({"_flat_weights", "_flat_weight_refs", "_compiled_call_impl"})
_HOME = "torch.nn.modules."
REMEDY = (
    "construct the module in the other process with rpc.remote or RemoteModule, or send its "
    "state_dict()"
)


def parts_of(module: nn.Module, noun: str) -> tuple[list[list[Any]], list[list[Any]]]:
    """Return the modules of a module as plain data, and its tensors.

    The tensors have no gradients, and no part in a graph of autograd, as if the module was copied.

    Args:
        module: A layer or a container of torch.nn.
        noun: Noun for the module, for errors.

    Raises:
        RpcError: A module is of another class, or has hooks or methods that would be lost.
    """
    modules: dict[nn.Module, list[Any]] = {}
    tensors: dict[int, list[Any]] = {}

    def number_of(tensor: torch.Tensor | None, where: str) -> int | None:
        if tensor is None:
            return None
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            msg = f"{where} is a {type(tensor).__qualname__}, which cannot be sent: {REMEDY}"
            raise RpcError(msg)
        is_parameter = type(tensor) is nn.Parameter
        tensors.setdefault(
            id(tensor), [len(tensors), tensor.detach(), is_parameter, tensor.requires_grad]
        )
        number: int = tensors[id(tensor)][0]
        return number

    def add(child: nn.Module, where: str) -> int:
        if child not in modules:
            _check(child, where)
            submodules = {
                name: None if inner is None else add(inner, f"{where}.{name}")
                for name, inner in own_modules(child).items()
            }
            parameters = {
                name: number_of(tensor, f"{where}.{name}")
                for name, tensor in own_parameters(child).items()
            }
            buffers = {
                name: [number_of(tensor, f"{where}.{name}"), name not in transient_buffers(child)]
                for name, tensor in own_buffers(child).items()
            }
            extra = {k: v for k, v in vars(child).items() if k not in _BASE | _DERIVED}
            name = _name_of(type(child))
            entry = [name, child.training, submodules, parameters, buffers, extra]
            modules[child] = [len(modules), *entry]
        number: int = modules[child][0]
        return number

    add(module, noun)
    return [entry[1:] for entry in modules.values()], [entry[1:] for entry in tensors.values()]


def layer_of(modules: Sequence[Sequence[Any]], tensors: Sequence[Sequence[Any]]) -> nn.Module:
    """Return the module that `parts_of` converted, in memory that it does not share.

    Raises:
        CommError: A class is not of torch.nn, or an attribute is not one that a layer may have.
    """
    built: list[nn.Module] = []
    owned: list[torch.Tensor] = []
    for tensor, is_parameter, requires_grad in tensors:
        copy = tensor.detach().clone()
        owned.append(
            nn.Parameter(copy, requires_grad)
            if is_parameter
            else copy.requires_grad_(requires_grad)
        )
    for name, training, submodules, parameters, buffers, extra in modules:
        module = _empty(name)
        module.training = training is True
        for attribute, value in extra.items():
            if not _may_have(type(module), attribute):
                msg = f"another node sent a {name} with the attribute {attribute!r}: refused"
                raise CommError(msg)
            vars(module)[attribute] = value
        for child, number in submodules.items():
            module.add_module(child, None if number is None else built[number])
        for key, number in parameters.items():
            module.register_parameter(key, _chosen(owned, number, nn.Parameter))
        for key, (number, is_persistent) in buffers.items():
            module.register_buffer(key, _chosen(owned, number, torch.Tensor), is_persistent)
        if isinstance(module, nn.RNNBase):
            reset_flat_weights(module)
        built.append(module)
    return built[-1]


def _chosen(owned: Sequence[Any], number: int | None, kind: Callable[..., Any]) -> Any:
    tensor = None if number is None else owned[number]
    if tensor is not None and not isinstance(tensor, kind):  # type: ignore[arg-type]
        msg = f"another node sent a buffer as a parameter: number {number}"
        raise CommError(msg)
    return tensor


def _check(module: nn.Module, noun: str) -> None:
    kind = type(module)
    if _class_of(_name_of(kind)) is not kind:
        msg = (
            f"{noun} is a {kind.__module__}.{kind.__qualname__}, and only modules of torch.nn can "
            f"be sent: {REMEDY}"
        )
        raise RpcError(msg)
    hooks = sorted(name for name in _BASE if name.endswith("hooks") and vars(module)[name])
    methods = sorted(
        name for name in vars(module).keys() - _BASE - _DERIVED if not _may_have(kind, name)
    )
    if lost := hooks or methods:
        msg = (
            f"{noun} is a {kind.__qualname__} with {lost[0]}, which would be lost: remove this "
            f"attribute before sending the module, or {REMEDY}"
        )
        raise RpcError(msg)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _class_of(name: str) -> type[nn.Module] | None:
    """Return the class of torch.nn with a name; None for other names. Imports nothing."""
    module, _, short = name.rpartition(".")
    kind = getattr(sys.modules.get(module), short, None) if module.startswith(_HOME) else None
    if not isinstance(kind, type) or not issubclass(kind, nn.Module) or kind is nn.Module:
        return None
    return kind if _name_of(kind) == name else None


def _empty(name: object) -> nn.Module:
    """Return a module of a class of torch.nn without running its constructor."""
    kind = _class_of(name) if isinstance(name, str) else None
    if kind is None:
        msg = f"another node sent a module of the class {name!r}, which is not a layer of torch.nn"
        raise CommError(msg)
    module = object.__new__(kind)
    nn.Module.__init__(module)
    return module


def _may_have(kind: type, attribute: str) -> bool:
    """Return whether an instance may have an attribute that is neither torch's nor a method."""
    known = getattr(kind, attribute, None)
    is_descriptor = callable(known) or isinstance(known, property)
    is_known = attribute in _BASE | _CLASS | _DERIVED
    return not is_known and not attribute.startswith("__") and not is_descriptor
