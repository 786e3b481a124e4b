"""The modules and optimizers of one replica: copies of the program's, which follow them.

    program's objects ──copied before the first step──> copies of replica 1
           │                                                 ^
           └──compared before each later step: changes ──────┘

What is compared: parameters and buffers by digests of their bits; plain attributes of modules by
their values, also inside of containers and objects; options of optimizers always.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from braid.errors import ConfigError
from braid.runtime.torch_internals import (
    accumulate_hooks,
    gradient_hooks,
    own_buffers,
    own_parameters,
)
from braid.strategies.made_in_scope import MadeInScope

__all__ = ["ReplicaObjects"]

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
SIMPLE = frozenset(
    (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
)
MOST_VALUES = 1000  # of one attribute that are compared; a vocabulary would take longer than a step
MOST_LEVELS = 20  # of containers and objects inside of each other
OF_TORCH = frozenset(vars(nn.Module())) - {"training"} | {"_compiled_call_impl"}
WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Attributes(NamedTuple):
    """Attributes of a module, and what else than identity is compared with their later values."""

    values: dict[str, Any]
    prints: dict[str, object]


class ReplicaObjects:
    """Modules and optimizers of one replica, which are copies of the program's objects.

    Args:
        made: The program's objects.
        device: Device of the replica.
        first: Objects of the first replica, which uses the program's objects; None for the first
            replica.

    Raises:
        ConfigError: A module or an optimizer cannot be copied.
    """

    def __init__(
        self, made: MadeInScope, device: torch.device, first: ReplicaObjects | None = None
    ) -> None:
        modules, optimizers = made.modules(), made.optimizers()
        memo = dict[int, Any]()
        if first is None:
            self.modules = modules
            self.optimizers: list[Any] = list(optimizers)  # averaging adds methods to them
        else:
            self.modules = [_copied(module, memo) for module in modules]
            self.optimizers = [_copied(optimizer, memo) for optimizer in optimizers]
        named = made.named_parameters()
        copied = {name: memo.get(id(param), param) for name, param in named.items()}
        self.names = {id(param): name for name, param in copied.items()}
        self.copies: dict[int, Any] = {}
        self._memo = dict[int, Any]()  # from the program's parts and parameters to the copies
        self.scan()
        if first is None:
            return
        parts = [part for module in modules for part in module.modules()]
        self.copies = {id(part): memo[id(part)] for part in (*parts, *optimizers)}
        for module in self.modules:
            module.to(device)
        self._memo = self.copies | {id(param): copied[name] for name, param in named.items()}
        for name, param in named.items():
            vars(copied[name]).update(vars(param))
            before, after = _hooks_of(param)
            for hook in before.values():
                copied[name].register_hook(hook)
            for hook in after.values():
                copied[name].register_post_accumulate_grad_hook(hook)
            if param.grad is not None:
                copied[name].grad = param.grad.to(device, copy=True)
        self.scan()

    def scan(self) -> None:
        """Find the submodules and tensors again; call it after the program may have changed them.

        The other methods share its result, since torch's iterators are slow.
        """
        parts: dict[nn.Module, str] = {}
        for number, module in enumerate(self.modules):
            root = f"{number}." if len(self.modules) > 1 else ""
            for name, part in module.named_modules():
                parts.setdefault(part, f"{root}{name}." if name else root)
        self._parts = list(parts)
        tensors: dict[int, tuple[str, torch.Tensor]] = {}
        for part, prefix in parts.items():
            for name, x in (*own_parameters(part).items(), *own_buffers(part).items()):
                if x is not None:
                    tensors.setdefault(id(x), (prefix + name, x))
        self._tensors = dict(tensors.values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all parameters and buffers by name."""
        return self._tensors

    def tensor_names(self) -> dict[int, str]:
        """Return the names of parameters and buffers by identity."""
        return {id(x): name for name, x in self._tensors.items()}

    def parameters(self) -> list[nn.Parameter]:
        """Return all parameters."""
        return [x for x in self._tensors.values() if isinstance(x, nn.Parameter)]

    def shape(self) -> object:
        """Return a value that differs after parameters, buffers, modules or hooks were replaced.

        Compare it with an earlier one.
        """
        parts = [(id(part), *(tuple(vars(part)[hooks]) for hooks in HOOKS)) for part in self._parts]
        params = [(id(p), p.shape, p.dtype, *map(tuple, _hooks_of(p))) for p in self.parameters()]
        buffers = [(name, x.shape, x.dtype) for name, x in self._buffers().items()]
        hooks = [tuple(v) for o in self.optimizers for k, v in vars(o).items() if "_hooks" in k]
        return parts, params, buffers, hooks

    def digests(self) -> torch.Tensor:
        """Return a digest of the bits of each tensor, as int64 on the CPU."""
        sums = [_digest(x.detach()) for x in self._tensors.values()]
        return torch.stack(sums).cpu() if sums else torch.zeros(0, dtype=torch.int64)

    def option_digests(self) -> torch.Tensor:
        """Return a digest of the options of each optimizer, such as learning rates."""
        numbers = [_digest_of_options(optimizer) for optimizer in self.optimizers]
        return torch.tensor(numbers, dtype=torch.int64)

    def digest_names(self) -> list[str]:
        """Return the names for `option_digests`, followed by the names for `digests`."""
        options = [f"options of {type(o).__name__}" for o in self.optimizers]
        return [*options, *self._tensors]

    def float_buffers(self) -> dict[str, torch.Tensor]:
        """Return the floating point buffers, such as statistics of BatchNorm."""
        return {name: x for name, x in self._buffers().items() if x.is_floating_point()}

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {k: x for k, x in self._tensors.items() if not isinstance(x, nn.Parameter)}

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Return (name, parameter) pairs; a parameter that several modules share occurs once."""
        return [(self.names[id(p)], p) for p in self.parameters()]

    def sparse(self) -> set[torch.Tensor]:
        """Return the weights of embeddings with sparse gradients."""
        embeddings = [x for x in self._parts if isinstance(x, (nn.Embedding, nn.EmbeddingBag))]
        return {part.weight for part in embeddings if part.sparse}

    def attributes(self) -> list[_Attributes]:
        """Return the attributes of each module, such as `training` and a Dropout's `p`."""
        return [
            _Attributes(
                vars(part).copy(),
                {
                    name: _print(value, [MOST_VALUES])
                    for name, value in vars(part).items()
                    if type(value) not in SIMPLE and name not in OF_TORCH
                },
            )
            for part in self._parts
        ]

    def follow(self, first: ReplicaObjects, before: Sequence[_Attributes], *, values: bool) -> None:
        """Copy the program's changes from the first replica's objects to this replica.

        Args:
            first: Objects of the first replica.
            before: The first replica's `attributes` after the last run.
            values: Whether to copy parameters and buffers as well.
        """
        if values:
            pairs = zip(self.tensors().values(), first.tensors().values(), strict=True)
            with torch.no_grad():
                for mine, other in pairs:
                    mine.data.copy_(other)
        for param, own_param in zip(first.parameters(), self.parameters(), strict=True):
            own_param.requires_grad_(param.requires_grad)
            if param.grad is None:
                own_param.grad = None
        for part, now, then in zip(self._parts, first.attributes(), before, strict=True):
            for name, value in now.values.items():
                is_same = name in then.values and then.values[name] is value
                is_same = is_same and then.prints.get(name) == now.prints.get(name)
                if not is_same and name not in OF_TORCH:
                    vars(part)[name] = self._copy_of(value)
            for name in then.values.keys() - now.values.keys():
                vars(part).pop(name, None)
        for optimizer, own_optimizer in zip(first.optimizers, self.optimizers, strict=True):
            groups = zip(optimizer.param_groups, own_optimizer.param_groups, strict=True)
            for group, own_group in groups:
                own_group.update({k: v for k, v in group.items() if k != "params"})

    def _copy_of(self, value: Any) -> Any:
        """Return a copy of an attribute that refers to this replica's parts and parameters."""
        if isinstance(value, torch.Tensor) and id(value) not in self._memo:
            return value.detach().clone().requires_grad_(value.requires_grad)
        return copy.deepcopy(value, dict(self._memo))


