"""Partition of layers into the stages of a pipeline, and checks of user arguments.

layers, a module, wires or a captured graph ──> named layers ──balance──> parts, one per stage
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from braid.comm.autograd.nested import tensors_in
from braid.errors import ConfigError
from braid.parallel.gradients import ParamTable
from braid.parallel.graph import CapturedGraph, GraphSegment, segments, share_modules
from braid.parallel.pipeline.deferred_batch_norm import DeferredBatchNorm
from braid.parallel.pipeline.microbatches import num_rows
from braid.parallel.pipeline.skip import SkipKey, skips_of, verify_skippables
from braid.parallel.pipeline.stage import Edge, Layer
from braid.parallel.pipeline.wired import Wired, wired
from braid.runtime.torch_internals import own_modules

__all__ = [
    "check_target",
    "checked_loss",
    "edges_of",
    "layers_of",
    "noting",
    "parts_of",
    "refuse_shared",
    "register",
    "table_of",
    "trained_params",
]

# attributes that pipelines set after they register layers
OWN_NAMES = frozenset({"device", "stages", "balance", "stage", "optimizer", "most_live", "age"})


def parts_of(
    pipeline: nn.Module,
    layers: Any,
    num_stages: int,
    balance: Sequence[int] | None,
    *,
    deferred: bool = False,
) -> list[list[Layer]]:
    """Return the layers of each stage of the whole model.

    Args:
        pipeline: Module that will have the layers under their names.
        layers: The model; see `Pipeline`.
        num_stages: Number of stages.
        balance: Number of layers of each stage; None for a partition of equal sizes.
        deferred: Whether running statistics of BatchNorms are updated once per batch, not per
            micro-batch.

    Raises:
        ConfigError: There are fewer layers than stages, `balance` does not match, or a layer has a
            name that the pipeline uses.
    """
    if isinstance(layers, CapturedGraph):
        if deferred:
            msg = (
                "deferred_batch_norm cannot replace modules of a captured model: call "
                "DeferredBatchNorm.convert_deferred_batch_norm(model, None) before capture"
            )
            raise ConfigError(msg)
        layers = list(segments(layers, num_stages))
    named = [Layer(*pair) for pair in _named(layers)]
    if deferred:
        convert = DeferredBatchNorm.convert_deferred_batch_norm
        named = [Layer(name, convert(layer, None)) for name, layer in named]
    taken = [name for name, _ in named if name in OWN_NAMES or hasattr(pipeline, name)]
    if taken:
        msg = (
            f"layers cannot have the names {', '.join(taken)}, which are attributes of pipelines: "
            "rename them, or pass the layers as a list"
        )
        raise ConfigError(msg)
    sizes = _balance(balance, len(named), num_stages)
    ends = accumulate(sizes)
    return [named[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def edges_of(parts: Sequence[Sequence[Layer]]) -> list[Edge]:
    """Return the skip connections between stages, with the same numbers on all ranks.

    Args:
        parts: Layers of each stage of the whole model.

    Raises:
        TypeError: Pairs of stash and pop do not match.
    """
    verify_skippables([layer.module for part in parts for layer in part])
    sources: dict[SkipKey, int] = {}
    edges: list[Edge] = []
    for stage, part in enumerate(parts):
        for layer in part:
            stashes, pops = skips_of(layer.module)
            sources.update(dict.fromkeys(stashes, stage))
            edges += [
                Edge(key, len(edges) + 1 + i, sources[key], stage)
                for i, key in enumerate(key for key in pops if sources[key] != stage)
            ]
    return edges


def trained_params(part: Iterable[Layer]) -> list[nn.Parameter]:
    """Return the trained parameters of layers, without duplicates."""
    params = (p for layer in part for p in layer.module.parameters())
    return list(dict.fromkeys(p for p in params if p.requires_grad))


def refuse_shared(parts: Sequence[Sequence[Layer]]) -> None:
    """Raise ConfigError if stages share parameters, because they step at different times."""
    holder: dict[nn.Parameter, tuple[int, str]] = {}
    for stage, part in enumerate(parts):
        for layer in part:
            for name, param in layer.module.named_parameters(layer.name):
                other, known = holder.setdefault(param, (stage, name))
                if other != stage:
                    msg = (
                        f"stages {other} and {stage} share a parameter, {known} and {name}, but "
                        "step at different times: use separate parameters, or put their layers "
                        "into one stage by balance"
                    )
                    raise ConfigError(msg)


def register(pipeline: nn.Module, layer: Layer) -> None:
    """Register a layer in `pipeline`; modules of a captured model keep their names in the model."""
    if isinstance(layer.module, GraphSegment):
        share_modules(pipeline, layer.module)
    else:
        module = layer.module
        pipeline.add_module(layer.name, module.module if isinstance(module, Wired) else module)


@contextmanager
def noting(problems: list[str]) -> Iterator[None]:
    """Return a context that appends errors to `problems`, so that all can be raised together."""
    try:
        yield
    except ConfigError as exc:
        problems.append(str(exc))


def table_of(layers: Iterable[Layer]) -> ParamTable:
    """Return the parameters of layers, under the layers' names."""
    return ParamTable.named(
        pair
        for name, module in layers
        for pair in module.named_parameters(name, remove_duplicate=False)
    )


def checked_loss(loss: Any) -> torch.Tensor:
    """Return a loss after checking that it is a single number.

    Raises:
        ConfigError: The loss is anything else.
    """
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss.reshape(())
    shown = (
        f"a tensor of shape {list(loss.shape)} and {loss.dtype}"
        if isinstance(loss, torch.Tensor)
        else f"{type(loss).__name__}"
    )
    msg = f"loss must return one floating point number, the mean over the micro-batch, got {shown}"
    raise ConfigError(msg)


def check_target(target: Any, rows: int) -> None:
    """Raise ConfigError unless a target has the same number of rows as the batch."""
    count = num_rows(target) if list(tensors_in(target)) else rows
    if count != rows:
        msg = (
            f"the target has {count} rows, but the batch has {rows}: pass a target with one row "
            "per sample"
        )
        raise ConfigError(msg)


def layers_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return layers with their names, in order; a layer that is used twice occurs twice.

    Raises:
        ConfigError: The module is not a list of layers, because it defines a forward.
    """
    is_row = isinstance(module, nn.ModuleList) or (
        isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    )
    if not is_row:
        msg = (
            f"{type(module).__name__} is not an nn.Sequential or a list of modules: "
            "pass an nn.Sequential or a list of modules, or braid.capture(model, example)"
        )
        raise ConfigError(msg)
    # not named_children, which omits duplicates
    return [(name, layer) for name, layer in own_modules(module).items() if layer is not None]


def _named(layers: Any) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(layers, nn.Module):
        yield from layers_of(layers)
        return
    layers = list(layers)
    if all(isinstance(layer, tuple) for layer in layers):
        layers = wired(layers)
    yield from ((str(i), layer) for i, layer in enumerate(layers))


def _balance(balance: Sequence[int] | None, num_layers: int, num_stages: int) -> list[int]:
    if num_layers < num_stages:
        msg = f"{num_layers} layers cannot be divided into {num_stages} stages: use fewer ranks"
        raise ConfigError(msg)
    if balance is None:
        return [num_layers // num_stages + (i < num_layers % num_stages) for i in range(num_stages)]
    if len(balance) != num_stages or sum(balance) != num_layers or min(balance) < 1:
        msg = (
            f"balance must be {num_stages} numbers of at least 1 that add up to the number of "
            f"layers, {num_layers}, got {list(balance)}, which add up to {sum(balance)}"
        )
        raise ConfigError(msg)
    return list(balance)
