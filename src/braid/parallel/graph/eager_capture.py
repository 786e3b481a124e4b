"""Capture of a model by running it, at the boundaries of its modules.

Problem: symbolic tracing fails on models that read their inputs' shapes; exporting freezes behavior
in training and drops checkpointing. But cuts are needed between layers only.

Idea: run the model once. A call of an *atom* (a repeated layer, or a module without children) is
recorded as one call, and the module itself runs in the replay: dropout, hooks and checkpointing
work as before. The few operations between atoms are recorded as functions. Runs with other numbers
of rows show which numbers depend on the rows, and how; a run in the other mode shows which
arguments depend on training and evaluation.

Python values that depend on data (`.item()`, `if x.any():`) would be frozen, so between atoms they
raise an error with the line of the model. Values that depend on shapes only, such as a condition on
positions, are the same for every batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from braid.comm.autograd.nested import flatten, map_tensors
from braid.comm.autograd.rng_and_autocast import generators_of
from braid.errors import ConfigError
from braid.parallel.graph.autograd_functions import functions_seen
from braid.parallel.graph.captured import CapturedGraph
from braid.parallel.graph.recorder import CallRecorder
from braid.parallel.graph.variables import check_rows, with_devices, with_modes, with_rows
from braid.runtime.torch_internals import (
    backward_hooks,
    call_replaced,
    call_with_hooks,
    own_buffers,
    transient_buffers,
)

__all__ = ["capture", "kept_as_it_was"]

# modules of torch that are recorded as the calls of their children
CONTAINERS = {
    *(nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict),
    *(nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder),
}


def capture(model: nn.Module, *args: Any, **kwargs: Any) -> CapturedGraph:
    """Capture a model as a graph of calls.

    Args:
        model: Model; it is run three times in its current mode and once in the other mode. Its
            buffers and torch's random generators are restored afterwards.
        args: Example arguments; tensors with at least three rows (dim 0).
        kwargs: Further example arguments.

    Returns:
        The graph, with the modules and parameters of `model`.

    Raises:
        ConfigError: The model converts data to Python values between modules, its calls depend on
            the number of rows, or its input has less than three rows.
    """
    tree, tensors = flatten((args, kwargs))
    if not tensors:
        msg = f"the example has no tensors, got {args or kwargs}: pass the model's arguments"
        raise ConfigError(msg)
    rows_of = next((i for i, x in enumerate(tensors) if x.dim()), 0)
    rows = tensors[rows_of].shape[0] if tensors[rows_of].dim() else 0
    if rows < 3:
        msg = (
            f"pass an example with at least 3 rows (dim 0), got {rows}: capture varies the "
            "number of rows"
        )
        raise ConfigError(msg)
    with kept_as_it_was(model, tensors):
        runs = []
        for count in (rows, rows - 1, rows - 2):
            cut = partial(map_tensors, change=partial(_first_rows, rows=rows, count=count))
            runs.append(_run_recorded(model, cut(args), cut(kwargs)))
        _check_tensors(*runs[:2])
        graph = with_rows(runs[0].graph, runs[1].graph, rows)
        check_rows(graph, with_rows(runs[1].graph, runs[2].graph, rows - 1))
        model.train(not graph.is_training)
        try:
            other_mode = _run_recorded(model, args, kwargs).graph
        except Exception as exc:  # noqa: BLE001 - the user's model, which raises anything
            why = f"the model raises {type(exc).__name__}: {exc}"
            graph = dataclasses.replace(graph, other_mode=why)
        else:
            graph = with_modes(graph, other_mode, rows)
    graph = with_devices(graph, tensors[rows_of].device)
    return dataclasses.replace(graph, batch_tree=tree, rows_of=rows_of)


def _first_rows(x: torch.Tensor, rows: int, count: int) -> torch.Tensor:
    return x[:count] if x.dim() and x.shape[0] == rows else x


@dataclasses.dataclass(frozen=True)
class _CapturedRun:
    graph: CapturedGraph
    lines: dict[int, str]


def _run_recorded(model: nn.Module, args: Any, kwargs: Any) -> _CapturedRun:
    _, inputs = flatten((args, kwargs))
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())  # so that a model's no_grad is detected
        recorder = CallRecorder(model, inputs)
        atoms = list(_atoms(model))
        for name, module in atoms:
            stack.enter_context(_recorded(recorder, name, module))
        inside = {module for _, atom in atoms for module in atom.modules()}
        _check_hooks(model, inside)
        stack.enter_context(_buffers_kept(model, inside))
        with recorder, functions_seen:
            result = model(*args, **kwargs)
        tree, results = recorder.end(result)
    graph = CapturedGraph(
        nodes=tuple(recorder.nodes),
        modules=recorder.modules,
        tensors=recorder.tensors,
        names=recorder.names,
        transient=frozenset(
            f"{prefix}.{name}" if prefix else name
            for prefix, module in model.named_modules()
            for name in transient_buffers(module)
        ),
        num_inputs=len(inputs),
        result_tree=tree,
        results=results,
        is_training=model.training,
    )
    return _CapturedRun(graph, recorder.lines)


@contextmanager
def _buffers_kept(model: nn.Module, inside: set[nn.Module]) -> Iterator[None]:
    """Raise if a model replaces its buffers outside of its atoms."""
    tracked = [
        (f"{path}.{name}" if path else name, module, name, buffer)
        for path, module in model.named_modules()
        if module not in inside
        for name, buffer in own_buffers(module).items()
    ]
    yield
    replaced = [path for path, module, name, x in tracked if own_buffers(module).get(name) is not x]
    if replaced:
        msg = (
            f"the model replaces its buffer {', '.join(replaced)} between its modules, which "
            "capture does not support: write to the buffer in place, or replace it inside a "
            "submodule"
        )
        raise ConfigError(msg)


def _check_tensors(one: _CapturedRun, other: _CapturedRun) -> None:
    """Raise if a tensor differs between runs but its creation was not recorded."""
    tensors, others = one.graph.tensors, other.graph.tensors
    for value in tensors.keys() - one.graph.names.keys():
        if value in others and tensors[value] is not others[value]:
            msg = (
                f"capture cannot see where the tensor used at {one.lines[value]} is made: "
                "perhaps in an object that a module returns, under torch.func or from numpy. "
                "Create it in a submodule that returns it"
            )
            raise ConfigError(msg)


@contextmanager
def kept_as_it_was(model: nn.Module, tensors: list[torch.Tensor]) -> Iterator[None]:
    """Return a context that finally restores the model's modes and buffers, and random generators.

    The generators are those of the CPU and of the devices of `tensors`.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in own_buffers(module).items()
    ]
    states = [(generator, generator.get_state()) for generator in generators_of(tensors)]
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training
        for module, name, buffer, content in buffers:
            own_buffers(module)[name] = buffer
            if buffer is not None and content is not None:
                with torch.no_grad():
                    buffer.copy_(content)
        for generator, state in states:
            generator.set_state(state)


