# ruff: noqa: SLF001 - torch's own dictionaries: registering refuses names that a segment has itself
"""A part of a captured model as a module, which takes and returns the values that cross its cuts.

The first segment takes the batch: one tensor, or a tuple of those that were captured. The last one
returns what the model does. Between them a dictionary of values goes on, with the number of rows.
Parameters and buffers have the names that they have in the model, those that the model itself uses
between its modules, too: empty modules stand for their owners. So `state_dict` of a segment is a
part of the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from braid.autograd.nested import flatten, parts_of, rebuild, unflatten
from braid.errors import ConfigError
from braid.graph.captured import CapturedGraph, Node, Scaled, check_cuts

__all__ = ["Segment", "segments", "share_modules"]


def segments(
    graph: CapturedGraph, num_parts: int, cuts: Sequence[int] | None = None
) -> list[Segment]:
    """Cut a captured model into modules in a row.

    Args:
        graph: The model.
        num_parts: Number of segments.
        cuts: Positions of the nodes at which segments begin; chosen by parameters when None.

    Raises:
        ConfigError: The model cannot be cut so.
    """
    cuts = graph.cuts(num_parts) if cuts is None else list(cuts)
    check_cuts(cuts, len(graph.nodes))
    ends = [*cuts[1:], len(graph.nodes)]
    return [Segment(graph, begin, end) for begin, end in zip(cuts, ends, strict=True)]


class Segment(nn.Module):
    """Nodes `begin` to `end` of a graph.

    Args:
        graph: The model.
        begin: Position of the first node.
        end: Position after the last node.
    """

    def __init__(self, graph: CapturedGraph, begin: int, end: int) -> None:
        super().__init__()
        self._graph = graph
        self._nodes = graph.nodes[begin:end]
        self._is_first, self._is_last = begin == 0, end == len(graph.nodes)
        self._leaves = graph.crossing(end)
        used = {value for node in self._nodes for value in node.inputs}
        if self._is_last:
            used.update(graph.results)
        for node in self._nodes:
            if node.kind == "module":
                self._add_module(str(node.target))
        # neither parameters nor buffers, so not in `state_dict`
        self._tensors: dict[int, torch.Tensor] = {}
        for value in sorted(used & graph.tensors.keys()):
            if value in graph.names:
                self._add_tensor(graph.names[value], graph.tensors[value])
            else:
                self._tensors[value] = graph.tensors[value]

    def _add_module(self, name: str) -> None:
        *path, leaf = name.split(".")
        self._owner(path)._modules[leaf] = self._graph.modules[name]

    def _add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        *path, leaf = name.split(".")
        owner = self._owner(path)
        if isinstance(tensor, nn.Parameter):
            owner._parameters[leaf] = tensor
            return
        owner._buffers[leaf] = tensor
        if name in self._graph.transient:
            owner._non_persistent_buffers_set.add(leaf)

    def _owner(self, path: Sequence[str]) -> nn.Module:
        """Return the module at a path of names; makes empty ones where there are none."""
        module: nn.Module = self
        for name in path:
            inner = module._modules.get(name)
            if inner is None:
                inner = module._modules[name] = _Owner()
            module = inner
        return module

    def _tensor(self, value: int) -> torch.Tensor:
        """Return a tensor of the model as it is now: `to` and `load_state_dict` may replace it."""
        if value in self._tensors:
            return self._tensors[value]
        *path, leaf = self._graph.names[value].split(".")
        owner = self._owner(path)
        tensor = owner._parameters.get(leaf, owner._buffers.get(leaf))
        assert tensor is not None
        return tensor

    def forward(
        self, value: Any, *, around: Callable[[str], AbstractContextManager[None]] | None = None
    ) -> Any:
        """Run the nodes.

        Args:
            value: The batch, or what the previous segment returns.
            around: Makes the context in which a module runs, from its name.
        """
        if self._is_first:
            _, inputs = flatten(value)
            if len(inputs) != self._graph.num_inputs:
                msg = (
                    f"the model was captured with {self._graph.num_inputs} tensors, got "
                    f"{len(inputs)}"
                )
                raise ConfigError(msg)
            rows = next(x.shape[0] for x in inputs if x.dim())
            known = dict(enumerate(inputs))
        else:
            rows, known = value["rows"], dict(value["values"])
        for node in self._nodes:
            with nullcontext() if around is None else around(str(node.target)):
                self._call(node, known, rows)
        if self._is_last:
            results = [known[v] if v in known else self._tensor(v) for v in self._graph.results]
            return unflatten(self._graph.result_tree, results)
        return {"rows": rows, "values": {v: known[v] for v in self._leaves if v in known}}

    def _call(self, node: Node, known: dict[int, torch.Tensor], rows: int) -> None:
        inputs = [known[v] if v in known else self._tensor(v) for v in node.inputs]
        args, kwargs = unflatten(_filled(node.tree, rows), inputs)
        target = node.target
        call = self._owner(target.split(".")) if isinstance(target, str) else target
        assert callable(call)
        _, made = flatten(call(*args, **kwargs))
        known.update(zip(node.outputs, made, strict=True))


class _Owner(nn.Module):
    """An empty module in the place of one whose modules or tensors a segment uses."""


def share_modules(whole: nn.Module, segment: Segment) -> None:
    """Let a module have what a segment has, under the same names, and share it from then on.

    Args:
        whole: Module of all segments of a rank.
        segment: Segment, which uses the modules, parameters and buffers of `whole` afterwards.
    """
    _merge(whole, segment)
    for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
        setattr(segment, name, getattr(whole, name))


def _merge(whole: nn.Module, part: nn.Module) -> None:
    for name, inner in part._modules.items():
        own = whole._modules.get(name)
        if isinstance(own, _Owner) and isinstance(inner, _Owner):
            _merge(own, inner)
        elif own is None or isinstance(own, _Owner):  # which is empty beside the module itself
            whole._modules[name] = inner
    whole._parameters.update(part._parameters)
    whole._buffers.update(part._buffers)
    whole._non_persistent_buffers_set.update(part._non_persistent_buffers_set)


def _filled(tree: Any, rows: int) -> Any:
    """Return arguments with numbers in the place of those that depend on the rows."""
    if isinstance(tree, Scaled):
        return tree.factor * rows + tree.offset
    parts = parts_of(tree)
    if parts is None:
        return tree
    new = {key: _filled(value, rows) for key, value in parts.items()}
    return tree if all(new[key] is parts[key] for key in parts) else rebuild(tree, new)
