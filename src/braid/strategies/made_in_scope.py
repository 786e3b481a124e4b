"""Modules and optimizers made in a scope, which are another copy in each replica.

    with strategy.scope():                    replica 0            replica 1
        model = Net()              model  ->  the object itself    a copy of it
        optimizer = SGD(...)   optimizer  ->  the object itself    a copy with the copy's parameters

A program holds one object, and each replica has one of its own. So the class of the object becomes
one that derives from it: in the thread of replica 1, a call and every attribute are those of the
replica's copy. Elsewhere the object behaves as before.

Copies are made before the first step, when the program has done to the objects what it wants to
(weights loaded, moved, frozen). What the program changes between steps, such as loaded weights or
a learning rate, is copied before the next one. Modules that are parts of another module only
redirect calls, so that a forward of the first replica costs nothing; an access that finds the first
replica's parameters in another one is refused by the check of the first step.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from braid.comm.autograd.nested import tensors_in
from braid.errors import ConfigError

__all__ = ["MadeInScope", "ParameterCheck", "ReplicaObjects"]

CopyOf = Callable[[object], Any]  # the running replica's copy of an object; None if it is its own
COPY_OF = "_braid_copy_of"
KIND = "_braid_kind"
CONTAINER = ("__len__", "__iter__", "__getitem__", "__contains__")


class _Noted(threading.local):
    """List in which this thread notes the objects that it makes."""

    objects: list[weakref.ref[Any]] | None = None


_NOTED = _Noted()
_KINDS: tuple[Any, ...] = (nn.Module, torch.optim.Optimizer)
_INITS = [kind.__init__ for kind in _KINDS]
_LOCK = threading.Lock()
_num_scopes = 0


def _note_all(change: int) -> None:
    """Let constructors note their objects while any thread is in a scope."""
    global _num_scopes  # noqa: PLW0603 - constructors belong to the process
    with _LOCK:
        _num_scopes += change
        for kind, init in zip(_KINDS, _INITS, strict=True):
            kind.__init__ = _noting(init) if _num_scopes else init


def _noting(init: Callable[..., None]) -> Callable[..., None]:
    def noted(thing: Any, *args: Any, **kwargs: Any) -> None:
        if _NOTED.objects is not None:
            _NOTED.objects.append(weakref.ref(thing))
        init(thing, *args, **kwargs)

    return noted


class MadeInScope:
    """Modules and optimizers of one strategy, in the order in which they were made.

    Args:
        copy_of: Returns the copy that the replica of this thread has; None where there is none.
    """

    def __init__(self, copy_of: CopyOf) -> None:
        self._copy_of = copy_of
        self._objects: list[weakref.ref[nn.Module | torch.optim.Optimizer]] = []

    @property
    def count(self) -> int:
        """Number of objects made so far."""
        return len(self._objects)

    @contextmanager
    def tracked(self) -> Iterator[None]:
        """Note the modules and optimizers that this thread makes in the block."""
        before, _NOTED.objects = _NOTED.objects, self._objects
        _note_all(+1)
        try:
            yield
        finally:
            _note_all(-1)
            _NOTED.objects = before

    def modules(self) -> list[nn.Module]:
        """Return the modules that are not a part of another one."""
        alive = [each for ref in self._objects if isinstance(each := ref(), nn.Module)]
        parts = {id(part) for module in alive for part in module.children()}
        return list(dict.fromkeys(module for module in alive if id(module) not in parts))

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers."""
        return [each for ref in self._objects if isinstance(each := ref(), torch.optim.Optimizer)]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of all modules by name; of several modules, by number and name."""
        modules = self.modules()
        prefixes = ["" if len(modules) == 1 else f"{i}." for i in range(len(modules))]
        return {
            prefix + name: param
            for prefix, module in zip(prefixes, modules, strict=True)
            for name, param in module.named_parameters()
        }

    def check(self) -> None:
        """Raise ConfigError if an optimizer has parameters of no module."""
        known = {id(param) for param in self.named_parameters().values()}
        for optimizer in self.optimizers():
            for number, param in enumerate(_params_of(optimizer)):
                if id(param) not in known:
                    msg = (
                        f"parameter {number} (shape {list(param.shape)}) of "
                        f"{type(optimizer).__name__} is in no module made in this strategy's "
                        "scope: make the model in the scope, too"
                    )
                    raise ConfigError(msg)

    def redirect(self) -> None:
        """Let each object be the running replica's copy, from now on."""
        whole = {id(module) for module in self.modules()}
        for ref in self._objects:
            each = ref()
            if each is not None and not isinstance(each, _Redirected):
                is_part = isinstance(each, nn.Module) and id(each) not in whole
                each.__dict__[COPY_OF] = self._copy_of
                base = _Redirected if is_part else _RedirectedWhole
                each.__class__ = _redirected_class(cast("Any", type(each)), base)


