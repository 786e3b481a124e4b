"""A captured model: the calls of its modules and the operations between them, in order.

    node   kind       target            inputs   outputs
    0      module     transformer.wte   0        1
    1      function   torch.arange               2
    2      module     transformer.wpe   2        3
    3      function   add               1, 3     4
    4      module     transformer.h.0   4        5

Inputs and outputs are numbers of values. The values that cross a cut are computed before it and
used after it, so a stage sends a set of tensors to the next stage, not a single tensor.

An operation that writes in place gives new numbers to the tensor and all its views. Because they
must be computed on the rank that writes, there is no cut between their first use and the write.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from braid.errors import ConfigError

__all__ = ["BatchDevice", "ByMode", "CapturedGraph", "GraphNode", "Modes", "Scaled"]


class Scaled(NamedTuple):
    """Placeholder for a number that depends on the batch's rows: `factor * rows + offset`."""

    factor: int
    offset: int


class ByMode(NamedTuple):
    """Placeholder for an argument that differs between training and evaluation."""

    train: Any
    eval: Any


class BatchDevice(NamedTuple):
    """Placeholder for the device of the batch, instead of the example's device."""


class Modes(NamedTuple):
    """Modes that a model sets around its calls.

    Attributes:
        grad: Whether gradients are recorded; None if the model does not set it.
        autocast: Device type, whether it is on, and dtype, for each autocast that the model sets.
    """

    grad: bool | None = None
    autocast: tuple[tuple[str, bool, torch.dtype], ...] = ()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Set the modes inside of the context."""
        with ExitStack() as stack:
            if self.grad is not None:
                stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield


class GraphNode(NamedTuple):
    """Call of a module or a function.

    Attributes:
        kind: `module` or `function`.
        target: Name of the module, or the function.
        tree: Positional and keyword arguments, with placeholders instead of tensors.
        inputs: Numbers of the values for these placeholders.
        result_tree: Result, with placeholders instead of tensors.
        outputs: Numbers of the values for these placeholders.
        where: File and line of the model with the call.
        writes: Values that the call changes in place, as pairs of their numbers before and after.
        modes: Modes that the model sets around the call.
        is_checkpointed: Whether the model calls it under `torch.utils.checkpoint`.
        devices: Devices that the model names around the call, the outermost first.
    """

    kind: str
    target: str | Callable[..., Any]
    tree: Any
    inputs: tuple[int, ...]
    result_tree: Any
    outputs: tuple[int, ...]
    where: str
    writes: tuple[tuple[int, int], ...] = ()
    modes: Modes = Modes()
    is_checkpointed: bool = False
    devices: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the module or function."""
        return self.target if isinstance(self.target, str) else name_of(self.target)

    @property
    def made(self) -> tuple[int, ...]:
        """Numbers of the values that the call returns or changes in place."""
        return (*self.outputs, *(new for _, new in self.writes))

    def __str__(self) -> str:
        inputs, outputs = (", ".join(map(str, values)) for values in (self.inputs, self.outputs))
        return f"{self.name}({inputs}) -> {outputs}" if outputs else f"{self.name}({inputs})"


