"""Copies between the user's tensors and the flat memory that an operation works on.

Algorithms need flat, contiguous memory on the engine's device. No result may be written over an
input that peers still read. Most tensors meet these conditions. For the others, an operation works
on separate memory:

    read       load before the first step
    written    store after the last step
    changed    both

A queued collective must see the results of the collective before it. So a load happens at the
operation's first step, not at the call.

CUDA tensors are copied to page-locked memory and back, for engines that work on the CPU. These
copies run on a separate stream, after the kernels that were queued before the call. No thread
blocks for them: the steps yield a `DeviceWait`.

    compute stream   backward of layer 2 │ backward of layer 1 │ ...
                                         └ event
    copy stream                            │ load │            │ store │
    steps                                   DeviceWait, sum ...         DeviceWait
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TypeVar

import torch

from braid.comm.tensors.arguments import dense, ordinary, overlap
from braid.errors import ConfigError
from braid.runtime.transport import DeviceWait

__all__ = ["Copies"]

Y = TypeVar("Y")
Copy = Callable[[], object]

_FIRST_USE = threading.Lock()  # else two threads might each make a stream, and wait on only one


class Copies:
    """Temporary copies of a collective's tensors; empty if it uses the user's memory directly.

    Args:
        device_types: Device types that the group's engine works on. CUDA tensors are copied to the
            CPU for engines that do not work on CUDA devices.
    """

    __slots__ = ("_after", "_before", "_device_types", "_devices")

    def __init__(self, device_types: frozenset[str]) -> None:
        self._device_types = device_types
        self._before: list[Copy] = []
        self._after: list[Copy] = []
        self._devices: set[torch.device] = set()  # GPUs that tensors are copied from or to

    @property
    def needed(self) -> bool:
        """Whether there are any copies."""
        return bool(self._before or self._after)

    @property
    def crosses(self) -> bool:
        """Whether tensors are copied between a GPU and the CPU."""
        return bool(self._devices)

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
            self._before.append(self._copy(view, source))
        return flat

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return one flat tensor with the elements of `parts`, for an operation that only reads.

        No copy is made on the engine's device if the parts are adjacent in memory.

        Raises:
            ConfigError: A part cannot be communicated.
        """
        for part in parts:
            _check(part, self._device_types)
        parts = [part.detach() for part in parts if part.numel()] or [parts[0].detach()]
        numel = sum(part.numel() for part in parts)
        if all(map(_is_plain, parts)) and _are_neighbours(parts, numel):
            return self.read(parts[0].as_strided((numel,), (1,)))
        return self.packed([self.read(part) for part in parts])

    def packed(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return one flat tensor with the elements of the flat `parts`, always in new memory."""
        numel = sum(part.numel() for part in parts)
        flat = ordinary(torch.empty(numel, dtype=parts[0].dtype, device=parts[0].device))
        parts = list(parts)
        self._before.append(lambda: torch.cat(parts, out=flat))
        return flat

    def unpacked(self, flat: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Store the elements of `flat` into `parts`, in order, after the last step."""
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
            other: Copies to add. Its stores (copies after the last step) are appended.
            position: Number of the load (copy before the first step) before which the loads of
                `other` are inserted.

        Returns:
            Position after the inserted loads.
        """
        self._before[position:position] = other._before
        self._after += other._after
        self._devices |= other._devices
        return position + len(other._before)

    def then(self, act: Callable[[], object]) -> None:
        """Call `act` after the last step and after all stores that were added before it."""
        self._after.append(act)

    def around(self, steps: Generator[Y, None, None]) -> Generator[Y | DeviceWait, None, None]:
        """Return the steps of an operation, preceded by the loads and followed by the stores.

        The copies run after all work that was queued on the current streams before this call.
        """
        for device in self._devices:
            _follow_current_stream(device)
        return self._around(steps)

    def _around(self, steps: Generator[Y, None, None]) -> Generator[Y | DeviceWait, None, None]:
        yield from _in_turn(self._before)
        yield from steps
        yield from _in_turn(self._after)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """Return a function that copies `source` to `target`."""
        if target.is_cuda == source.is_cuda:
            return partial(target.copy_, source)
        device = source.device if source.is_cuda else target.device
        self._devices.add(device)
        return partial(_start_copy, target, source, device)

    def _flat(self, x: torch.Tensor, *, load: bool, store: bool) -> torch.Tensor:
        flat = dense(x, self._device_types)
        if flat is not None:
            return flat
        _check(x, self._device_types)
        if x.requires_grad:
            x = x.detach()
        here = x.device.type in self._device_types
        if store:
            _check_own_memory(x)
        flat = ordinary(
            torch.empty(x.numel(), dtype=x.dtype, device=x.device)
            if here
            else torch.empty(x.numel(), dtype=x.dtype, device="cpu", pin_memory=True)
        )
        if load:
            self._before.append(self._copy(flat.view(x.shape), x))
        if store:
            self._after.append(self._copy(x, flat.view(x.shape)))
        return flat


def _check(x: torch.Tensor, device_types: frozenset[str]) -> None:
    if x.device.type not in device_types and x.device.type != "cuda":
        msg = (
            f"this group cannot communicate a tensor on {x.device}, only on "
            f"{' or '.join(sorted(device_types))}: move the tensor, or make a group with a "
            "backend for it"
        )
        raise ConfigError(msg)
    if x.layout != torch.strided or x.is_quantized:
        kind = "quantized" if x.is_quantized else str(x.layout)
        msg = (
            f"a {kind} tensor cannot be communicated: convert it to an ordinary strided tensor "
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


def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of copies between a GPU and the CPU, shared by all threads."""
    with _FIRST_USE:
        return _new_copy_stream(device)


@cache
def _new_copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _follow_current_stream(device: torch.device) -> None:
    """Make later copies wait for all work queued on this thread's current stream."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    _copy_stream(device).wait_event(event)


def _start_copy(target: torch.Tensor, source: torch.Tensor, device: torch.device) -> DeviceWait:
    """Queue a copy between a GPU and page-locked memory, and return the wait for its end."""
    stream = _copy_stream(device)
    with torch.cuda.stream(stream):
        # torch would conjugate or negate the target on the CPU before the copy has ended
        target.copy_(source.resolve_conj().resolve_neg(), non_blocking=True)
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return DeviceWait(event, device)


def _in_turn(copies: Sequence[Copy]) -> Iterator[DeviceWait]:
    """Make the copies in order, and yield the waits for GPUs."""
    pending: dict[torch.device, DeviceWait] = {}
    for copy in copies:
        if not (isinstance(copy, partial) and copy.func is _start_copy):
            yield from _ends_of(pending)
            pending.clear()
            copy()
            continue
        wait = copy()
        assert isinstance(wait, DeviceWait)
        pending[wait.device] = wait  # the copies of one device end in order
    yield from _ends_of(pending)


def _ends_of(pending: Mapping[torch.device, DeviceWait]) -> Iterator[DeviceWait]:
    """Yield the waits; after each wait, raise the GPU's error if there is one."""
    for wait in pending.values():
        yield wait
        wait.check()


def _is_plain(x: torch.Tensor) -> bool:
    """Return whether the elements are contiguous in memory, without lazy conjugation or sign."""
    return x.is_contiguous() and not x.is_conj() and not x.is_neg()


def _are_neighbours(parts: Sequence[torch.Tensor], numel: int) -> bool:
    """Return whether flat tensors are consecutive parts of one storage."""
    first = parts[0]
    end = first.data_ptr()
    for part in parts:
        if part.data_ptr() != end and part.numel():
            return False
        end += part.numel() * part.element_size()
    itemsize = first.element_size()
    # else they may be adjacent allocations
    return (first.storage_offset() + numel) * itemsize <= len(first.untyped_storage())
