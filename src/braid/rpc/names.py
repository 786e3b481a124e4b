"""Names of functions and classes, and which of them a peer may call.

Problem: a peer that may name any function of the interpreter runs any code: `os.system` is one
name away, and so is each function that a permitted module has imported.

Idea: a function is sent by name, and the callee checks the name. It has an allow-list of modules
and a register of single functions. A name is valid only in the module that defines the object; from
torch, only operators, `nn`, `optim` and `distributions` are valid, because `torch.load` runs code.

    torch:add                 a function of torch, or a method: torch:Tensor.add
    aten:add.Tensor           an overload of an operator
    __main__:Net.forward      a function, class or method of a permitted module
    lookup                    an object registered under this name

The program's own modules are permitted: `__main__`, and modules with a file below the program's
directory, at the path that their name gives relative to that directory or to one of its parents.
Modules of an interpreter or environment below that directory are not permitted, because they are
imported from another root. A module and its parent packages are checked before they are imported.
"""

from __future__ import annotations

import builtins
import importlib
import sys
import types
from collections.abc import Callable, Iterable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch

from braid.errors import ConfigError
from braid.rpc.outcomes import RpcError
from braid.runtime.torch_internals import (
    OpOverload,
    OpOverloadPacket,
    functions_of_nn,
    qualified_name,
)

__all__ = ["Names", "is_operator", "register"]

_TORCH_MODULES = ("torch.nn", "torch.optim", "torch.distributions", "torch.special", "torch.linalg")
INSTALLED = frozenset({"site-packages", "dist-packages"})
_TORCH_REFUSED = frozenset({"from_file", "load", "save", "set_", "set_data"})
_PLAIN_TYPES = {
    f"{kind.__module__}:{kind.__qualname__}": kind
    for kind in (
        *(bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset),
        *(type(None), slice, range, torch.Tensor, torch.Size, torch.dtype, torch.device),
    )
}
_ERROR_MODULES = frozenset({"torch", "braid.errors", "braid.rpc.outcomes"})
_REGISTERED: dict[str, Any] = {}
_NAMES: dict[Any, str] = {}


def register(target: Any, name: str = "") -> Any:
    """Permit peers to call a function or send instances of a class, from any module; a decorator.

    Args:
        target: Function or class.
        name: Name, the same on all nodes; "module:name" when empty.

    Raises:
        ConfigError: Something else has the name.
    """
    name = name or f"{target.__module__}:{target.__qualname__}"
    known = _REGISTERED.setdefault(name, target)
    if known is not target and getattr(known, "__qualname__", "") != target.__qualname__:
        msg = f"{name!r} is already registered for {known.__qualname__}: choose another name"
        raise ConfigError(msg)
    _REGISTERED[name] = target
    _NAMES[target] = name
    return target


