"""Copies between the user's tensors and the flat memory on which an operation works.

Algorithms need flat, contiguous memory on the engine's device. No result may be written over an
input that peers still read. Most tensors meet this as they are. For the others an operation works
on memory of its own:

    read       load before the first step
    written    store after the last step
    changed    both

A collective that is queued behind another one must see the results of that one. So a load happens
at the operation's first step, not at the call.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TypeVar

import torch

from braid.comm.tensors.arguments import ordinary, overlap
from braid.errors import ConfigError

__all__ = ["Copies"]

Y = TypeVar("Y")


class Copies:
    """The copies of one operation; empty if it works on the user's memory itself.

    Args:
        device_types: Types of the devices on which the group's engine works. CUDA tensors are
            copied to the CPU for engines that do not work on CUDA devices.
    """

    __slots__ = ("_after", "_before", "_device_types")

    def __init__(self, device_types: frozenset[str]) -> None:
        self._device_types = device_types
        self._before: list[Callable[[], object]] = []
        self._after: list[Callable[[], object]] = []

    @property
    def needed(self) -> bool:
        """Whether there are any copies."""
        return bool(self._before or self._after)

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """Return a flat tensor with the elements of `x`, for an operation that only reads.

        Raises:
            ConfigError: `x` cannot be communicated.
        """
        return self._flat(x, load=True, store=False)

    def written(self, x: torch.Tensor) -> torch.Tensor:
        """Return a flat tensor for results, which are stored into `x` after the last step.

        Raises:
            ConfigError: `x` cannot be communicated, or cannot hold a result.
        """
        return self._flat(x, load=False, store=True)

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        """Return a flat tensor with the elements of `x`, which is stored into `x` at the end.

        Raises:
            ConfigError: `x` cannot be communicated, or cannot hold a result.
        """
        return self._flat(x, load=True, store=True)

    def filled(self, x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Return a flat tensor with the elements of `source`, which is stored into `x` at the end.

        Raises:
            ConfigError: A tensor cannot be communicated, or `x` cannot hold a result.
        """
        _check(source, self._device_types)
        flat = self._flat(x, load=False, store=True)
        view, source = flat.view(x.shape), source.detach()
        if overlap(source, view, exactly=False):
            self._before.append(lambda: view.copy_(source.clone()))
        else:
            self._before.append(_copy(view, source))
        return flat

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return one flat tensor with the elements of the flat `parts`, one after the other.

        No copy is made if the parts are neighbours in memory.
        """
        parts = [part for part in parts if part.numel()] or parts[:1]
        first = parts[0]
        numel = sum(part.numel() for part in parts)
        if _are_neighbours(parts, numel):
            return first.as_strided((numel,), (1,))
        return self.packed(parts)

    def packed(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return one flat tensor with the elements of the flat `parts`, always in new memory."""
        numel = sum(part.numel() for part in parts)
        flat = ordinary(torch.empty(numel, dtype=parts[0].dtype, device=parts[0].device))
        parts = list(parts)
        self._before.append(lambda: torch.cat(parts, out=flat))
        return flat

    def unpacked(self, flat: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Store the elements of `flat` into `parts`, one after the other, after the last step."""
        rows = torch.split(flat, [part.numel() for part in parts])
        self._after.append(lambda: [part.copy_(row) for part, row in zip(parts, rows, strict=True)])

    def apart(self, x: torch.Tensor, outs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the flat tensor `x`, or a copy of it if one of `outs` shares memory with it.

        The copy is needed because results are stored while peers still read `x`.
        """
        start, end = x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()
        for out in outs:
            out_start = out.data_ptr()
            if start < out_start + out.numel() * out.element_size() and out_start < end:
                copy = ordinary(torch.empty_like(x))
                self._before.append(partial(copy.copy_, x))
                return copy
        return x

    def include(self, other: Copies, *, position: int) -> int:
        """Add the copies of `other`.

        Args:
            other: Copies to add. Stores are appended.
            position: Number of the load before which the loads of `other` are inserted.

        Returns:
            Position after the inserted loads.
        """
        self._before[position:position] = other._before
        self._after += other._after
        return position + len(other._before)

    def then(self, act: Callable[[], object]) -> None:
        """Call `act` after the last step, after the stores that have been added so far."""
        self._after.append(act)

    def around(self, steps: Generator[Y, None, None]) -> Generator[Y, None, None]:
        """Yield the steps of an operation, between the loads and the stores."""
        for load in self._before:
            load()
        yield from steps
        for store in self._after:
            store()

    def _flat(self, x: torch.Tensor, *, load: bool, store: bool) -> torch.Tensor:
        _check(x, self._device_types)
        if x.requires_grad:
            x = x.detach()
        here = x.device.type in self._device_types
        if here and x.is_contiguous() and not x.is_conj() and not x.is_neg():
            flat = x.view(-1)
            # a tensor of one element counts as contiguous whatever its stride, but its bytes cannot
            # be viewed
            return flat if flat.stride(0) == 1 else x.as_strided((x.numel(),), (1,))
        if store:
            _check_own_memory(x)
        device = x.device if here else torch.device("cpu")
        flat = ordinary(torch.empty(x.numel(), dtype=x.dtype, device=device, pin_memory=not here))
        if load:
            self._before.append(_copy(flat.view(x.shape), x))
        if store:
            self._after.append(_copy(x, flat.view(x.shape)))
        return flat


def _check(x: torch.Tensor, device_types: frozenset[str]) -> None:
    if x.device.type not in device_types and x.device.type != "cuda":
        msg = (
            f"this group has no engine for a tensor on {x.device}, only on "
            f"{' or '.join(sorted(device_types))}: move the tensor, or make a group with a "
            "backend for it"
        )
        raise ConfigError(msg)
    if x.layout != torch.strided or x.is_quantized:
        kind = "quantized" if x.is_quantized else str(x.layout)
        msg = (
            f"a {kind} tensor cannot be communicated: convert it to an ordinary strided one "
            "first (to_dense, dequantize)"
        )
        raise ConfigError(msg)


def _check_own_memory(x: torch.Tensor) -> None:
    if any(stride == 0 and n > 1 for stride, n in zip(x.stride(), x.shape, strict=True)):
        msg = (
            f"elements of an expanded tensor of shape {list(x.shape)} with strides {x.stride()} "
            "share their memory, so it cannot hold a result: pass x.clone()"
        )
        raise ConfigError(msg)


def _copy(target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
    """Return a function that copies `source` to `target`.

    A copy between a GPU and page-locked memory is ordered with the stream that is current now. The
    host waits for it, since shared memory knows nothing of streams.
    """
    if target.is_cuda == source.is_cuda:
        return partial(target.copy_, source)
    stream = torch.cuda.current_stream(source.device if source.is_cuda else target.device)

    def copy() -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        stream.synchronize()

    return copy


def _are_neighbours(parts: Sequence[torch.Tensor], numel: int) -> bool:
    """Return whether flat tensors are consecutive parts of one storage."""
    first = parts[0]
    end = first.data_ptr()
    for part in parts:
        if part.data_ptr() != end and part.numel():
            return False
        end += part.numel() * part.element_size()
    itemsize = first.element_size()
    # else neighbours in memory by chance
    return (first.storage_offset() + numel) * itemsize <= len(first.untyped_storage())