@dataclass(frozen=True, kw_only=True)
class CapturedGraph:
    """Model as a graph of calls; `capture` creates it.

    Attributes:
        nodes: Calls, in order.
        modules: Called modules of the model, by name.
        tensors: Parameters, buffers and other tensors of the model that operations use directly, by
            number of the value.
        names: Names of the parameters and buffers among `tensors`.
        transient: Names of the model's buffers that its `state_dict` leaves out.
        num_inputs: Number of input values, the tensors of the batch in order.
        result_tree: Result of the model, with placeholders instead of tensors.
        results: Numbers of the values for these placeholders.
        is_training: Whether the model was in training mode when it was captured.
        other_mode: Why the graph is valid only in the mode `is_training`; empty if it is valid in
            training and evaluation.
        batch_tree: Arguments of the model, with placeholders instead of tensors.
        rows_of: Number of an input with the batch's rows as dim 0.
    """

    nodes: tuple[GraphNode, ...]
    modules: Mapping[str, nn.Module]
    tensors: Mapping[int, torch.Tensor]
    names: Mapping[int, str]
    transient: frozenset[str] = frozenset()
    num_inputs: int
    result_tree: Any
    results: tuple[int, ...]
    is_training: bool = True
    other_mode: str = ""
    batch_tree: Any = None
    rows_of: int = 0

    def cuts(self, num_parts: int) -> list[int]:
        """Return positions at which to cut the graph into parts with about equal parameters.

        A part begins with a module; operations before it belong to the previous part.

        Raises:
            ConfigError: The graph cannot be cut into as many parts.
        """
        if num_parts == 1:
            return [0]
        refused = self.refused_cuts()
        modules = [i for i, node in enumerate(self.nodes) if node.kind == "module"]
        places = [i for i in modules[1:] if i not in refused]
        if num_parts < 1 or len(places) < num_parts - 1:
            inside = f" at {len(places)} places" if len(places) < len(modules) - 1 else ""
            why = "".join(f"; {text}" for text in sorted(set(refused.values()))[:3])
            msg = f"{len(modules)} modules cannot be cut{inside} into {num_parts} parts: use "
            raise ConfigError(f"{msg}fewer stages{why if inside else ''}")
        layers = {i: self.modules[str(self.nodes[i].target)] for i in modules}
        sizes = {i: sum(p.numel() for p in m.parameters()) + 1 for i, m in layers.items()}
        total = sum(sizes.values())
        cuts = [0]
        for position, place in enumerate(places):
            remaining = num_parts - len(cuts)
            num_before = sum(size for i, size in sizes.items() if i < place)
            is_due = num_before >= total * len(cuts) / num_parts
            if remaining and (is_due or len(places) - position == remaining):
                cuts.append(place)
        return cuts

    def refused_cuts(self) -> dict[int, str]:
        """Return the positions at which a part cannot begin, with the reason for each."""
        born: dict[int, int] = dict.fromkeys(range(self.num_inputs), 0)
        refused: dict[int, str] = {}
        used = {value for node in self.nodes for value in node.inputs} | set(self.results)
        for i, node in enumerate(self.nodes):
            for value in node.inputs:
                born.setdefault(value, i)  # for the model's own tensors
            for old, new in node.writes:
                if old in node.inputs or new in used:
                    msg = f"{node} at {node.where} writes to {old} in place, which is made earlier"
                    refused |= dict.fromkeys(range(born.get(old, i) + 1, i + 1), msg)
            born |= dict.fromkeys(node.made, i)
        return refused

    def crossing(self, position: int) -> tuple[int, ...]:
        """Return the values of earlier nodes that the node at `position` or later ones use."""
        made = set(range(self.num_inputs))
        for node in self.nodes[:position]:
            made.update(node.made)
        used = {value for node in self.nodes[position:] for value in node.inputs}
        return tuple(sorted(made & (used | set(self.results))))

    def hops(self, cuts: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return (value, producing stage, consuming stage) for values that cross stages.

        A value is sent from the part that computes it to the first part that uses it, and from that
        part to the next user. So gradients are added in the same order as in the whole model.

        Args:
            cuts: Positions at which parts begin.
        """
        parts: dict[int, list[int]] = {value: [0] for value in range(self.num_inputs)}
        for position, node in enumerate(self.nodes):
            part = bisect_right(cuts, position) - 1
            for value in node.inputs:
                if value in parts:
                    parts[value].append(part)
            parts |= {value: [part] for value in node.made}
        for value in self.results:
            if value in parts:
                parts[value].append(len(cuts) - 1)
        return [
            (value, one, other)
            for value, users in parts.items()
            for one, other in pairwise(users)
            if one != other
        ]

    def labels(self) -> tuple[str, ...]:
        """Return a unique name for each node: its module's name, numbered for repeated calls."""
        labels: list[str] = []
        calls: dict[str, int] = {}
        for position, node in enumerate(self.nodes):
            number = calls[node.name] = calls.get(node.name, 0) + 1
            if node.kind == "function":
                labels.append(f"{node.name} at {position}")
            else:
                labels.append(node.name if number == 1 else f"{node.name} call {number}")
        return tuple(labels)

    def __str__(self) -> str:
        return "\n".join(map(str, self.nodes))


def check_cuts(graph: CapturedGraph, cuts: Sequence[int]) -> None:
    """Raise ConfigError unless `cuts` ascend from 0, and a part of the graph may begin at each."""
    num_nodes = len(graph.nodes)
    in_order = list(cuts) == sorted(set(cuts))
    if not cuts or cuts[0] != 0 or not in_order or cuts[-1] >= max(num_nodes, 1):
        msg = f"cuts must be ascending indices of graph nodes from 0 to {num_nodes - 1}, got {cuts}"
        raise ConfigError(msg)
    refused = graph.refused_cuts()
    problems = [f"a part cannot begin at {i}: {refused[i]}" for i in cuts if i in refused]
    if problems:
        msg = f"{'; '.join(problems)}. Cut elsewhere, or use an out-of-place operation"
        raise ConfigError(msg)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of the attribute for a property's accessor."""
    name = str(getattr(function, "__name__", function))
    if name in {"__get__", "__set__"}:
        return str(getattr(getattr(function, "__self__", None), "__name__", name))
    return name
