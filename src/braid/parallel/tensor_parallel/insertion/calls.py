"""Operations of an exported graph, with their arguments by name, shapes, module and source line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from braid.runtime.torch_internals import OpOverload

__all__ = ["OperatorCall", "length_of", "module_of", "shape_of", "source_of", "tensor_of"]

FILE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


class OperatorCall:
    """Call of a torch operation in a captured graph.

    Attributes:
        node: Node in the graph.
        name: Name of the operation without overload, such as `aten.add`.
        arguments: Each argument by its name in the schema, with defaults.
        blocks: Number of packed blocks in each dim of the first tensor; empty without a layout.
    """

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.name = name_of(node)
        schema = getattr(node.target, "_schema", None)
        self.arguments: dict[str, Any] = {}
        self.blocks: tuple[int, ...] = ()
        for index, argument in enumerate(schema.arguments if schema is not None else ()):
            default = argument.default_value
            argument_value = node.args[index] if index < len(node.args) else default
            self.arguments[argument.name] = node.kwargs.get(argument.name, argument_value)

    def __getitem__(self, name: str) -> Any:
        """Return an argument."""
        return self.arguments[name]

    def tensors(self) -> tuple[fx.Node, ...]:
        """Return the tensor arguments, in order, including tensors in lists."""
        return tuple(self._tensors(list(self.arguments.values()) or [*self.node.args]))

    def _tensors(self, values: Any) -> Iterator[fx.Node]:
        for value in values:
            if isinstance(value, fx.Node) and tensor_of(value) is not None:
                yield value
            elif isinstance(value, list | tuple):
                yield from self._tensors(value)

    def replace_tensors(self, tensors: Iterable[fx.Node]) -> None:
        """Replace the arguments of `tensors()` by other tensors, in the same order.

        A value that occurs several times among the arguments may be replaced differently each time.
        """
        rest = iter(tensors)

        def replaced(value: Any) -> Any:
            if isinstance(value, fx.Node) and tensor_of(value) is not None:
                return next(rest)
            return [*map(replaced, value)] if isinstance(value, list | tuple) else value

        if not self.arguments:
            self.node.args = tuple(map(replaced, self.node.args))
        for name, value in self.arguments.items():
            if isinstance(value, fx.Node | list | tuple):
                self.set(name, replaced(value))

    def set(self, name: str, value: Any) -> None:
        """Set an argument of the call, in the graph's node as well."""
        schema = self.node.target._schema  # type: ignore[union-attr]  # noqa: SLF001
        names = [argument.name for argument in schema.arguments]
        index = names.index(name)
        if name not in self.node.kwargs and index < len(self.node.args):
            self.node.update_arg(index, value)
        else:
            self.node.update_kwarg(name, value)
        self.arguments[name] = value


def name_of(node: fx.Node) -> str:
    """Return the name of an operation without its overload."""
    if isinstance(node.target, OpOverload):
        return str(node.target.overloadpacket).replace("::", ".")
    return getattr(node.target, "__name__", str(node.target))


def tensor_of(node: fx.Node) -> torch.Tensor | None:
    """Return the meta tensor that represents the whole value of a node."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def shape_of(node: fx.Node) -> tuple[int | torch.SymInt, ...]:
    """Return the shape of the whole tensor; lengths that vary between steps are symbolic."""
    tensor = tensor_of(node)
    assert tensor is not None, f"{node} is a tensor"
    return tuple(tensor.shape)


def length_of(size: int | torch.SymInt) -> int:
    """Return a length as an int; for a length that varies between steps, the example's length."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return int(hint) if hint is not None else 1


def module_of(node: fx.Node) -> str:
    """Return the name of the innermost module of a node; empty if it is unknown."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return str(path).removeprefix("L['self'].").removeprefix("L['self']")


def source_of(node: fx.Node) -> str:
    """Return the line of the program, outside of torch, that created a node."""
    lines = FILE.findall(node.stack_trace or "")
    user_lines = [line for line in lines if "/torch/" not in line[0]] or lines
    return f"{user_lines[-1][0]}:{user_lines[-1][1]}" if user_lines else "an unknown line"
