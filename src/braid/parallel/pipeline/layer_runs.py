"""Runs of layers for measurements, with the layers restored afterwards.

The layers run in sequence on a sample, each with a separate graph, so shapes, containers, dtypes
and skip connections are the same as in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from braid.comm.autograd.layer_costs import bytes_of
from braid.comm.autograd.nested import map_tensors, tensors_in
from braid.comm.autograd.rng_and_autocast import RngAndAutocast, generators_of
from braid.errors import ConfigError
from braid.parallel.pipeline.skip import SkipKey, use_skips
from braid.runtime.torch_internals import own_buffers

__all__ = ["Run", "Skips", "as_input", "as_they_were", "bytes_of_layer", "run_all"]

Skips = dict[SkipKey, "torch.Tensor | None"]
Run = Callable[[nn.Module, Any, Skips], Any]


def run_all(
    named: Sequence[tuple[str, nn.Module]], x: Any, device: torch.device | str | None, run: Run
) -> None:
    """Run layers in sequence on a sample, each with a separate graph.

    Args:
        named: Layers with their names.
        x: Input of the first layer; it is not changed.
        device: Device for a layer while it runs; None for the layers' device.
        run: Function that runs a layer on its input and the stashed tensors; returns its output.

    Raises:
        ConfigError: A layer fails.
    """
    skips: Skips = {}
    with torch.enable_grad():
        x = map_tensors(x, lambda t: as_input(t, device))
        for name, layer in named:
            before = set(skips)
            try:
                with _on(device, layer), use_skips(skips):
                    x = run(layer, x, skips)
            except Exception as exc:
                msg = (
                    f"layer {name} ({type(layer).__name__}) could not be measured on the output of "
                    f"the layers before it: {type(exc).__name__}: {exc}. Pass a "
                    "sample with which the model trains"
                )
                raise ConfigError(msg) from exc
            x = map_tensors(x, as_input)
            for key in set(skips) - before:
                stashed = skips[key]
                skips[key] = None if stashed is None else as_input(stashed)


def bytes_of_layer(layer: nn.Module, x: Any, skips: Skips) -> tuple[Any, int, int]:
    """Run a layer; return its output, the bytes kept for backward, and the bytes of its results.

    Results are the output and the tensors that the layer stashes.
    """
    before = dict(skips)

    def call() -> tuple[Any, list[torch.Tensor | None]]:
        return layer(x), [skips[key] for key in skips if key not in before]

    outside = [*tensors_in([x, *before.values()]), *layer.parameters(), *layer.buffers()]
    (output, _), saved_bytes, output_bytes = bytes_of(call, outside)
    return output, saved_bytes, output_bytes


def as_input(x: torch.Tensor, device: torch.device | str | None = None) -> torch.Tensor:
    """Return a copy with a separate graph; not a leaf, so that a layer may change it in place."""
    leaf = x.detach().to(device or x.device).requires_grad_(x.requires_grad)
    return leaf.clone()


@contextmanager
def _on(device: torch.device | str | None, layer: nn.Module) -> Iterator[None]:
    """Return a context with a layer moved to a device; its parameters stay the same objects."""
    if device is None:
        yield
        return
    kept = [(t, t.data) for t in (*layer.parameters(), *layer.buffers())]
    layer.to(device)
    try:
        yield
    finally:
        for tensor, data in kept:
            if isinstance(tensor, nn.Parameter):
                tensor.grad = None
            tensor.data = data  # the same memory as before, because views of it may exist


@contextmanager
def as_they_were(layers: Sequence[nn.Module], sample: Any) -> Iterator[None]:
    """Return a context in which layers may be trained; its end restores their state."""
    modules = list(dict.fromkeys(m for layer in layers for m in layer.modules()))
    modes = [(module, module.training) for module in modules]
    params = list(dict.fromkeys(p for module in modules for p in module.parameters(recurse=False)))
    grads = [param.grad for param in params]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in modules
        for name, buffer in own_buffers(module).items()
    ]
    with ExitStack() as stack:
        generators = generators_of(list(tensors_in(sample)))
        stack.enter_context(RngAndAutocast(generators).again())
        try:
            for param in params:
                param.grad = None
            for layer in layers:
                layer.train()
            yield
        finally:
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            for module, mode in modes:
                module.training = mode
            for module, name, buffer, kept in buffers:
                own_buffers(module)[name] = buffer
                if buffer is not None and kept is not None:
                    buffer.data.copy_(kept)
