"""Captures a model by running it, at the boundaries of its modules.

Problem: symbolic tracing fails on models that look at their inputs' shapes, and exporting freezes
what a model does in training and drops checkpointing. But a cut is needed between layers only.

Idea: run the model once. The forwards of *atoms* (repeated layers, and modules without children)
are recorded as one call each, and what happens inside stays the user's own module: dropout, hooks
and checkpointing work as before. The few operations between atoms are recorded as functions.
Runs with other numbers of rows show which numbers depend on them, and how.

Python values that depend on data (`.item()`, `if x.any():`) would be frozen, so between atoms they
are refused, with the line of the model. Those that depend on shapes only, such as a condition on
positions, are the same for every batch.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from braid.autograd.nested import flatten, map_tensors, parts_of, rebuild
from braid.errors import ConfigError
from braid.graph.captured import CapturedGraph, Node, Scaled

__all__ = ["capture"]

# what turns data into Python values
REFUSED = {
    torch.Tensor.item: "item()",
    torch.Tensor.tolist: "tolist()",
    torch.Tensor.__bool__: "a condition",
    torch.Tensor.__int__: "int()",
    torch.Tensor.__float__: "float()",
    torch.Tensor.__index__: "an index",
    torch.Tensor.numpy: "numpy()",
}
OWN = (__file__, torch.overrides.__file__)


def capture(model: nn.Module, *args: Any, **kwargs: Any) -> CapturedGraph:
    """Capture a model.

    Args:
        model: Model; it is run three times, without gradients, in the mode that it is in.
        args: Example arguments; tensors with at least three rows (dim 0).
        kwargs: Further example arguments.

    Returns:
        The graph, whose modules and parameters are those of `model`.

    Raises:
        ConfigError: The model turns data into Python values between modules, does something else
            for another number of rows, or its input has less than three rows.
    """
    _, tensors = flatten((args, kwargs))
    rows = next((x.shape[0] for x in tensors if x.dim()), 0)
    if rows < 3:
        msg = f"an example needs at least 3 rows (dim 0) to find what depends on them, got {rows}"
        raise ConfigError(msg)
    runs = []
    for count in (rows, rows - 1, rows - 2):
        cut = partial(map_tensors, change=partial(_first_rows, rows=rows, count=count))
        runs.append(_run(model, cut(args), cut(kwargs)))
    graph = _merged(runs[0], runs[1], rows)
    again = _merged(runs[1], runs[2], rows - 1)
    for one, other in zip(graph.nodes, again.nodes, strict=True):
        if not _equal(one.tree, other.tree):
            msg = (
                f"{one} at {one.where} depends on the number of rows in another way than "
                "factor * rows + offset: move it into a module"
            )
            raise ConfigError(msg)
    return graph


def _first_rows(x: torch.Tensor, rows: int, count: int) -> torch.Tensor:
    return x[:count] if x.dim() and x.shape[0] == rows else x


class _Recorder(TorchFunctionMode):
    """Records the calls of one run."""

    def __init__(self, model: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.modules: dict[str, nn.Module] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        self.names: dict[int, str] = {}
        self._known = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
        self._known |= {id(b): name for name, b in model.named_buffers()}
        self._values: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []  # an id is used again when its tensor is gone
        self._data: set[int] = set()  # values that depend on more than shapes
        self._inside = 0
        for x in inputs:
            self._data.add(self.value_of(x, is_made=True))

    def value_of(self, x: torch.Tensor, *, is_made: bool = False) -> int:
        """Return the number of a value; one that nothing has made is a tensor of the model."""
        value = self._values.get(id(x))
        if value is None:
            value = self._values[id(x)] = len(self._alive)
            self._alive.append(x)
            if not is_made:
                self._data.add(value)
                self.tensors[value] = x
                if id(x) in self._known:
                    self.names[value] = self._known[id(x)]
        return value

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        if func in REFUSED and self.value_of(args[0]) in self._data:
            msg = (
                f"{REFUSED[func]} at {_line()} makes the model depend on data between its "
                "modules, which a captured model cannot: move it into a module, or out of the model"
            )
            raise ConfigError(msg)
        result = func(*args, **kwargs)
        _, made = flatten(result)
        if made or func is torch.Tensor.__setitem__:
            self._record("function", func, (args, kwargs), result)
        return result

    def call_module(
        self, name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run an atom's forward, and record it as one call."""
        if self._inside:
            return forward(*args, **kwargs)
        self._inside += 1
        try:
            result = forward(*args, **kwargs)
        finally:
            self._inside -= 1
        self.modules[name] = module
        self._record("module", name, (args, kwargs), result)
        return result

    def _record(self, kind: str, target: str | Callable[..., Any], given: Any, result: Any) -> None:
        tree, used = flatten(given)
        inputs = tuple(self.value_of(x) for x in used)
        result_tree, made = flatten(result)
        outputs = tuple(self.value_of(x, is_made=True) for x in made)
        if kind == "module" or self._data.intersection(inputs):
            self._data.update(outputs)
        self.nodes.append(Node(kind, target, tree, inputs, result_tree, outputs, _line()))


