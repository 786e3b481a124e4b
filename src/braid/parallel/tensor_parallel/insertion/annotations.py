"""Annotations of operators with their splits, written at the operators as in MindSpore.

    self.first = Shard(torch.matmul, ((4, 1), (1, 1)))     data parallel: rows of X in 4 parts
    self.second = Shard(torch.matmul, ((1, 1), (1, 4)))    model parallel: columns of W in 4 parts

An annotation has the number of parts of each dim of each input. The ranks form an array whose dims
are those parts, in the order in which the dims first occur in the inputs; remaining ranks are its
first dim and hold replicas. The arrays of all operators are refined to one mesh, and values are
moved between operators with different splits: here Y is gathered once.

Source: MindSpore's operator-level parallelism (its documentation, "shard"); the example is from
OpenMLSys, chapter on distributed training.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn

from braid.errors import ConfigError, raise_all
from braid.parallel.tensor_parallel.insertion.calls import OperatorCall, module_of, shape_of
from braid.parallel.tensor_parallel.insertion.labels import Labels
from braid.parallel.tensor_parallel.insertion.rules import rule_of
from braid.programs.layout import Mesh

__all__ = ["Shard", "Strategy", "annotated", "check_expressions", "strategies_in"]

Strategy = Sequence[Sequence[int]]
"""Number of parts of each dim of each input of an operator."""

Splits = dict[int, tuple[str, ...]]
"""Axes of each label of an operator."""


class Shard(nn.Module):
    """Operator with an annotation of how to shard its inputs; without sharding, just the operator.

    Args:
        operator: Function of tensors, such as `torch.matmul`, or a module of one operation.
        strategy: Number of parts of each dim of each input, including a module's parameters.
    """

    def __init__(self, operator: Callable[..., torch.Tensor], strategy: Strategy) -> None:
        super().__init__()
        self.operator = operator
        self.strategy = tuple(tuple(parts) for parts in strategy)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the result of the operator."""
        return self.operator(*inputs)

    def extra_repr(self) -> str:
        """Return the operator and its strategy, for `repr`."""
        return (
            f"{getattr(self.operator, '__name__', type(self.operator).__name__)}, {self.strategy}"
        )


def strategies_in(model: nn.Module, plan: Mapping[str, Any] | None) -> dict[str, Strategy]:
    """Return the annotations of a model and of a plan, by the name of the module."""
    strategies: dict[str, Strategy] = {
        name: module.strategy for name, module in model.named_modules() if isinstance(module, Shard)
    }
    plan_strategies = {
        text: value for text, value in (plan or {}).items() if isinstance(value, tuple | list)
    }
    names = [name for name, _ in model.named_modules()]
    problems = check_expressions(plan_strategies, names)
    for expression, value in plan_strategies.items() if not problems else ():
        strategies.update(dict.fromkeys((n for n in names if re.search(expression, n)), value))
    if strategies and len(plan_strategies) < len(plan or {}):
        kinds = [expression for expression in plan or {} if expression not in plan_strategies]
        problems.append(
            f"kinds or layouts of weights ({', '.join(map(repr, kinds))}) cannot be combined "
            f"with annotations of operators ({', '.join(strategies)}): annotate the operators of "
            "these layers instead"
        )
    raise_all(problems)
    return strategies