class Names:
    """Maps functions and classes to names, and resolves the names that peers may use.

    Args:
        allowed: Modules with functions and classes that peers may use, including submodules.
        is_open: Whether peers may use all modules.
    """

    def __init__(self, allowed: Iterable[str] = (), *, is_open: bool = False) -> None:
        self._allowed = tuple(allowed)
        self._is_open = is_open
        self._program = _program_directory()
        self._known: dict[str, Any] = {}
        self._names: dict[Any, str] = {}  # of functions that were called

    def name_of(self, target: Any) -> str:
        """Return the name of a function or class.

        Raises:
            RpcError: Peers cannot find it by name: it is a lambda, or defined inside a function.
        """
        try:
            if (name := _NAMES.get(target) or self._names.get(target)) is None:
                name = self._names[target] = self._name_of(target)
        except TypeError:  # unhashable
            return self._name_of(target)
        return name

    @staticmethod
    def _name_of(target: Any) -> str:
        if isinstance(target, OpOverload):
            return f"{target.namespace}:{target.__name__}"
        if isinstance(target, OpOverloadPacket):
            return f"{qualified_name(target).replace('::', ':')}"
        name = getattr(target, "__qualname__", "") or getattr(target, "__name__", "")
        if isinstance(target, torch.jit.ScriptFunction):
            msg = (
                f"{target.name} is compiled by torch.jit.script, and remote calls do not run "
                "TorchScript: pass the Python function before it is compiled"
            )
            raise RpcError(msg)
        module = _module_of(target)
        if (of_torch := _torch_name(target, name)) is not None:
            return of_torch
        if not name or "<" in name or not module:
            msg = (
                f"{name or target!r} cannot be called by name: define it with `def` at the top of "
                "a module that both sides import, or register it with rpc.register"
            )
            raise RpcError(msg)
        return f"{module}:{name}"

    def find(self, name: str) -> Any:
        """Return the object with a name that a peer sent.

        Raises:
            RpcError: No object has that name here, or peers may not use it.
        """
        if name not in self._known:
            self._known[name] = self._find(name)
        return self._known[name]

    def exception_name(self, error: BaseException) -> str:
        """Return the name of the type of an exception; never raises."""
        try:
            name = f"{_module_of(type(error))}:{type(error).__qualname__}"
            return name.encode().decode()
        except Exception:  # noqa: BLE001 - a metaclass may make anything of both
            return "builtins:RuntimeError"

    def exception_of(self, name: str) -> type[BaseException] | None:
        """Return the exception type with a name, from Python, torch, braid or the program.

        Returns None for other names.
        """
        module, _, short = name.partition(":")
        home: Any = builtins if module == "builtins" else None
        if module in _ERROR_MODULES or self._is_allowed(module):
            home = sys.modules.get(module)
        for part in short.split("."):
            home = getattr(home, part, None) if not part.startswith("__") else None
        return home if isinstance(home, type) and issubclass(home, BaseException) else None

    def _find(self, name: str) -> Any:
        if name in _REGISTERED:
            return _REGISTERED[name]
        if name in _PLAIN_TYPES:
            return _PLAIN_TYPES[name]
        module, _, path = name.partition(":")
        if module in {"aten", "prims"}:
            return _operator(name, module, path)
        if module == "torch":
            return _of_torch(name, path)
        if not path or not self._is_allowed(module):
            msg = (
                f"this node does not let other nodes use {name!r}: register it with "
                "rpc.register, or name its module in RpcOptions(allowed_modules=...)"
            )
            raise RpcError(msg)
        target: Any = sys.modules.get(module)
        if target is None:
            target = importlib.import_module(module)
        for part in path.split("."):
            target = getattr(target, part, None) if not part.startswith("__") else None
        if not callable(target):
            msg = (
                f"module {module} of this node has no {path!r}: use the same version of the "
                "module on both nodes"
            )
            raise RpcError(msg)
        if _module_of(target) != module:
            msg = f"{name!r} is defined in {target.__module__}: pass its name in that module"
            raise RpcError(msg)
        return target

    def _is_allowed(self, module: str) -> bool:
        if (
            self._is_open
            or module == "__main__"
            or _below(module, (*self._allowed, *_TORCH_MODULES))
        ):
            return True
        return self._program is not None and _is_of_program(module, self._program)


def is_operator(function: object) -> bool:
    """Return whether a function is an operator of torch, dispatched by its arguments."""
    kinds = types.BuiltinFunctionType | OpOverload | OpOverloadPacket
    module = getattr(function, "__module__", None) or ""
    return isinstance(function, kinds) and module.startswith("torch")


def _module_of(target: Any) -> str:
    """Return the module of a function or class.

    The program is `__main__` in the process that the user started, and `__mp_main__` in processes
    spawned by `multiprocessing`: both are named `__main__` here.
    """
    module = getattr(target, "__module__", None) or ""
    return "__main__" if module == "__mp_main__" else module