def _run(model: nn.Module, args: Any, kwargs: Any) -> CapturedGraph:
    _, inputs = flatten((args, kwargs))
    recorder = _Recorder(model, inputs)
    with ExitStack() as stack:
        for name, module in _atoms(model):
            stack.enter_context(_recorded(recorder, name, module))
        stack.enter_context(torch.no_grad())
        stack.enter_context(recorder)
        result = model(*args, **kwargs)
    tree, tensors = flatten(result)
    return CapturedGraph(
        nodes=tuple(recorder.nodes),
        modules=recorder.modules,
        tensors=recorder.tensors,
        names=recorder.names,
        transient=frozenset(
            f"{prefix}.{name}" if prefix else name
            for prefix, module in model.named_modules()
            for name in module._non_persistent_buffers_set  # noqa: SLF001 - torch has no face for it
        ),
        num_inputs=len(inputs),
        result_tree=tree,
        results=tuple(recorder.value_of(x) for x in tensors),
    )


@contextmanager
def _recorded(recorder: _Recorder, name: str, module: nn.Module) -> Iterator[None]:
    """Let a module's forward be recorded; its own is put back at the end."""
    own = vars(module).get("forward")
    module.forward = partial(recorder.call_module, name, module, module.forward)
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _atoms(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield repeated layers, and modules without children, once each."""
    children = list(model.named_children())
    kinds = {type(child) for _, child in children}
    is_stack = isinstance(model, nn.ModuleList | nn.Sequential) and len(children) > 1
    for name, child in children:
        path = f"{prefix}{name}"
        if (is_stack and len(kinds) == 1) or not list(child.children()):
            if not isinstance(child, nn.ModuleList | nn.ModuleDict):
                yield path, child
        else:
            yield from _atoms(child, f"{path}.")
    if not children and not prefix:
        yield "", model


def _merged(whole: CapturedGraph, part: CapturedGraph, rows: int) -> CapturedGraph:
    """Return the graph with numbers that depend on the rows as such."""
    for one, other in zip(whole.nodes, part.nodes, strict=False):
        if (one.target, one.inputs, one.outputs) != (other.target, other.inputs, other.outputs):
            msg = f"for one row less the model calls {other} at {other.where} in place of {one}"
            raise ConfigError(msg)
    if len(whole.nodes) != len(part.nodes):
        msg = (
            f"for one row less the model makes {len(part.nodes)} calls, for {rows} rows "
            f"{len(whole.nodes)}: it cannot be captured"
        )
        raise ConfigError(msg)
    nodes = [
        one._replace(tree=_scaled(one.tree, other.tree, rows, one))
        for one, other in zip(whole.nodes, part.nodes, strict=True)
    ]
    return dataclasses.replace(whole, nodes=tuple(nodes))


def _scaled(one: Any, other: Any, rows: int, node: Node) -> Any:
    """Replace integers that differ between the runs by what they are for any rows."""
    if type(one) is float and type(other) is float and one != other:
        msg = (
            f"{node} at {node.where} has the number {one} for {rows} rows and {other} for one row "
            "less: between modules only whole numbers may depend on the rows"
        )
        raise ConfigError(msg)
    if type(one) is int and type(other) is int and one != other:
        factor = one - other  # rows differ by one
        return Scaled(factor, one - factor * rows)
    if isinstance(one, slice) and isinstance(other, slice) and one != other:
        msg = (
            f"{node} at {node.where} takes a slice that depends on the number of rows, {one}: move "
            "it into a module"
        )
        raise ConfigError(msg)
    parts, others = parts_of(one), parts_of(other)
    if parts is None or others is None or parts.keys() != others.keys():
        return one
    new = {key: _scaled(value, others[key], rows, node) for key, value in parts.items()}
    if all(new[key] is parts[key] for key in parts):
        return one
    return tuple(new.values()) if isinstance(one, tuple) else rebuild(one, new)


def _equal(one: Any, other: Any) -> bool:
    """Whether what depends on the rows depends on them alike in two trees."""
    if isinstance(one, Scaled) or isinstance(other, Scaled):
        return bool(one == other)
    parts, others = parts_of(one), parts_of(other)
    if parts is None or others is None:
        return True
    return all(_equal(value, others[key]) for key, value in parts.items() if key in others)


def _line() -> str:
    """Return the model's line that is being executed."""
    frame = sys._getframe(1)  # noqa: SLF001 - the only way to see the caller
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OWN):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