def check_expressions(expressions: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return problems of regular expressions that are invalid or match no name."""
    problems = []
    for expression in expressions:
        try:
            fits = any(re.search(expression, name) for name in names)
        except re.error as exc:
            problems.append(f"{expression!r} is not a regular expression: {exc}")
            continue
        if not fits:
            problems.append(
                f"{expression!r} matches no module of the model: see model.named_modules()"
            )
    return problems


def annotated(
    graph: fx.Graph, strategies: Mapping[str, Strategy], size: int
) -> tuple[Mesh, dict[fx.Node, Splits]]:
    """Return a mesh for all annotations, and the mesh axes that split each operator's dims.

    Args:
        graph: Graph of the whole model.
        strategies: Annotations by the name of the module.
        size: Number of ranks.

    Raises:
        ConfigError: An annotation matches no operation, does not divide the ranks, or no mesh can
            represent all annotations; the message has all problems.
    """
    problems: list[str] = []
    arrays: dict[fx.Node, tuple[list[int], dict[int, int]]] = {}
    for name, strategy in strategies.items():
        operator = _operator(graph, name, strategy)
        if operator is None:
            shapes = f"{len(strategy)} inputs of {[len(parts) for parts in strategy]} dims"
            problems.append(f"{name} has no operation with {shapes}, as its annotation requires")
            continue
        node, labels = operator
        try:
            counts = _parts(name, strategy, labels, size)
        except ConfigError as exc:
            problems.append(str(exc))
            continue
        arrays[node] = ([size // math.prod(counts.values()), *counts.values()], counts)
    raise_all(problems)
    mesh = mesh_of([array for array, _ in arrays.values()])
    return mesh, {node: _axes(mesh, array, counts) for node, (array, counts) in arrays.items()}


def mesh_of(arrays: Sequence[Sequence[int]]) -> Mesh:
    """Return the coarsest mesh in which each dim of each array of ranks is a product of axes.

    Raises:
        ConfigError: There is no such mesh.

    >>> str(mesh_of([[1, 4, 1, 1], [2, 1, 1, 2]]))
    'a=2,b=2'
    """
    cuts = {1}
    for array in arrays:
        cuts.update(math.prod(array[i:]) for i in range(len(array)))
    ordered = sorted(cuts)
    for small, large in pairwise(ordered):
        if large % small:
            msg = (
                f"the annotations need ranks in groups of {small} and of {large}, but no mesh "
                "has both: use numbers of shards that divide each other"
            )
            raise ConfigError(msg)
    sizes = [large // small for small, large in pairwise(ordered)][::-1]
    return Mesh({chr(ord("a") + i): n for i, n in enumerate(sizes or [1])})


def _operator(graph: fx.Graph, name: str, strategy: Strategy) -> tuple[fx.Node, Labels] | None:
    """Return the first operation of a module with inputs as in its annotation, and its labels."""
    for node in graph.nodes:
        place = module_of(node) if node.op == "call_function" else None
        if place is None or not (place == name or place.startswith(f"{name}.")):
            continue
        call = OperatorCall(node)
        xs = call.tensors()
        if [len(shape_of(x)) for x in xs[: len(strategy)]] != [len(parts) for parts in strategy]:
            continue
        rule = rule_of(call)
        if rule is not None:
            return node, rule(call)
    return None


def _parts(name: str, strategy: Strategy, labels: Labels, size: int) -> dict[int, int]:
    """Return the number of parts of each label, in the order of first occurrence."""
    counts: dict[int, int] = {}
    for index, (parts, dims) in enumerate(zip(strategy, labels.inputs, strict=False)):
        for dim, (count, label) in enumerate(zip(parts, dims, strict=True)):
            if label is None and count > 1:
                msg = (
                    f"{name}: dim {dim} of input {index} must not be sharded, but has {count} "
                    "shards"
                )
                raise ConfigError(msg)
            if label is not None and counts.setdefault(label, count) != count:
                msg = (
                    f"{name}: dim {dim} of input {index} should have {count} shards, but the "
                    f"matching dim of another tensor has {counts[label]}: use one number"
                )
                raise ConfigError(msg)
    used = math.prod(counts.values())
    if size % used:
        msg = (
            f"{name}: {used} shards cannot be distributed over {size} ranks: use a divisor of "
            f"{size}"
        )
        raise ConfigError(msg)
    return counts


def _axes(mesh: Mesh, array: Sequence[int], counts: Mapping[int, int]) -> Splits:
    """Return the axes of the mesh that make up each dim of an array of ranks."""
    names = iter(mesh.axes.items())
    taken = [tuple(_until(names, length)) for length in array]
    return {label: axes for label, axes in zip(counts, taken[1:], strict=True) if axes}


def _until(names: Iterator[tuple[str, int]], length: int) -> Iterator[str]:
    product = 1
    while product < length:
        name, size = next(names)
        product *= size
        yield name
