"""Plans of a placed model: the fetched and fed values, and the parts that compute them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from braid.parallel.graph import CapturedGraph
from braid.strategies.placed.loss_node import LossSpec, with_loss
from braid.strategies.placed.partition import NodeValues, PlacedPart, partition

__all__ = ["MOST_PLANS", "PlanKey", "StepPlan", "loss_identity", "step_plan"]

MOST_PLANS = 16  # that are registered at the same time


class PlanKey(NamedTuple):
    """Key of a plan: the values of the graph that the caller requests and provides.

    Attributes:
        fetches: Values that are returned; empty to return only the loss.
        feeds: Values that the caller provides. None for the model's inputs: nodes that change
            buffers then run as well.
    """

    fetches: tuple[int, ...] = ()
    feeds: tuple[int, ...] | None = None


class StepPlan(NamedTuple):
    """Graph of one kind of step, pruned to the needed nodes and split by device.

    Attributes:
        number: Number of the plan.
        parts: Part of each device.
        loss: Number of the loss among the values; -1 without a loss.
        targets: Numbers of the target's values.
    """

    number: int
    parts: list[PlacedPart]
    loss: int
    targets: range


def step_plan(
    number: int,
    graph: CapturedGraph,
    values: Sequence[NodeValues],
    placement: Sequence[str],
    key: PlanKey,
    loss: LossSpec | None,
) -> StepPlan:
    """Return a plan that computes the values of `key`; the loss is with the first result.

    Args:
        number: Number of the plan.
        graph: The model.
        values: Values that each node reads, makes and overwrites.
        placement: Device of each node.
        key: Values that are fetched and fed.
        loss: The loss; None without one.
    """
    graph, value, targets = with_loss(graph, loss)
    nodes, devices, fetches = list(values), list(placement), key.fetches
    if key.feeds is not None:
        nodes = [node._replace(is_kept=False) for node in nodes]
    if loss is not None:
        makers = {v: i for i, node in enumerate(values) for v in node.made}
        devices.append(devices[makers.get(graph.results[0], -1)])
        nodes.append(NodeValues((*graph.results, *targets), (value,)))
        fetches = (value,)
    feeds = {*(range(graph.num_inputs) if key.feeds is None else key.feeds), *targets}
    return StepPlan(number, partition(nodes, devices, set(fetches) - feeds, feeds), value, targets)


def loss_identity(loss: LossSpec | None) -> Any:
    """Return an object that compares equal for loss functions with the same code."""
    if loss is None:
        return None
    function = loss.function
    code = getattr(function, "__code__", None)
    has_values = any(getattr(function, name, None) for name in ("__closure__", "__defaults__"))
    return function if code is None or has_values else code, repr(loss.target)
