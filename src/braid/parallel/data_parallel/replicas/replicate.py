"""Replicas of a module on several devices of one process; gradients are summed in the module.

    forward                                                    backward: the dual of
    module ─ weight ─▶ spread ┬▶ replica 0 ─ share 0 ─▶ output 0   spreading is a sum,
                              ├▶ replica 1 ─ share 1 ─▶ output 1   g0 + g1 + g2, in this order,
                              └▶ replica 2 ─ share 2 ─▶ output 2   in any order of arrival

A replica is a shallow copy of the module and all modules in it, with tensors of the graph above as
parameters. In torch a replica has no `parameters()`, so `next(self.parameters()).device` fails in
it; here it works. Gradients of 16-bit parameters are summed in float32 and rounded once. A device
that occurs twice gets one copy, and the module's own device gets none.

Changes in a forward: replica 0 has the module's own buffers, so changes in place survive, and
`write_back` copies attributes that its forward assigned to the module. Changes by other replicas
are dropped, since they have seen other shares of the same batch.

A result of torch.compile is bound to the one module that was compiled. Copies of it would run that
module without notice, and a compiled wrapper forwards assignments on its copies to that module. So
compiled modules raise an error before anything is copied.

Source: torch's DataParallel (`torch/nn/parallel/replicate.py`); Li et al., VLDB 2020, section 2.3.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from functools import reduce
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from braid.comm.autograd.recompute_layers import LayerForward
from braid.comm.tensors.reduction import combine
from braid.errors import ConfigError
from braid.parallel.data_parallel.devices import DeviceLike, as_device
from braid.runtime.torch_internals import own_buffers, own_modules, replica_of

__all__ = ["refuse_compiled", "replicate", "write_back"]

M = TypeVar("M", bound=nn.Module)
GIVEN = "_braid_given"  # attribute of replica 0: its attributes and buffers before the forward
COMPILED_FROM = "_torchdynamo_orig_callable"  # attribute of functions that torch.compile returns


def replicate(module: M, devices: Sequence[DeviceLike]) -> list[M]:
    """Return one replica of `module` per device; differentiable.

    Backward leaves the sum of the replicas' gradients in the module's parameters.

    Args:
        module: Module on one device. Shared parameters and modules are shared in replicas as well.
        devices: Devices; if the first one is the module's device, its replica has the module's own
            buffers.

    Returns:
        Replicas in the order of devices; used for one forward.

    Raises:
        ConfigError: The module contains TorchScript modules, compiled modules, or parameters
            without a shape.

    Cost:
        l bytes to each other device, l = bytes of parameters and buffers; the same in backward.
    """
    places = [as_device(device) for device in devices]
    _check_replicable(module)
    made: list[dict[int, Any]] = [{} for _ in places]  # per replica: id of the original -> copy
    for param in module.parameters():
        for memo, copied in zip(made, _spread(param, places), strict=True):
            memo[id(param)] = copied
    for buffer in module.buffers():
        for memo, copied in zip(made, _buffer_copies(buffer, places), strict=True):
            memo[id(buffer)] = copied
    originals = list(module.modules())
    for memo in made:
        for original in originals:
            memo[id(original)] = replica_of(original)
    for index, memo in enumerate(made):
        for original in originals:
            _fill(original, memo, keep=index == 0)
    return [memo[id(module)] for memo in made]


def write_back(module: nn.Module, replica: nn.Module) -> None:
    """Copy attributes and buffers that replica 0's forward assigned to the original modules.

    Args:
        module: Module that was replicated.
        replica: First of the replicas.
    """
    for original, part in zip(module.modules(), _pairs(module, replica), strict=True):
        snapshot = vars(part).pop(GIVEN, None)
        if snapshot is None:
            continue  # the module itself, or a replica made by a subclass
        attributes, buffers = snapshot
        for name, value in own_buffers(part).items():
            if value is not buffers.get(name):
                own_buffers(original)[name] = value
        for name, value in vars(part).items():
            if name not in attributes or value is not attributes[name]:
                vars(original)[name] = value


def refuse_compiled(module: nn.Module) -> None:
    """Raise if torch.compile is bound to the module or a module in it.

    Args:
        module: Module to replicate; it is not changed.

    Raises:
        ConfigError: The module, or a module in it, is compiled.
    """
    named = dict(module.named_modules())
    ids = {id(child) for child in named.values()}
    compiled = [name for name, child in named.items() if _is_compiled(child, ids)]
    if compiled:
        where = f"{', '.join(compiled)} of it" if compiled[0] else "it"
        kind = type(own_modules(module).get("_orig_mod", module)).__name__
        msg = (
            f"torch.compile has compiled {where} for this one {kind}, so its copies "
            "cannot run: pass the original module, or use one process per device, where "
            "DistributedDataParallel takes compiled modules"
        )
        raise ConfigError(msg)


class _Spread(torch.autograd.Function):
    """Autograd function x -> copies of x on devices."""

    @staticmethod
    def forward(
        ctx: Any, places: Sequence[torch.device], x: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)  # a replica that did not use x adds nothing
        ctx.home = x.device
        different = dict.fromkeys(places)
        copies = {place: x.to(place, non_blocking=place.type != "cpu") for place in different}
        return tuple(copies[place].detach() for place in places)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, torch.Tensor | None]:
        present = [grad for grad in grads if grad is not None]
        return None, _OrderedSum.apply(ctx.home, *present) if present else None  # type: ignore[no-untyped-call]


class _OrderedSum(torch.autograd.Function):
    """Autograd function: tensors on devices -> their sum on one device; dual of `_Spread`."""

    @staticmethod
    def forward(ctx: Any, home: torch.device, *xs: torch.Tensor) -> torch.Tensor:
        ctx.places = [x.device for x in xs]
        moved = [x.to(home, non_blocking=home.type != "cpu") for x in xs]
        if len(moved) == 1:
            return moved[0].detach()
        if any(x.layout != torch.strided for x in moved):  # of an Embedding(sparse=True)
            return reduce(torch.add, moved)
        total = torch.empty_like(moved[0])
        combine(moved, total, "sum", None)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return None, *_Spread.apply(ctx.places, grad)  # type: ignore[no-untyped-call]


def _spread(x: torch.Tensor, places: Sequence[torch.device]) -> tuple[torch.Tensor, ...]:
    return _Spread.apply(places, x)  # type: ignore[no-untyped-call, no-any-return]


def _buffer_copies(buffer: torch.Tensor, places: Sequence[torch.device]) -> Sequence[torch.Tensor]:
    if buffer.requires_grad and torch.is_grad_enabled():
        return _spread(buffer, places)
    # a separate copy each, as forward may change it
    return [
        buffer if index == 0 and place == buffer.device else buffer.to(place, copy=True)
        for index, place in enumerate(places)
    ]


def _fill(original: nn.Module, memo: dict[int, Any], *, keep: bool) -> None:
    """Replace parameters, buffers and modules of a replica by their copies."""
    part = memo[id(original)]
    state = vars(part)
    for name in ("_parameters", "_buffers", "_modules"):
        table = vars(original)[name]
        # not by __setattr__, which accepts only leaf parameters
        state[name] = type(table)((key, memo.get(id(value), value)) for key, value in table.items())
    for name, value in vars(original).items():
        if name not in {"_parameters", "_buffers", "_modules"}:
            changed = _with_copies(value, memo)
            if changed is not value:
                state[name] = changed
    if keep:
        state[GIVEN] = dict(state), dict(state["_buffers"])


def _with_copies(value: Any, memo: dict[int, Any]) -> Any:
    """Return an attribute with parameters and modules in it replaced by their copies.

    Examples are the flat weights of an RNN, a parent, or a replaced forward.
    """
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, MethodType) and id(value.__self__) in memo:
        return MethodType(value.__func__, memo[id(value.__self__)])
    if isinstance(value, LayerForward):
        return value.with_copies(lambda attribute: _with_copies(attribute, memo))
    if type(value) is list and any(id(item) in memo for item in value):
        return [memo.get(id(item), item) for item in value]
    return value


def _pairs(module: nn.Module, replica: nn.Module) -> list[nn.Module]:
    """Return the replica's modules in the order of `module.modules()`.

    Modules that forward has added to the replica are not included.
    """
    replicas = {id(module): replica}
    for original in module.modules():
        part = replicas[id(original)]
        for name, child in own_modules(original).items():
            if child is not None:
                replicas.setdefault(id(child), own_modules(part)[name])  # type: ignore[arg-type]
    return [replicas[id(original)] for original in module.modules()]


def _is_compiled(module: nn.Module, ids: Collection[int]) -> bool:
    """Return whether a module is compiled, or calls a compiled method of a module in `ids`."""
    attributes = vars(module)
    if COMPILED_FROM in attributes or attributes.get("_compiled_call_impl") is not None:
        return True
    for value in attributes.values():
        if isinstance(value, FunctionType) and COMPILED_FROM in vars(value):
            inner = inspect.unwrap(value, stop=lambda inner: isinstance(inner, MethodType))
            if id(getattr(inner, "__self__", None)) in ids:  # plain functions are shared
                return True
    return False


def _check_replicable(module: nn.Module) -> None:
    refuse_compiled(module)
    scripted = [type(m).__name__ for m in module.modules() if isinstance(m, torch.jit.ScriptModule)]
    if scripted:
        msg = (
            f"{scripted[0]} in {type(module).__name__} is a TorchScript module and cannot be "
            "replicated: use the original module"
        )
        raise ConfigError(msg)
    lazy = [name for name, x in [*module.named_parameters(), *module.named_buffers()] if is_lazy(x)]
    if lazy:
        msg = (
            f"{', '.join(lazy)} of {type(module).__name__} have no shapes yet: call the module "
            "itself once before it is replicated"
        )
        raise ConfigError(msg)
