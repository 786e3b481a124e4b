"""Resolution of plans to the kind of each layer, before anything is changed.

The user's plan comes before the built-in plan of the model's family. All known problems are in one
error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from braid.errors import ConfigError, raise_all
from braid.parallel.tensor_parallel.insertion import Strategy, check_expressions
from braid.parallel.tensor_parallel.plans import KINDS, Family, check_heads, family_of
from braid.parallel.tensor_parallel.slices import Slicing
from braid.parallel.tensor_parallel.transposed import is_transposed
from braid.programs.layout import Layout

__all__ = ["LayerKind", "resolve"]

MATRIX = 2  # dims
KIND = re.compile(rf"({'|'.join(KINDS)})|(column|slice):\d+")


class LayerKind(NamedTuple):
    """Kind of sharding of a layer; see `plans`.

    Attributes:
        name: Name in a plan.
        number: Blocks of packed matrices for `column`, dim for `slice`.
    """

    name: str
    number: int = 1

    @classmethod
    def of(cls, value: str | Layout | Strategy, size: int) -> LayerKind:
        """Return the kind of a value in a plan for `size` ranks.

        A layout as value is the layout of a weight [out, in].

        Raises:
            ConfigError: The value is not a kind, or is a layout for another number of ranks.
        """
        if isinstance(value, str):
            if not KIND.fullmatch(value):
                msg = (
                    f"{value!r} is not a way to shard a layer: use {', '.join(KINDS)}, or column:N"
                )
                raise ConfigError(msg)
            name, _, number = value.partition(":")
            return cls(name, int(number or 1))
        if not isinstance(value, Layout | tuple | list):
            msg = f"values of a plan must be a kind ({', '.join(KINDS)}) or a layout, got {value!r}"
            raise ConfigError(msg)
        if not isinstance(value, Layout):
            msg = (
                f"{value} shards an operator, and operators are found by running the model once: "
                "pass an example batch as inputs="
            )
            raise ConfigError(msg)
        split = [dim for dim, axes in enumerate(value.dims) if axes]
        if len(split) != 1 or value.partial or len(value.dims) != MATRIX:
            msg = f"a layout of a weight must shard exactly one of its two dims, got {value}"
            raise ConfigError(msg)
        parts = math.prod(value.mesh.axes[axis] for axis in value.dims[split[0]])
        if parts != size:
            msg = (
                f"the layout {value} of a weight has {parts} shards, but the group has {size} "
                f"ranks: name an axis of {size} ranks"
            )
            raise ConfigError(msg)
        return cls("row") if split[0] else cls("column", value.blocks[0] if value.blocks else 1)

    @classmethod
    def from_slicing(cls, module: nn.Module, slicing: Slicing) -> LayerKind:
        """Return the kind of a layer, given the slicing of its weight; inverse of `slicing`."""
        if isinstance(module, nn.Embedding):
            return cls("slice", slicing.dim) if slicing.dim else cls("vocab")
        by_outputs = slicing.dim == cls("column").slicing(module).dim
        return cls("column" if by_outputs else "row", slicing.blocks)

    def slicing(self, module: nn.Module) -> Slicing:
        """Return the slicing of a layer's weight."""
        if self.name == "slice":
            return Slicing(self.number)
        by_outputs = self.name in {"column", "head", "vocab"}
        return Slicing(int(by_outputs == is_transposed(module)), self.number)

    def __str__(self) -> str:
        """Return the kind as written in a plan."""
        has_number = self.name == "slice" or self.number > 1
        return f"{self.name}:{self.number}" if has_number else self.name


