"""Modules and optimizers made in a scope; each replica uses a separate copy of them.

    with strategy.scope():                    replica 0            replica 1
        model = Net()              model  ->  the object itself    a copy of it
        optimizer = SGD(...)   optimizer  ->  the object itself    a copy with the copy's parameters

The program has one object, and each replica has one copy. So the class of the object is replaced
by a derived class: in the thread of replica 1, calls and attribute accesses use the replica's copy.
In all other threads the object behaves as before.

Copies are made before the first step, after the program has prepared the objects (loaded weights,
moved or frozen parameters). Changes that the program makes between steps, such as loaded weights or
a learning rate, are copied before the next step. Submodules redirect only calls, so that a forward
of the first replica has no overhead. The check in the first step raises an error if a replica
accesses parameters of another replica.
"""

from __future__ import annotations

import copyreg
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.overrides import TorchFunctionMode

from braid.comm.autograd.nested import tensors_in
from braid.errors import ConfigError
from braid.parallel.gradients.incomplete import params_of
from braid.strategies.contexts import get_replica_context

__all__ = ["MadeInScope", "ParameterCheck", "shared_objects_refused", "source_of"]

CopyOf = Callable[[object], Any]  # the running replica's copy of an object; None for the object
CONTAINER = ("__len__", "__iter__", "__getitem__", "__contains__")


class _NotedObjects(threading.local):
    """List in which this thread notes the objects that it makes."""

    objects: list[weakref.ref[Any]] | None = None


_NOTED = _NotedObjects()