class _Redirected:
    """A part of a module made in a scope: a call is one of the running replica's copy."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        other = _copy(self)
        if other is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        return other(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are of the first class."""
        del protocol
        state = {k: v for k, v in self.__dict__.items() if k != COPY_OF}
        return _made_again, (getattr(type(self), KIND), state)


class _RedirectedWhole(_Redirected):
    """A module or an optimizer made in a scope: every attribute is the running replica's."""

    def __getattribute__(self, name: str) -> Any:
        other = _copy(self)
        return super().__getattribute__(name) if other is None else getattr(other, name)

    def __setattr__(self, name: str, value: Any) -> None:
        other = _copy(self)
        if other is None:
            super().__setattr__(name, value)
        else:
            setattr(other, name, value)

    def __delattr__(self, name: str) -> None:
        other = _copy(self)
        if other is None:
            super().__delattr__(name)
        else:
            delattr(other, name)


def _copy(thing: object) -> Any:
    """Return the running replica's copy of an object; None where the object is its own."""
    return object.__getattribute__(thing, "__dict__")[COPY_OF](thing)


@cache
def _redirected_class(kind: Any, base: type) -> type:
    """Return a class whose objects are, in a replica's thread, that replica's copy."""
    methods: dict[str, Any] = {"__module__": kind.__module__, KIND: kind}
    if base is _RedirectedWhole:
        methods |= {name: _special(kind, name) for name in CONTAINER if hasattr(kind, name)}
    if base is _RedirectedWhole and hasattr(kind, "__getattr__"):
        methods["__getattr__"] = _special(kind, "__getattr__")
    return type(kind.__name__, (base, kind), methods)


def _special(kind: type, name: str) -> Callable[..., Any]:
    """Return a method that Python looks up in the class, of the running replica's copy."""
    method = getattr(kind, name)

    def redirected(self: Any, *args: Any) -> Any:
        other = _copy(self)
        return method(self, *args) if other is None else getattr(type(other), name)(other, *args)

    return redirected


def _made_again(kind: Any, state: dict[str, Any]) -> Any:
    made = kind.__new__(kind)
    made.__dict__.update(state)
    return made