def resolve(
    model: nn.Module,
    plan: Mapping[str, str | Layout | Strategy] | None,
    size: int,
    *,
    by_graph: bool,
) -> dict[str, LayerKind]:
    """Return which layers of a model a plan shards over `size` ranks: name -> kind.

    Args:
        model: The model.
        plan: See `parallelize`.
        size: Number of ranks.
        by_graph: Whether the model is sharded by its graph, which can find a plan: the result is
            empty without a plan and a family.

    Raises:
        ConfigError: See `parallelize`.
    """
    family = family_of(model)
    if plan is None and family is None:
        if by_graph:
            return {}
        msg = (
            f"there is no built-in plan for {type(model).__name__}: pass inputs=, a batch, to find "
            r"one from its graph, or give one, such as {r'\.up$': 'column', r'\.down$': 'row'}"
        )
        raise ConfigError(msg)
    kinds = dict(_kinds_of(model, plan or {}, family or Family({}), size))
    if not kinds:
        msg = f"no layer of {type(model).__name__} matches the plan: pass a plan that names layers"
        raise ConfigError(msg)
    if family is not None:
        check_heads(model, family, size)
    _check(model, kinds, size, by_graph=by_graph)
    return kinds


def _kinds_of(
    model: nn.Module, plan: Mapping[str, Any], family: Family, size: int
) -> Iterator[tuple[str, LayerKind]]:
    """Yield the modules that plans match, with their kinds."""
    user_kinds, problems = {}, []
    for expression, value in plan.items():
        try:
            user_kinds[expression] = LayerKind.of(value, size)
        except ConfigError as exc:
            problems.append(str(exc))
    known = {expression: LayerKind.of(text, size) for expression, text in family.plan.items()}
    names = [name for name, _ in model.named_modules()]
    problems += check_expressions(plan, names)
    decided: set[str] = set()
    for name in names if not problems else ():
        for expression, kind in (*user_kinds.items(), *known.items()):
            if re.search(expression, name):
                decided.add(expression)
                if kind.name != "whole":
                    yield name, kind
                break
    if not problems:
        problems = [
            f"{expression!r} matches only modules that an earlier expression decides: put it first"
            for expression in user_kinds
            if expression not in decided
        ]
    raise_all(problems)


def _check(model: nn.Module, kinds: Mapping[str, LayerKind], size: int, *, by_graph: bool) -> None:
    """Raise ConfigError with all layers that cannot be sharded, before anything is changed."""
    problems = []
    plans: dict[nn.Parameter, tuple[str, Slicing]] = {}
    for name, kind in kinds.items():
        module = model.get_submodule(name)
        if not isinstance(getattr(module, "weight", None), nn.Parameter):
            problems.append(f"{name} ({type(module).__name__}) has no weight to shard")
            continue
        weight, slicing = cast("nn.Parameter", module.weight), kind.slicing(module)
        if (problem := _unfit(module, kind, slicing.dim, weight, by_graph=by_graph)) is not None:
            problems.append(f"{name} {problem}")
            continue
        try:
            slicing.check(name, weight.shape[slicing.dim], size)
        except ConfigError as exc:
            problems.append(str(exc))
        other, known = plans.setdefault(weight, (name, slicing))
        if known != slicing:
            problems.append(
                f"{name} and {other} share a weight but shard it in two ways: use one kind for both"
            )
    problems += [
        f"{name} shares the weight of {plans[param][0]}, which is sharded: add it to the plan, "
        "for example as 'head' for a last layer that shares an embedding's rows"
        for name, module in (model.named_modules() if not by_graph else ())
        for param in module.parameters(recurse=False)
        if param in plans and name not in kinds
    ]
    raise_all(problems)


def _unfit(
    module: nn.Module, kind: LayerKind, dim: int, weight: torch.Tensor, *, by_graph: bool
) -> str | None:
    """Return why a kind does not apply to a module; None if it does."""
    if dim >= weight.dim():
        return f"has a weight of {weight.dim()} dims, but the plan shards its dim {dim}"
    if by_graph or kind.name == "slice":
        return None
    embedding, linear = isinstance(module, nn.Embedding), isinstance(module, nn.Linear)
    if embedding if kind.name == "vocab" else linear or is_transposed(module):
        return None
    fits = "vocab or slice:1" if embedding else "column, row or head" if linear else "whole"
    advice = "" if embedding or linear else ", or pass inputs=, a batch, to shard it by its graph"
    return f"({type(module).__name__}) cannot be sharded as {str(kind)!r}: use {fits}{advice}"