class _Patched:
    """Methods of torch's classes that are replaced while any thread is in a block.

    torch has hooks for parts that a module registers, but none for modules without parts, for
    optimizers that are made, or for steps of schedulers.

    Args:
        name: Name of the method.
        kinds: Classes that have it.
        replaced: Function of the method that returns the other one.
    """

    def __init__(
        self, name: str, kinds: Sequence[Any], replaced: Callable[[Callable[..., Any]], Any]
    ) -> None:
        self._name = name
        self._methods = {kind: getattr(kind, name) for kind in kinds}
        self._replaced = replaced
        self._lock = threading.Lock()
        self._count = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Replace the methods of the classes inside the block."""
        self._change(+1)
        try:
            yield
        finally:
            self._change(-1)

    def _change(self, by: int) -> None:
        with self._lock:
            self._count += by
            for kind, method in self._methods.items():
                setattr(kind, self._name, self._replaced(method) if self._count else method)


def _noting(init: Callable[..., None]) -> Callable[..., None]:
    def noted(thing: Any, *args: Any, **kwargs: Any) -> None:
        if _NOTED.objects is not None:
            _NOTED.objects.append(weakref.ref(thing))
        init(thing, *args, **kwargs)

    return noted


def _refusing(method: Callable[..., Any]) -> Callable[..., Any]:
    def refused(shared: Any, *args: Any, **kwargs: Any) -> Any:
        if get_replica_context() is not None:
            msg = (
                f"{type(shared).__name__}.{method.__name__}() was called in a replica, but all "
                "replicas share the object: call it after strategy.run"
            )
            raise ConfigError(msg)
        return method(shared, *args, **kwargs)

    return refused


_CONSTRUCTORS = _Patched("__init__", (nn.Module, torch.optim.Optimizer), _noting)
_STEPS = _Patched("step", (LRScheduler, ReduceLROnPlateau, torch.amp.GradScaler), _refusing)
_UNSCALES = _Patched("unscale_", (torch.amp.GradScaler,), _refusing)


@contextmanager
def shared_objects_refused() -> Iterator[None]:
    """In the block, raise if a replica steps a learning rate scheduler or a gradient scaler."""
    with _STEPS.active(), _UNSCALES.active():
        yield


class MadeInScope:
    """Modules and optimizers of one strategy, in the order in which they were made.

    Args:
        copy_of: Function that returns the current replica's copy of an object; None if the replica
            uses the object itself.
    """

    def __init__(self, copy_of: CopyOf) -> None:
        self._copy_of = copy_of
        self._classes: dict[tuple[type, type], Any] = {}
        self._objects: list[weakref.ref[nn.Module | torch.optim.Optimizer]] = []

    @property
    def count(self) -> int:
        """Number of objects made so far."""
        return len(self._objects)

    @contextmanager
    def tracked(self) -> Iterator[None]:
        """Record the modules and optimizers that this thread makes in the block."""
        before, _NOTED.objects = _NOTED.objects, self._objects
        try:
            with _CONSTRUCTORS.active():
                yield
        finally:
            _NOTED.objects = before

    def add(self, things: Iterable[nn.Module | torch.optim.Optimizer]) -> None:
        """Record objects that were made outside of the scope."""
        known = {id(ref()) for ref in self._objects}
        self._objects += [weakref.ref(thing) for thing in things if id(thing) not in known]

    def modules(self) -> list[nn.Module]:
        """Return the modules that are not submodules of other modules."""
        alive = [thing for ref in self._objects if isinstance(thing := ref(), nn.Module)]
        parts = {id(part) for module in alive for part in module.children()}
        return list(dict.fromkeys(module for module in alive if id(module) not in parts))

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers made in the scope."""
        return [thing for ref in self._objects if isinstance(thing := ref(), torch.optim.Optimizer)]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return all parameters by name; names begin with the module's number if several exist."""
        modules = self.modules()
        prefixes = ["" if len(modules) == 1 else f"{i}." for i in range(len(modules))]
        return {
            prefix + name: param
            for prefix, module in zip(prefixes, modules, strict=True)
            for name, param in module.named_parameters()
        }

    def check(self, num_copies: int) -> None:
        """Check that the objects can be distributed.

        Args:
            num_copies: Number of replicas in this process.

        Raises:
            ConfigError: An optimizer has parameters that are in no module of the scope, a lazy
                module has no shapes yet, or a compiled module needs several copies.
        """
        for name, param in self.named_parameters().items():
            if isinstance(param, UninitializedParameter):
                msg = (
                    f"{name} has no shape yet: call the lazy module once with an example input "
                    "before strategy.run"
                )
                raise ConfigError(msg)
        for part in (part for module in self.modules() for part in module.modules()):
            if num_copies > 1 and _is_compiled(part):
                msg = (
                    f"{type(part).__name__} is compiled for one copy of its parameters, and "
                    f"{num_copies} replicas of this process need {num_copies}: pass the module "
                    "that was compiled, or use MultiWorkerMirroredStrategy, where each process "
                    "compiles its own"
                )
                raise ConfigError(msg)
        known = {id(param) for param in self.named_parameters().values()}
        for optimizer in self.optimizers():
            for number, tensor in enumerate(params_of(optimizer)):
                if id(tensor) not in known:
                    msg = (
                        f"parameter {number} (shape {list(tensor.shape)}) of "
                        f"{type(optimizer).__name__} belongs to no module made in this "
                        "strategy's scope: make the model in the scope as well"
                    )
                    raise ConfigError(msg)

    def redirect(self) -> None:
        """Make each object pass its calls to the current replica's copy, from now on."""
        whole = {id(module) for module in self.modules()}
        for ref in self._objects:
            thing = ref()
            if thing is not None and not isinstance(thing, _Redirected):
                is_part = isinstance(thing, nn.Module) and id(thing) not in whole
                key = type(thing), _Redirected if is_part else _RedirectedWhole
                if key not in self._classes:
                    self._classes[key] = _redirected_class(*key, self._copy_of)
                thing.__class__ = self._classes[key]