def _copied(source: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of a module or an optimizer.

    Optimizers drop everything but groups and state when they are copied as a whole, such as LBFGS
    its list of parameters. So attributes are copied one by one; hooks are the same functions.
    """
    try:
        whole = isinstance(source, nn.Module)
        if whole or type(source).__getstate__ is not torch.optim.Optimizer.__getstate__:
            return copy.deepcopy(source, memo)
        kind = type(source)._braid_kind  # noqa: SLF001 - the class before the scope's
        memo[id(source)] = other = kind.__new__(kind)
        for name, value in vars(source).items():
            if name.endswith("_hooks"):
                vars(other)[name] = copy.copy(value)
            elif name != "step":  # a scheduler's, which leads to the program's object
                vars(other)[name] = copy.deepcopy(value, memo)
    except (TypeError, RuntimeError, AttributeError) as exc:
        msg = (
            f"{type(source).__name__} cannot be copied for another replica: {exc} Use "
            "MultiWorkerMirroredStrategy, where each process makes its own objects"
        )
        raise ConfigError(msg) from exc
    return other


def _hooks_of(param: nn.Parameter) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """Return a parameter's hooks before and after its gradient is accumulated."""
    return gradient_hooks(param) or {}, accumulate_hooks(param) or {}


def _digest(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's bits as 64-bit integers, or as integers of its element size.

    A sum of int64 takes half of the time of a sum of int32, because torch converts each int32.
    """
    if x.is_sparse or x.is_complex() or x.element_size() not in WIDTHS:
        x = torch.view_as_real(x.to_dense()) if x.is_complex() else x.to_dense().double()
    flat = x.reshape(-1)
    whole = flat.numel() * flat.element_size() % 8 == 0 and flat.storage_offset() % 8 == 0
    width = torch.int64 if whole else WIDTHS[flat.element_size()]
    return flat.view(width).sum(dtype=torch.int64)


def _digest_of_options(optimizer: torch.optim.Optimizer) -> int:
    """Return a number for the numbers in an optimizer's groups, such as learning rates."""
    options = []
    for group in optimizer.param_groups:
        for name, value in group.items():
            number = value.item() if isinstance(value, torch.Tensor) else value
            numbers = number if isinstance(number, tuple) else (number,)
            if all(isinstance(x, (bool, int, float)) for x in numbers):
                options.append((name, *map(float, numbers)))
    return zlib.crc32(repr(options).encode())


def _print(value: Any, remaining: list[int], level: int = 0) -> object:
    """Return something that compares equal as long as a value has not been changed.

    Args:
        value: Value of an attribute.
        remaining: Number of values that may still be looked at, in a list.
        level: Number of containers and objects around the value.
    """
    remaining[0] -= 1
    if type(value) in SIMPLE:
        return value
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        return tuple(value.shape), value.dtype, _digest(value.detach()).item()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.shape, value.dtype, zlib.crc32(value.tobytes())
    by_identity = (nn.Module, nn.Parameter, torch.optim.Optimizer, type)
    if isinstance(value, by_identity) or remaining[0] < 0 or level > MOST_LEVELS:
        return id(value)
    if isinstance(value, Mapping):
        return [(key, _print(item, remaining, level + 1)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [_print(item, remaining, level + 1) for item in value]
    if isinstance(value, (set, frozenset)):
        return set(value)
    state = getattr(value, "__dict__", None)
    inside = _print(state, remaining, level) if isinstance(state, dict) else None
    return id(value), inside
