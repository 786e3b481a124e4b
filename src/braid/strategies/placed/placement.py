"""`place`: captures a model, names and chooses devices of its nodes, and hosts the parts there.

make ─▶ model, example ─▶ capture ─▶ names of devices ─▶ placer ─▶ PlacedModel
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from braid.comm.autograd.nested import flatten
from braid.errors import ConfigError
from braid.parallel.graph import CapturedGraph
from braid.parallel.graph.eager_capture import kept_as_it_was
from braid.strategies.placed.constraints import DeviceMap, placer_nodes, sizes_of_values
from braid.strategies.placed.master import PlacedModel, PlacedOptions
from braid.strategies.placed.placer import choose_devices
from braid.strategies.placed.tasks import Tasks
from braid.strategies.placed.worker import captured

__all__ = ["place"]

STEP_S = 300.0  # for a step by default


def place(
    model: nn.Module | Callable[..., Any],
    example: Any = None,
    *,
    devices: DeviceMap | None = None,
    args: Sequence[Any] = (),
    nodes: Sequence[str] | None = None,
    num_cpus: int = 1,
    seed: int = 0,
    timeout_s: float = STEP_S,
) -> PlacedModel:
    """Place the parts of a model on the devices of a cluster.

    Args:
        model: Function that returns a model and its example arguments; each task calls it by its
            name, so it is at the top of a module. Or a model, if all devices are of this process.
        example: Example arguments of a model; a tuple for several, a dict for keyword arguments.
        devices: Devices of modules by pattern, see `constraints`; the placer chooses the others.
        args: Arguments of the function.
        nodes: Names of the nodes of remote calls that are tasks; all nodes when None.
        num_cpus: Number of CPU devices that each task has.
        seed: Seed of random numbers, such as dropout's. They depend on the seed, the step,
            the layer and the sample, and not on the placement.
        timeout_s: Seconds that a step may take.

    Raises:
        ConfigError: A device does not exist, or nodes that need one device have different ones.
            Or a name is inside of a module that runs as one call, or capturing the model fails.
        MismatchError: A task has made another model.
    """
    made: Any = (model, example) if isinstance(model, nn.Module) else model(*args)
    module, example = made
    graph = captured(module, example)
    _check_results(graph)
    tasks = Tasks(nodes, num_cpus)
    try:
        chosen = _chosen_devices(module, graph, example, devices or {}, tasks)
        make = None if isinstance(model, nn.Module) else model
        options = PlacedOptions(make, tuple(args), seed, timeout_s)
        return PlacedModel(module, graph, chosen, tasks, options)
    except BaseException:
        tasks.close()
        raise


def _chosen_devices(
    model: nn.Module, graph: CapturedGraph, example: Any, devices: DeviceMap, tasks: Tasks
) -> list[str]:
    """Return the device of each node."""
    placed, colocations = placer_nodes(graph, devices, None)
    free = any(sum(map(node.spec.matches, tasks.devices)) > 1 for node in placed)
    if free:
        _, inputs = flatten(example)
        with kept_as_it_was(model, inputs):
            sizes = sizes_of_values(graph, inputs)
        placed, colocations = placer_nodes(graph, devices, sizes)
    return list(map(str, choose_devices(placed, colocations, tasks.devices)))


def _check_results(graph: CapturedGraph) -> None:
    """Refuse a model that returns a parameter or buffer itself, which no node makes."""
    names = [graph.names.get(v, "a tensor") for v in graph.results if v in graph.tensors]
    if names:
        msg = f"the model returns {', '.join(names)} itself, not a computed tensor: return a clone"
        raise ConfigError(msg)