class _Redirected:
    """A submodule of a module made in a scope: a call runs the current replica's copy."""

    _braid_copy_of: CopyOf  # of the class, so that copies of an object have nothing of the strategy
    _braid_kind: type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        other = _copy(self)
        if other is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        return other(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are of the first class."""
        kind = type(self)._braid_kind  # noqa: SLF001 - of this module
        function, args, *state = cast("tuple[Any, ...]", super().__reduce_ex__(protocol))
        if function is copyreg.__newobj__:  # type: ignore[attr-defined]
            function = _new_object  # pickle compares the other one's class with the object's
        return function, tuple(kind if arg is type(self) else arg for arg in args), *state


class _RedirectedWhole(_Redirected):
    """A module or optimizer made in a scope; its attributes are the current replica's copy's."""

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


def _new_object(kind: Any, *args: Any) -> Any:
    return kind.__new__(kind, *args)


def _copy(thing: Any) -> Any:
    """Return the current replica's copy of an object; None where it uses the object."""
    return type(thing)._braid_copy_of(thing)  # noqa: SLF001 - of this module


def _redirected_class(kind: Any, base: type, copy_of: CopyOf) -> type:
    """Return a class with objects that act as a replica's copy in the replica's thread."""
    methods: dict[str, Any] = {
        "__module__": kind.__module__,
        "_braid_kind": kind,
        "_braid_copy_of": staticmethod(copy_of),
    }
    if base is _RedirectedWhole:
        names = (*CONTAINER, "__getattr__")
        methods |= {name: _special(kind, name) for name in names if hasattr(kind, name)}
    return type(kind.__name__, (base, kind), methods)


def _special(kind: type, name: str) -> Callable[..., Any]:
    """Return a special method, looked up in the class, that calls the current replica's copy."""
    method = getattr(kind, name)

    def redirected(self: Any, *args: Any) -> Any:
        other = _copy(self)
        return method(self, *args) if other is None else getattr(type(other), name)(other, *args)

    return redirected


class ParameterCheck(TorchFunctionMode):
    """Raises if a replica uses parameters or buffers of another replica; for the first step.

    It also raises for trainable parameters that do not belong to any replica, since nothing
    averages their gradients. Frozen parameters and other buffers are constants of the step.

    Args:
        names: Names of the replica's parameters and buffers by identity.
        others: Names of the first replica's parameters and buffers.
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
            if id(tensor) in self._names:
                continue
            is_param = issubclass(type(tensor), nn.Parameter)  # a fake one of torch.compile is not
            if id(tensor) in self._others or (is_param and tensor.requires_grad):
                self._refuse(tensor)
        return func(*args, **kwargs)

    def _refuse(self, param: torch.Tensor) -> None:
        name = self._others.get(id(param))
        if name is None:
            msg = (
                f"replica {self._index} uses the trainable parameter {_described(param)}, which "
                "was not made in this strategy's scope: make the model inside of strategy.scope(), "
                "or freeze the parameter with requires_grad_(False) if it is a constant"
            )
        else:
            msg = (
                f"replica {self._index} uses {name} of replica 0: inside the step, get "
                "parameters, buffers and methods from the model (such as model.layer.weight), "
                "not from a list or layer stored before"
            )
        raise ConfigError(msg)


def _described(param: torch.Tensor) -> str:
    """Return the name of a parameter in the largest module that has it, and its shape."""
    modules = [
        x for x in gc.get_objects() if issubclass(type(x), nn.Module) and "_modules" in vars(x)
    ]
    names = [
        f"{name} of {type(module).__name__}"
        for module in modules
        for name, p in module.named_parameters()
        if p is param
    ]
    name = max(names, key=lambda name: name.count("."), default="without a module")
    return f"{name} (shape {list(param.shape)})"


def source_of(fn: Callable[..., Any]) -> tuple[object, ...]:
    """Return a value that is equal for functions with the same code and the same models."""
    return _code_of(fn), *_objects_of(fn)


def _code_of(fn: Callable[..., Any]) -> object:
    """Return what functions of the same source have in common."""
    function = getattr(fn, "func", fn)  # of a partial
    function = getattr(function, "__func__", function)  # of a method
    return getattr(function, "__code__", type(function))


def _objects_of(fn: Any) -> list[weakref.ref[Any]]:
    """Return the noted modules and optimizers that belong to the function itself."""
    function = getattr(fn, "func", fn)
    owner = getattr(function, "__self__", function)
    cells = getattr(getattr(function, "__func__", function), "__closure__", None) or ()
    values = [owner, *getattr(fn, "args", ())]
    for cell in cells:
        with suppress(ValueError):  # of a name that has no value yet
            values.append(cell.cell_contents)
    return [weakref.ref(x) for x in values if isinstance(x, (nn.Module, torch.optim.Optimizer))]


def _is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile or torch.jit has made a module."""
    wraps = any(name == "_orig_mod" for name, _ in module.named_children())  # torch.compile's
    return wraps or isinstance(module, torch.jit.ScriptModule)