class ReplicaObjects:
    """Modules and optimizers of one replica, by those that the program holds.

    Args:
        made: The program's objects.
        device: Device of the replica.
        first: Whether it is the first replica of this process, whose objects are the program's.
    """

    def __init__(self, made: MadeInScope, device: torch.device, *, first: bool) -> None:
        self.device = device
        self._sources = [*made.modules(), *made.optimizers()]
        if first:
            self.modules = made.modules()
            self.optimizers: list[Any] = [*made.optimizers()]  # averaging adds methods
            self.copies: dict[int, Any] = {}
            self.names = {id(param): name for name, param in made.named_parameters().items()}
            self.note_buffers()
            return
        memo: dict[int, Any] = {}
        copies = [copy.deepcopy(source, memo) for source in self._sources]
        self.modules = [x for x in copies if isinstance(x, nn.Module)]
        self.optimizers = [x for x in copies if isinstance(x, torch.optim.Optimizer)]
        for optimizer in self.optimizers:
            vars(optimizer).pop("step", None)  # a scheduler's, which leads to the program's object
        self.copies = {
            id(part): memo[id(part)]
            for source in self._sources
            for part in (source.modules() if isinstance(source, nn.Module) else [source])
        }
        for module in self.modules:
            module.to(device)
        of_copies = {name: memo[id(p)] for name, p in made.named_parameters().items()}
        self.names = {id(param): name for name, param in of_copies.items()}
        self.note_buffers()

    def tensors(self) -> list[torch.Tensor]:
        """Return all parameters and buffers, in the order of the program's modules."""
        params = [p for module in self.modules for p in module.parameters()]
        return [*params, *self.buffers()]

    def buffers(self) -> list[torch.Tensor]:
        """Return all buffers."""
        return [b for module in self.modules for b in module.buffers()]

    def changed_buffers(self) -> list[bool]:
        """Whether each floating point buffer has changed since `note_buffers`.

        By value, since torch does not count what BatchNorm writes.
        """
        pairs = zip(self.float_buffers(), self._noted, strict=True)
        return [not torch.equal(buffer, noted) for buffer, noted in pairs]

    def note_buffers(self) -> None:
        """Note the floating point buffers as they are now."""
        self._noted = [buffer.clone() for buffer in self.float_buffers()]

    def float_buffers(self) -> list[torch.Tensor]:
        """Return the floating point buffers, such as statistics of BatchNorm."""
        return [buffer for buffer in self.buffers() if buffer.is_floating_point()]

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters with their names."""
        params = [p for module in self.modules for p in module.parameters()]
        return [(self.names[id(p)], p) for p in params]

    def follow(self, first: ReplicaObjects, *, values: bool) -> None:
        """Take over what the program has changed in the first replica's objects.

        Args:
            first: Objects of the first replica.
            values: Whether to copy parameters and buffers, too.
        """
        if values:
            with torch.no_grad():
                for own, other in zip(self.tensors(), first.tensors(), strict=True):
                    own.copy_(other)
            self.note_buffers()
        for theirs, ours in zip(first.modules, self.modules, strict=True):
            for part, own_part in zip(theirs.modules(), ours.modules(), strict=True):
                own_part.training = part.training
            for param, own_param in zip(theirs.parameters(), ours.parameters(), strict=True):
                own_param.requires_grad_(param.requires_grad)
        for optimizer, own_optimizer in zip(first.optimizers, self.optimizers, strict=True):
            pairs = zip(optimizer.param_groups, own_optimizer.param_groups, strict=True)
            for group, own_group in pairs:
                own_group.update({k: v for k, v in group.items() if k != "params"})


class ParameterCheck(TorchFunctionMode):
    """Refuses parameters in a replica that are not its own; for the first step.

    Args:
        names: Names of the replica's parameters by identity.
        others: Names of the first replica's parameters.
        index: Number of the replica.
    """

    def __init__(self, names: Mapping[int, str], others: Mapping[int, str], index: int) -> None:
        super().__init__()
        self._names, self._others, self._index = names, others, index

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        for tensor in tensors_in([list(args), list(kwargs.values())]):
            if isinstance(tensor, nn.Parameter) and id(tensor) not in self._names:
                self._refuse(tensor)
        return func(*args, **kwargs)

    def _refuse(self, param: nn.Parameter) -> None:
        name = self._others.get(id(param))
        if name is None:
            msg = (
                f"replica {self._index} uses a parameter of shape {list(param.shape)} that was not "
                "made in this strategy's scope: make the model inside of strategy.scope()"
            )
        else:
            msg = (
                f"replica {self._index} uses replica 0's parameter {name}: inside of the step, get "
                "parameters from the model (model.parameters(), model.layer.weight), not from a "
                "list or a layer that was kept from before"
            )
        raise ConfigError(msg)


def _params_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]
