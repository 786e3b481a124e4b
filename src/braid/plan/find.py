"""Plans for a user's model, from the user's program.

    plan = braid.find_plan(model, images, batch=256, cluster="cluster.toml")
    print(plan.split, plan.predicted.seconds)

The model is captured, cut wherever a single value crosses, and its operations are counted; nothing
is trained. Pass the plan's sizes to `braid.parallel.hybrid.HybridParallel` or `braid.Pipeline`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from braid.comm import Group
from braid.comm.autograd.nested import map_tensors
from braid.errors import ConfigError
from braid.parallel.graph import capture, segments
from braid.plan.axes import expert_axis, sequence_axis
from braid.plan.costs import ParamDtype, Training
from braid.plan.described import (
    DescribedMachines,
    DescribedModel,
    LayerOperations,
    count_operations,
)
from braid.plan.plan_file import Plan
from braid.plan.search import Split, fastest_mesh, find_splits
from braid.programs.topology import Cluster, Device, read_cluster

__all__ = [
    "captured_layers",
    "copied_without_memory",
    "described_layers",
    "fastest_meshes",
    "find_plan",
]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class CapturedLayers(NamedTuple):
    """A captured model, cut into sequential layers.

    Attributes:
        named: Layers with their names.
        sample: Function of a number of rows that returns an input of the first layer.
    """

    named: list[tuple[str, nn.Module]]
    sample: Callable[[int], Any]


def captured_layers(model: nn.Module, *args: Any, **kwargs: Any) -> CapturedLayers:
    """Capture a model, and cut it into the largest possible number of layers.

    Args:
        model: The model.
        args: Example arguments of its forward.
        kwargs: Example arguments by name.

    Raises:
        ConfigError: The model cannot be captured.
    """
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as exc:
        msg = f"{type(model).__name__}.forward does not take these arguments: {exc}"
        raise ConfigError(msg) from exc
    args, kwargs = bound.args, bound.kwargs
    if args and kwargs:
        msg = f"pass {', '.join(kwargs)} by name only if all arguments are passed by name"
        raise ConfigError(msg)
    graph = capture(model, *args, **kwargs)
    refused = graph.refused_cuts()
    modules = [i for i, node in enumerate(graph.nodes) if node.kind == "module"]
    cuts = [0, *(i for i in modules[1:] if i not in refused)]
    labels = graph.labels()
    parts = segments(graph, len(cuts), cuts)
    inputs = args if not kwargs else (*args, kwargs)
    batch = inputs[0] if len(inputs) == 1 else inputs

    def sample(rows: int) -> Any:
        return map_tensors(batch, lambda x: _of_rows(x, rows))

    return CapturedLayers([(labels[i], p) for i, p in zip(cuts, parts, strict=True)], sample)


def find_plan(
    model: nn.Module,
    *args: Any,
    batch: int,
    cluster: Cluster | str | Path,
    num_ranks: int | None = None,
    memory_bytes: float | None = None,
    dtype: ParamDtype = "fp32",
    optimizer_states: int = 2,
    asynchronous: bool = False,
    **kwargs: Any,
) -> Plan:
    """Return the split of a model's training that is predicted to be the fastest on a cluster.

    Parameter servers are not considered: a plan is for the ranks of collectives.

    Args:
        model: The model.
        args: Example arguments of its forward.
        batch: Rows of a step over all ranks.
        cluster: Cluster with a device, or its TOML file.
        num_ranks: Number of ranks; all ranks of the cluster if None.
        memory_bytes: Memory of a rank, if it differs from the device's.
        dtype: Dtype of parameters and activations: `fp32`, `bf16` or `fp16`.
        optimizer_states: Number of optimizer states per parameter: 2 for Adam, 1 for momentum.
        asynchronous: Whether to also consider pipelines with stale gradients.
        kwargs: Example arguments of the forward, by name.

    Returns:
        The plan, with predicted time and memory; `plan.write(file)` stores it.

    Raises:
        ConfigError: The model cannot be captured, the cluster has no device, the batch cannot be
            divided, or no split fits; the message names the missing memory.

    Cost: seconds; nothing is trained.
    """
    training = Training(batch, dtype, optimizer_states)
    costs, machines = _described(model, args, kwargs, cluster, dtype)
    ranking = find_splits(
        costs, machines(num_ranks, memory_bytes), training, asynchronous=asynchronous, servers=False
    )
    return Plan.of(ranking.estimator, ranking.best)


def fastest_meshes(
    model: nn.Module,
    *args: Any,
    rows: int,
    shards: int,
    cluster: Cluster | str | Path,
    shard: int = 0,
    num_microbatches: int = 1,
    schedule: str = "1f1b",
    memory_bytes: float | None = None,
    dtype: ParamDtype = "fp32",
    optimizer_states: int = 2,
    **kwargs: Any,
) -> Callable[[int], str]:
    """Return a function that maps a number of ranks to the mesh with the fastest steps.

    With `braid.elastic_mesh(build, fastest_meshes(...))`, training continues on the best mesh of
    the remaining ranks after a failure. The function compares meshes of pipeline stages and
    replicas, pp x dp. Replicas take the micro-batches of a step in rounds.

    Args:
        model: The model.
        args: Example arguments of its forward.
        rows: Rows of a micro-batch of the training.
        shards: Number of micro-batches of a step.
        cluster: Cluster with a device, or its TOML file.
        shard: Sharding stage (ZeRO) over replicas, as for `braid.elastic_mesh`.
        num_microbatches: Number of parts into which a pipeline divides a micro-batch.
        schedule: Name of the pipeline's schedule.
        memory_bytes: Memory of a rank, if it differs from the device's.
        dtype: Dtype of parameters and activations: `fp32`, `bf16` or `fp16`.
        optimizer_states: Number of optimizer states per parameter: 2 for Adam, 1 for momentum.
        kwargs: Example arguments of the forward, by name.

    Returns:
        The function. It is the same on all ranks, takes milliseconds, and raises ConfigError if no
        mesh of a number of ranks fits into the memory.

    Raises:
        ConfigError: The model cannot be captured, or the cluster has no device.

    Cost: seconds, once; nothing is trained.
    """
    costs, machines = _described(model, args, kwargs, cluster, dtype)

    training = Training(rows, dtype, optimizer_states)
    wish = Split(shard=shard, schedule=schedule, microbatches=num_microbatches)

    def choose(num_ranks: int) -> str:
        return fastest_mesh(costs, machines(num_ranks, memory_bytes), training, wish, shards)

    return cache(choose)


def _described(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cluster: Cluster | str | Path,
    dtype: ParamDtype,
) -> tuple[DescribedModel, Callable[[int | None, float | None], DescribedMachines]]:
    """Return the costs of a model, and a function of ranks and memory that returns the machines'.

    Raises:
        ConfigError: The model cannot be captured, or the cluster has no device.
    """
    if not isinstance(cluster, Cluster):
        cluster = read_cluster(cluster)
    device = cluster.device
    if device is None:
        msg = "the cluster has no device: add a [device] with a name, such as t4"
        raise ConfigError(msg)
    layers = captured_layers(model, *args, **kwargs)
    on_meta = copied_without_memory(layers.named)  # counting moves the layers
    operations = count_operations(on_meta, layers.sample, dtype=DTYPES[dtype])

    def machines(num_ranks: int | None, memory_bytes: float | None) -> DescribedMachines:
        if memory_bytes is not None and not memory_bytes > 0:
            msg = f"memory_bytes must be above 0, got {memory_bytes:g}"
            raise ConfigError(msg)
        return DescribedMachines(
            cluster, device, num_ranks=num_ranks, memory_bytes=memory_bytes, dtype=dtype
        )

    name = type(model).__name__
    return described_layers(name, on_meta, operations, device, dtype), machines


def described_layers(
    model: str,
    named: Sequence[tuple[str, nn.Module]],
    operations: Sequence[LayerOperations],
    device: Device,
    dtype: str,
) -> DescribedModel:
    """Return the costs of captured layers on a device, with the axes that they support.

    Args:
        model: Name of the model.
        named: The layers, with their names.
        operations: Their operations.
        device: Device that computes.
        dtype: Dtype of matrix products.
    """
    has_attention = any(layer.kv_bytes.of(1) for layer in operations)
    sequences = sequence_axis(0, has_attention=has_attention)
    experts = expert_axis(layer for _, layer in named)
    return DescribedModel(
        model,
        {1: operations},
        device,
        dtype,
        expert_sizes=experts.sizes,
        left_out=sequences.left_out,
    )


def copied_without_memory(named: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Return copies of layers on the meta device."""
    memo: dict[int, Any] = {}
    for _, layer in named:
        for param in layer.parameters():
            memo[id(param)] = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        for buffer in layer.buffers():
            memo[id(buffer)] = buffer.to("meta")
        for value in (value for module in layer.modules() for value in vars(module).values()):
            if isinstance(value, torch.Tensor):  # a result that the module keeps
                memo[id(value)] = value.detach().to("meta")
            elif isinstance(value, Group):
                memo[id(value)] = value
    return copy.deepcopy(named, memo)


def _of_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return rows of an example, repeated if there are too few."""
    if not x.dim():
        return x
    times = -(-rows // max(1, len(x)))
    return x.repeat(times, *(1,) * (x.dim() - 1))[:rows]