@contextmanager
def _recorded(recorder: CallRecorder, name: str, module: nn.Module) -> Iterator[None]:
    """Return a context in which calls of a module are recorded, including its hooks."""
    call = partial(recorder.call_module, name, module, call_with_hooks(module))
    with call_replaced(module, call):
        yield


def _check_hooks(model: nn.Module, inside: set[nn.Module]) -> None:
    """Raise if modules that are not called as a whole have hooks that a replay would lose."""
    names = [
        name or "the model"
        for name, module in model.named_modules()
        if module not in inside and (backward_hooks(module))
    ]
    if names:
        msg = (
            f"backward hooks of {', '.join(names)} would be lost, because a captured model calls "
            "only the layers inside: register them on layers"
        )
        raise ConfigError(msg)


def _is_layer_of_torch(module: nn.Module) -> bool:
    """Return whether a module is a layer of torch, or of a subclass; it may have children."""
    kinds = [kind for kind in type(module).__mro__ if kind not in CONTAINERS]
    return any(kind.__module__.startswith("torch.nn.modules.") for kind in kinds)


def _atoms(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield repeated layers, layers of torch and modules without children, each once."""
    children = list(model.named_children())
    kinds = {type(child) for _, child in children}
    is_stack = isinstance(model, nn.ModuleList | nn.Sequential) and len(children) > 1
    for name, child in children:
        path = f"{prefix}{name}"
        if (
            (is_stack and len(kinds) == 1)
            or _is_layer_of_torch(child)
            or not list(child.children())
        ):
            if not isinstance(child, nn.ModuleList | nn.ModuleDict):
                yield path, child
        else:
            yield from _atoms(child, f"{path}.")
    if not children and not prefix:
        yield "", model
