"""Input and output of the pass: choices, rows of the explanation, conflicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from braid.comm.redistribute import AxisCost
from braid.parallel.tensor_parallel.insertion.moves import StepCollective
from braid.programs.layout import Layout, Mesh

__all__ = ["Conflict", "ExplanationRow", "InsertionOptions", "Scheme"]


@dataclass(frozen=True)
class InsertionOptions:
    """Choices of the pass.

    Attributes:
        sequence: Whether values between divided layers are split along dim 1.
        strict: Whether an operation without a rule that meets parts is an error.
        gather_outputs: Whether the outputs of the model are whole on each rank.
        costs: Costs of each axis.
    """

    sequence: bool = False
    strict: bool = False
    gather_outputs: bool = True
    costs: Mapping[str, AxisCost] = field(default_factory=dict)


@dataclass(frozen=True)
class Scheme:
    """Division of a model.

    Attributes:
        mesh: Named axes.
        layouts: Layout of each divided parameter, by each of its names.
        options: Choices of the pass.
        strategies: Annotations of operators, by the names of their modules.
    """

    mesh: Mesh
    layouts: Mapping[str, Layout]
    options: InsertionOptions
    strategies: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)


@dataclass(frozen=True)
class ExplanationRow:
    """A line of the explanation.

    Attributes:
        node: Name of the value.
        module: Module that it comes from.
        operation: Operation, or the move.
        layout: Layout of the value.
        collectives: Collectives forward and backward.
    """

    node: str
    module: str
    operation: str
    layout: Layout
    collectives: tuple[StepCollective, ...] = ()


@dataclass(frozen=True)
class Conflict:
    """A split value that had to be gathered.

    Attributes:
        node: Operation that needs it whole.
        origins: Parameters whose division led to it.
        reason: Why.
        refused: Whether it cannot be meant, such as heads that do not divide.
    """

    node: fx.Node
    origins: frozenset[str]
    reason: str
    refused: bool = False
