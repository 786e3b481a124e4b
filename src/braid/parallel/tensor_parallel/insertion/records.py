"""Input and output of the pass: options, rows of the explanation, conflicts."""

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
    """Options of the pass that shards a captured graph and inserts collectives.

    Attributes:
        sequence: Whether values between sharded layers are split along dim 1.
        strict: Whether an operation without a rule and with split inputs is an error.
        gather_outputs: Whether the outputs of the model are whole on each rank.
        costs: Costs of each axis.
    """

    sequence: bool = False
    strict: bool = False
    gather_outputs: bool = True
    costs: Mapping[str, AxisCost] = field(default_factory=dict)


@dataclass(frozen=True)
class Scheme:
    """Plan for sharding a model: mesh, and layouts of its parameters.

    Attributes:
        mesh: Named axes.
        layouts: Layout of each sharded parameter, by each of its names.
        options: Options of sharding.
        strategies: Annotations of operators, by the names of their modules.
    """

    mesh: Mesh
    layouts: Mapping[str, Layout]
    options: InsertionOptions
    strategies: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)


@dataclass(frozen=True)
class ExplanationRow:
    """Row of the table that explains the layout of each value.

    Attributes:
        node: Name of the value.
        module: Module of the value.
        operation: Operation or move.
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
    """Sharded value that an operation needs whole, and that is therefore gathered.

    Attributes:
        node: Node of the operation that needs the whole value.
        origins: Names of the sharded parameters that led to the conflict.
        reason: Reason why the operation needs the whole value.
        refused: Whether the conflict is an error, for example heads that cannot be divided.
    """

    node: fx.Node
    origins: frozenset[str]
    reason: str
    refused: bool = False
