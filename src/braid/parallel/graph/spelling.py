"""Conversion of values, functions and module names to Python expressions.

Objects that another program could not create again (a lambda, a closure, an object without a
literal) have no expression.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import keyword
import math
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from braid.comm.autograd.nested import index_of, parts_of
from braid.errors import ConfigError
from braid.parallel.graph.captured import BatchDevice, ByMode, GraphNode, Scaled, name_of
from braid.parallel.graph.recorder import Applied
from braid.runtime.torch_internals import OpOverload, OpOverloadPacket, functions_of_nn

__all__ = ["Spelling", "Unspelled", "spell_path"]

LONG = 70  # length of a call above which it is split into several lines
# methods of tensors, and the operators that call them
OPERATORS: Mapping[str, str] = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "matmul": "@", "pow": "**",
    "__and__": "&", "__or__": "|", "__xor__": "^", "__eq__": "==", "eq": "==", "ne": "!=",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "__pow__": "**", "__floordiv__": "//", "__mod__": "%",
}  # fmt: skip
REFLECTED: Mapping[str, str] = {
    "__rsub__": "-", "__rpow__": "**", "__rdiv__": "/", "__rtruediv__": "/", "__rmatmul__": "@",
    "__rfloordiv__": "//", "__rmod__": "%",
}  # fmt: skip
TORCH: tuple[tuple[str, Any], ...] = (
    ("torch", torch),
    ("functional", functional),
    ("torch.linalg", torch.linalg),
    ("torch.fft", torch.fft),
    ("torch.special", torch.special),
    ("torch._C._nn", functions_of_nn),
)


class Unspelled(ConfigError):
    """Error: a value of a captured graph cannot be written as a Python expression."""


class Spelling:
    """Builder of Python expressions for the calls in a generated module.

    Attributes:
        imports: Modules that the expressions need.
    """

    def __init__(self) -> None:
        self.imports: set[str] = set()

    def call(self, node: GraphNode, names: Sequence[str], callee: str = "") -> str:
        """Return the expression of a node's call.

        Args:
            node: The node.
            names: Expressions of the node's inputs.
            callee: Expression of the called module.
        """
        args, kwargs = node.tree
        target = node.target
        if isinstance(target, str):
            return self._plain_call(callee, args, kwargs, names)
        method = _method_of(target)
        if method is None:
            return self._plain_call(self.function(target), args, kwargs, names)
        receiver, *rest = (self.value(arg, names) for arg in args)
        if getattr(target, "__name__", "") == "__get__":
            return f"{receiver}.{method}"
        if method == "__getitem__":
            return f"{receiver}[{self._index(args[1], names)}]"
        if method == "__setitem__":
            return f"{receiver}[{self._index(args[1], names)}] = {rest[1]}"
        if len(rest) == 1 and not kwargs and re.fullmatch(r"[\w.\[\]]+", receiver):
            if method in OPERATORS:
                return f"{receiver} {OPERATORS[method]} {rest[0]}"
            if method in REFLECTED:
                return f"{rest[0]} {REFLECTED[method]} {receiver}"
        return self._plain_call(f"{receiver}.{method}", args[1:], kwargs, names)

    def _plain_call(
        self, callee: str, args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]
    ) -> str:
        arguments = [self._argument(arg, names) for arg in args]
        arguments += [f"{name}={self._argument(arg, names)}" for name, arg in kwargs.items()]
        if len(callee) + sum(map(len, arguments)) > LONG:
            return "\n".join([f"{callee}(", *(f"    {part}," for part in arguments), ")"])
        return f"{callee}({', '.join(arguments)})"

    def _argument(self, tree: Any, names: Sequence[str]) -> str:
        text = self.value(tree, names)
        return text[1:-1] if isinstance(tree, Scaled) and text.startswith("(") else text

    def function(self, function: Callable[..., Any]) -> str:
        """Return the expression of a function.

        Raises:
            Unspelled: The function has no name, such as a lambda.
        """
        if isinstance(function, Applied):
            return f"{self.imported(function.kind)}.apply"
        if isinstance(function, OpOverload | OpOverloadPacket):
            return f"torch.ops.{function}"
        name = getattr(function, "__name__", "")
        for prefix, space in TORCH:
            if getattr(space, name, None) == function:
                return f"{prefix}.{name}"
        return self.imported(function)

    def imported(self, thing: Any) -> str:
        """Return the qualified name of a class or function, and record its import.

        Raises:
            Unspelled: The object cannot be imported by its name.
        """
        module, path = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
        value: Any = None
        if module and path and "<" not in path:
            value = importlib.import_module(module)
            for name in path.split("."):
                value = getattr(value, name, None)
        if value is not thing:
            msg = f"{thing!r} cannot be imported: define it with a name at the top of a module"
            raise Unspelled(msg)
        if module == "builtins":
            return str(path)
        self.imports.add(str(module))
        return f"{module}.{path}"

    def value(self, tree: Any, names: Sequence[str]) -> str:
        """Return the Python expression of an argument's value.

        Args:
            tree: The value, with placeholders instead of tensors.
            names: Expressions of the tensors of these placeholders.

        Raises:
            Unspelled: The value has no expression.
        """
        place = index_of(tree)
        if place is not None:
            return names[place]
        if isinstance(tree, Scaled):
            return _scaled(tree)
        if isinstance(tree, BatchDevice):
            return "device"
        if isinstance(tree, ByMode):
            return self._by_mode(tree, names)
        if isinstance(tree, enum.Enum):
            return f"{self.imported(type(tree))}.{tree.name}"
        if isinstance(tree, slice):
            parts = (self.value(x, names) for x in (tree.start, tree.stop, tree.step))
            return f"slice({', '.join(parts)})"
        return _literal(tree) or (
            self.function(tree) if callable(tree) else self._container(tree, names)
        )

    def _by_mode(self, tree: ByMode, names: Sequence[str]) -> str:
        if tree == (True, False):
            return "self.training"
        if tree == (False, True):
            return "(not self.training)"
        train, evaluation = (self.value(x, names) for x in tree)
        return f"({train} if self.training else {evaluation})"

    def _container(self, tree: Any, names: Sequence[str]) -> str:
        parts = parts_of(tree)
        if parts is None:
            msg = f"the value {tree!r} ({type(tree).__name__}) cannot be written as Python source"
            raise Unspelled(msg)
        values = {key: self.value(part, names) for key, part in parts.items()}
        if type(tree) is dict:
            return f"{{{', '.join(f'{key!r}: {value}' for key, value in values.items())}}}"
        if type(tree) is list:
            return f"[{', '.join(values.values())}]"
        if type(tree) in {tuple, torch.Size}:
            inside = f"({', '.join(values.values())}{',' if len(values) == 1 else ''})"
            return inside if type(tree) is tuple else f"torch.Size({inside})"
        kind = self.imported(type(tree))
        if hasattr(tree, "_fields"):
            values = dict(zip(tree._fields, values.values(), strict=True))
        elif isinstance(tree, tuple | list):
            return f"{kind}([{', '.join(values.values())}])"
        elif isinstance(tree, MutableMapping) and not dataclasses.is_dataclass(tree):
            inside = ", ".join(f"{key!r}: {value}" for key, value in values.items())
            return f"{kind}({{{inside}}})"
        elif dataclasses.is_dataclass(tree) and not isinstance(tree, MutableMapping):
            made = {field.name for field in dataclasses.fields(tree) if field.init}
            if not made >= values.keys():
                msg = (
                    f"the constructor of {kind} does not take the fields "
                    f"{sorted(values.keys() - made)}"
                )
                raise Unspelled(msg)
        return f"{kind}({', '.join(f'{key}={value}' for key, value in values.items())})"

    def _index(self, index: Any, names: Sequence[str]) -> str:
        """Return the expression between the brackets of an index."""
        if isinstance(index, slice):
            parts = [
                "" if x is None else self.value(x, names)
                for x in (index.start, index.stop, index.step)
            ]
            return ":".join(parts if parts[2] else parts[:2])
        if type(index) is tuple and index:
            parts = [self._index(part, names) for part in index]
            return ", ".join(parts) + ("," if len(parts) == 1 else "")
        return self.value(index, names)


def _literal(x: Any) -> str:
    """Return the literal of a value; empty if it has none."""
    if isinstance(x, float) and not math.isfinite(x):
        return f"float({str(x)!r})"
    if isinstance(x, torch.device):
        return f"torch.device({str(x)!r})"
    if isinstance(x, torch.dtype | torch.memory_format | torch.layout):
        return str(x)
    if x is Ellipsis:
        return "..."
    return repr(x) if x is None or type(x) in {bool, int, float, complex, str, bytes} else ""


def spell_path(owner: str, path: str) -> str:
    """Return Python source for the module or tensor `path` of the variable `owner`.

    >>> spell_path("self", "layers.0.weight")
    'self.layers[0].weight'
    """
    for name in path.split(".") if path else ():
        if name.isidentifier() and not keyword.iskeyword(name):
            owner += f".{name}"
        else:
            owner += f"[{name}]" if name.isdecimal() else f"[{name!r}]"
    return owner


def _method_of(function: Any) -> str | None:
    """Return the name of a tensor's method or property; None for other functions."""
    name = name_of(function)
    if getattr(function, "__name__", "") == "__get__":
        return name
    names = (name, f"__{name}__")  # the wrapped `pow` of an operator is `__pow__`
    return next((n for n in names if getattr(torch.Tensor, n, None) == function), None)


def _scaled(number: Scaled) -> str:
    factor, offset = number
    text = "rows" if factor == 1 else f"{factor} * rows"
    if offset:
        text += f" {'+' if offset > 0 else '-'} {abs(offset)}"
    return text if text == "rows" else f"({text})"