def _below(module: str, names: Iterable[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def _program_directory() -> Path | None:
    """Return the directory of the program; None in an interpreter at a prompt."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return None if path is None else Path(path).resolve().parent


def _is_of_program(module: str, program: Path) -> bool:
    """Return whether a module's file is below the program's directory, at the path of its name."""
    names = module.split(".")
    if names[0] in {"braid", *sys.stdlib_module_names} or not all(map(str.isidentifier, names)):
        return False
    if module in sys.modules:
        file = getattr(sys.modules[module], "__file__", None)
    else:
        file = _file_to_import(names, program)
    if file is None:
        return False
    path = Path(file).resolve()
    place = path.parent if path.name.startswith("__init__.") else path.parent / _stem(path)
    if place.parts[-len(names) :] != tuple(names) or INSTALLED & {*path.parts}:
        return False
    root = place.parents[len(names) - 1]
    return path.is_relative_to(program) and program.is_relative_to(root)


def _file_to_import(names: list[str], program: Path) -> Path | None:
    """Return the file below the program's directory that an import of a module would run."""
    spec = PathFinder.find_spec(names[0])
    if spec is None:
        return None
    top = Path(spec.origin or next(iter(spec.submodule_search_locations or [""]))).resolve()
    for root in (program, *program.parents):
        place = root.joinpath(*names)
        tops = (root / names[0], root / f"{names[0]}.py", root / names[0] / "__init__.py")
        for file in (place.with_name(f"{names[-1]}.py"), place / "__init__.py"):
            if top in tops and file.is_file():
                return file
    return None


def _stem(path: Path) -> str:
    return path.name.partition(".")[0]  # of a compiled module `x.cpython-311.so`, too


def _torch_name(target: Any, name: str) -> str | None:
    """Return the name of an operator of torch; None if `target` is not one."""
    if isinstance(target, types.MethodDescriptorType | types.BuiltinFunctionType):
        short = name.rpartition(".")[2]
        if getattr(torch, short, None) is target:
            return f"torch:{short}"
        if getattr(torch.Tensor, short, None) is target:
            return f"torch:Tensor.{short}"
        if getattr(functions_of_nn, short, None) is target:
            return f"torch:nn.functional.{short}"
    elif name and "." not in name and getattr(torch, name, None) is target:
        return f"torch:{name}"
    elif name and getattr(torch.Tensor, name.rpartition(".")[2], None) is target:
        return f"torch:Tensor.{name.rpartition('.')[2]}"
    return None


def _of_torch(name: str, path: str) -> Any:
    """Return an operator of torch, a method of tensors, or a function of `nn.functional`."""
    *place, short = path.split(".")
    home: Any = {
        (): torch,
        ("Tensor",): torch.Tensor,
        ("nn", "functional"): torch.nn.functional,
    }.get(tuple(place))
    target = getattr(home, short, None) if home is not None else None
    is_operator = isinstance(target, types.MethodDescriptorType | types.BuiltinFunctionType)
    module = getattr(target, "__module__", None) or ""
    is_function = isinstance(target, types.FunctionType) and module in {
        *("torch.functional", "torch._tensor", "torch._C._nn", "torch.nn.functional"),
    }
    if short.startswith("__") or short in _TORCH_REFUSED or not (is_operator or is_function):
        msg = (
            f"{name!r} is not an operator of torch that other nodes may call: use one of "
            "torch.ops.aten"
        )
        raise RpcError(msg)
    return target


def _operator(name: str, namespace: str, path: str) -> Callable[..., Any]:
    short, _, overload = path.partition(".")
    packet = getattr(getattr(torch.ops, namespace), short, None)
    target = getattr(packet, overload, None) if overload else packet
    if target is None or short in _TORCH_REFUSED:
        msg = (
            f"torch has no operator {name!r} that other nodes may call: use the same version of "
            "torch on all nodes"
        )
        raise RpcError(msg)
    return target  # type: ignore[no-any-return]
