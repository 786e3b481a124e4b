"""A captured model: the calls of its modules and the operations between them, in order.

    node   kind       target            inputs   outputs
    0      module     transformer.wte   0        1
    1      function   torch.arange               2
    2      module     transformer.wpe   2        3
    3      function   add               1, 3     4
    4      module     transformer.h.0   4        5

Inputs and outputs are numbers of values. A cut between two nodes is crossed by the values that are
made before it and used after it, so a stage hands on a set of tensors, not one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from braid.errors import ConfigError

__all__ = ["CapturedGraph", "Node", "Scaled"]


class Scaled(NamedTuple):
    """A number that depends on the rows of the batch: `factor * rows + offset`."""

    factor: int
    offset: int


class Node(NamedTuple):
    """One call.

    Attributes:
        kind: `module` or `function`.
        target: Name of the module, or the function.
        tree: Positional and keyword arguments, with places instead of tensors.
        inputs: Values in these places.
        result_tree: Result, with places instead of tensors.
        outputs: Values in these places.
        where: Line of the model that made the call.
    """

    kind: str
    target: str | Callable[..., Any]
    tree: Any
    inputs: tuple[int, ...]
    result_tree: Any
    outputs: tuple[int, ...]
    where: str

    def __str__(self) -> str:
        name = self.target if isinstance(self.target, str) else _name_of(self.target)
        return f"{name}({', '.join(map(str, self.inputs))}) -> {', '.join(map(str, self.outputs))}"


@dataclass(frozen=True, kw_only=True)
class CapturedGraph:
    """A model as nodes; `capture` makes it.

    Attributes:
        nodes: Calls, in order.
        modules: Modules that are called, by name; the user's own.
        tensors: Parameters and buffers that operations use directly, by number of the value; and
            tensors that the model holds otherwise.
        names: Names of the parameters and buffers among `tensors`.
        transient: Names of the model's buffers that its `state_dict` leaves out.
        num_inputs: Number of values that are inputs: tensors of the batch, in their order.
        result_tree: Result of the model, with places instead of tensors.
        results: Values in these places.
    """

    nodes: tuple[Node, ...]
    modules: Mapping[str, nn.Module]
    tensors: Mapping[int, torch.Tensor]
    names: Mapping[int, str]
    transient: frozenset[str] = frozenset()
    num_inputs: int
    result_tree: Any
    results: tuple[int, ...]

    def cuts(self, num_parts: int) -> list[int]:
        """Return positions of nodes at which parts begin, each with about as many parameters.

        A part begins with a module; operations before it belong to the previous part.

        Raises:
            ConfigError: There are fewer modules than parts.
        """
        places = [i for i, node in enumerate(self.nodes) if node.kind == "module"]
        if num_parts < 1 or len(places) < num_parts:
            msg = f"{len(places)} modules cannot be cut into {num_parts} parts: use fewer stages"
            raise ConfigError(msg)
        sizes = [self._num_params(self.nodes[i]) + 1 for i in places]
        cuts, done = [0], 0
        for position, (place, size) in enumerate(zip(places, sizes, strict=True)):
            left = num_parts - len(cuts)
            is_due = done >= sum(sizes) * len(cuts) / num_parts
            if left and position and (is_due or len(places) - position == left):
                cuts.append(place)
            done += size
        return cuts

    def crossing(self, position: int) -> tuple[int, ...]:
        """Return the values that are made before a node and used by it or later ones."""
        made = set(range(self.num_inputs))
        for node in self.nodes[:position]:
            made.update(node.outputs)
        used = {value for node in self.nodes[position:] for value in node.inputs}
        return tuple(sorted(made & (used | set(self.results))))

    def _num_params(self, node: Node) -> int:
        return sum(p.numel() for p in self.modules[str(node.target)].parameters())

    def __str__(self) -> str:
        return "\n".join(map(str, self.nodes))


def check_cuts(cuts: Sequence[int], num_nodes: int) -> None:
    """Raise ConfigError unless cuts are positions of nodes, ascending from 0."""
    if not cuts or cuts[0] != 0 or list(cuts) != sorted(set(cuts)) or cuts[-1] >= num_nodes:
        msg = f"cuts must be ascending positions of nodes from 0 to {num_nodes - 1}, got {cuts}"
        raise ConfigError(msg)


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", function))
