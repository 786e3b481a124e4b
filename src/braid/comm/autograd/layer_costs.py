"""Measured costs of layers: saved bytes, forward time, and peak of live bytes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from braid.comm.autograd.nested import flatten, unflatten
from braid.comm.autograd.recompute_plan import LayerCost
from braid.comm.autograd.rng_and_autocast import RngAndAutocast, generators_of
from braid.comm.autograd.streams import current_stream, synchronize
from braid.runtime.clock import Clock, MonotonicClock
from braid.runtime.torch_internals import TorchDispatchMode, pytree, storage_id

__all__ = ["LiveTensors", "PeakBytes", "bytes_of", "measure", "seconds_of"]

Result = TypeVar("Result")


def measure(
    layers: Iterable[Callable[[Any], Any]],
    x: Any,
    *,
    repeats: int = 3,
    clock: Clock | None = None,
) -> list[LayerCost]:
    """Run each layer forward and return its costs.

    Bytes are counted per storage, each storage once, without parameters, buffers and the layer's
    input. Random generators keep their state; other state that a forward updates (the statistics
    of a BatchNorm) changes.

    Args:
        layers: Layers, each called with the result of the previous one.
        x: Input of the first layer.
        repeats: Number of timed forwards, after one that is not timed; the median time counts.
        clock: Clock for the times.

    Returns:
        One cost per layer, for `by_budget`.
    """
    clock = clock or MonotonicClock()
    costs = []
    with torch.enable_grad(), RngAndAutocast(generators_of(flatten(x)[1])).again():
        for layer in layers:
            x = _as_leaves(x)
            params = [*layer.parameters(), *layer.buffers()] if isinstance(layer, nn.Module) else ()
            call = partial(layer, x)
            output, saved_bytes, output_bytes = bytes_of(call, [*flatten(x)[1], *params])
            devices = {t.device for t in flatten(x)[1]}
            times = [seconds_of(call, devices, clock)[1] for _ in range(repeats)]
            costs.append(LayerCost(saved_bytes, output_bytes, statistics.median(times)))
            x = output
    return costs


class LiveTensors:
    """Counter of the bytes of registered tensors that are still referenced, such as by autograd.

    Attributes:
        peak_bytes: Largest number of live bytes in any call of `register` or `count`.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def register(self, x: torch.Tensor) -> torch.Tensor:
        """Count the memory of `x` from now on, once for all tensors that share it; return `x`."""
        storage = x.untyped_storage()
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._alive[reference.cdata] = (reference, storage.nbytes())
        self.count()
        return x

    def register_results(self, function: Callable[..., Result]) -> Callable[..., Result]:
        """Return `function` wrapped so that the tensors in its results are registered."""

        def call(*args: Any, **kwargs: Any) -> Result:
            result = function(*args, **kwargs)
            for x in flatten(result)[1]:
                self.register(x)
            return result

        return call

    def count(self) -> int:
        """Return the number of bytes that are alive now."""
        self._alive = {
            key: item
            for key, item in self._alive.items()
            if not item[0].expired()  # type: ignore[no-untyped-call]
        }
        total = sum(nbytes for _, nbytes in self._alive.values())
        self.peak_bytes = max(self.peak_bytes, total)
        return total


class PeakBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """Dispatch mode that measures the peak of live bytes of all tensors that operators return.

    Memory that torch did not allocate, such as shared memory, does not count.

    Attributes:
        live: Counter of live tensors.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = LiveTensors()
        for x in known:
            self.live.register(x)

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and register the tensors in its result."""
        output = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().resizable():
                self.live.register(leaf)
        return output


def bytes_of(
    call: Callable[[], Result], outside: Iterable[torch.Tensor]
) -> tuple[Result, int, int]:
    """Run a function, and count the storages that it saves and returns.

    Args:
        call: Function, such as the forward of a layer.
        outside: Tensors whose storages do not count: inputs, parameters, buffers.

    Returns:
        Result of the function, the bytes that it keeps for backward (including its result), and
        the bytes of the result.
    """
    known = _storages(list(outside))
    saved: dict[int, int] = {}

    def save(t: torch.Tensor) -> torch.Tensor:
        if not (t.is_leaf and t.requires_grad):  # parameters of a function that is not a module
            saved.update(_storages([t]))
        return t

    with saved_tensors_hooks(save, lambda t: t):
        output = call()
    returned = _storages(flatten(output)[1])
    added = {key: nbytes for key, nbytes in (saved | returned).items() if key not in known}
    return output, sum(added.values()), sum(returned.values())


def seconds_of(
    call: Callable[[], Result], devices: Iterable[torch.device], clock: Clock
) -> tuple[Result, float]:
    """Return the result of a function and its seconds, including all work on the devices."""
    streams = [current_stream(device) for device in devices]
    for stream in streams:
        synchronize(stream)
    start_ns = clock.now_ns()
    result = call()
    for stream in streams:
        synchronize(stream)
    return result, (clock.now_ns() - start_ns) / 1e9


def _as_leaves(x: Any) -> Any:
    """Return the tensors of `x` as leaves of a new graph."""
    tree, tensors = flatten(x)
    return unflatten(tree, [t.detach().requires_grad_(t.requires_grad) for t in tensors])


def _storages(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of each storage by its identity; tensors on meta have no address."""
    storages = [t.untyped_storage() for t in tensors]
    return {storage_id(s): s.nbytes() for s in storages if s.nbytes()}
