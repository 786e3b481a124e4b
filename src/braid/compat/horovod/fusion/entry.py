"""Entries: a submitted tensor with its request, the memory for its result and the caller's handle.

CUDA streams: a submitted tensor may still be computed on the submitter's stream, and the engine's
thread has a different stream. The engine's stream waits for an event on the submitter's stream
before it reads. The stream of a waiting thread waits for an event on the engine's stream. No thread
blocks for a device. On the CPU there are no events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from braid.compat.horovod.fusion.request import Request, Response

__all__ = [
    "FusionHandle",
    "Result",
    "TensorTableEntry",
    "Waiters",
    "mark",
    "neutral",
    "wait_for_points",
]

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | int | None


class Waiters:
    """Threads that wait for handles of one engine, with a condition that all handles share.

    Args:
        hurry: Function called before a wait that blocks, to submit collected requests.

    Attributes:
        number: Number of threads that are waiting.
    """

    def __init__(self, hurry: Callable[[], None]) -> None:
        self.hurry = hurry
        self.number = 0
        self._changed = threading.Condition()

    def wait_for(self, handle: FusionHandle) -> None:
        """Block until a handle is done."""
        with self._changed:
            self.number += 1
            try:
                self._changed.wait_for(lambda: handle._done)  # noqa: SLF001 - its other half
            finally:
                self.number -= 1

    def wake(self) -> None:
        """Wake all waiting threads after some handles are done."""
        with self._changed:
            self._changed.notify_all()


class FusionHandle:
    """Handle of an operation that `Fusion` carries out later.

    Args:
        name: Name of the operation.
        waiters: Waiters of the engine.
    """

    __slots__ = ("_done", "_error", "_point", "_result", "_waiters", "name")

    def __init__(self, name: str, waiters: Waiters) -> None:
        self.name = name
        self._waiters = waiters
        self._done = False
        self._result: Result = None
        self._error: BaseException | None = None
        self._point: torch.cuda.Event | None = None

    def done(self) -> bool:
        """Return whether the operation has finished or failed."""
        if not self._done:
            self._waiters.hurry()
        return self._done

    def wait(self) -> Result:
        """Block until the operation is done; return its result.

        Raises:
            CommError: The operation was refused on all ranks, or could not be carried out.
        """
        if not self._done:
            self._waiters.hurry()
            self._waiters.wait_for(self)
        if self._error is not None:
            raise self._error
        if self._point is not None:
            wait_for_points([self._point], [_first(self._result)])
        return self._result

    def finish(self, result: Result) -> None:
        """Set the result; the engine calls this, and wakes the waiters afterwards."""
        self._result = result
        self._point = mark(_first(result))
        self._done = True

    def fail(self, error: BaseException) -> None:
        """Set the error; the engine calls this, and wakes the waiters afterwards."""
        if not self._done:
            self._error = error
            self._done = True

    def __repr__(self) -> str:
        return f"FusionHandle({self.name!r}, {'done' if self._done else 'in flight'})"


class TensorTableEntry(NamedTuple):
    """One operation that this rank has submitted, with its tensor.

    Attributes:
        request: Request that is sent to the other ranks.
        tensor: Input; None for operations without one.
        out: Memory for the result, if its shape is known in advance; may be `tensor`.
        handle: Handle of the caller.
        submitted_ns: Time of submission; 0 for a stand-in, see `is_stand_in`.
        point: CUDA event after the work that computes `tensor`; None on the CPU.
    """

    request: Request
    tensor: torch.Tensor | None
    out: torch.Tensor | None
    handle: FusionHandle
    submitted_ns: int
    point: torch.cuda.Event | None = None

    @property
    def is_stand_in(self) -> bool:
        """Whether the entry has a neutral tensor, because this rank has called `join`."""
        return not self.submitted_ns

    @classmethod
    def of(
        cls,
        request: Request,
        tensor: torch.Tensor | None,
        out: torch.Tensor | None,
        waiters: Waiters,
        now_ns: int,
    ) -> TensorTableEntry:
        """Return the entry of a caller's request."""
        source = tensor if tensor is None or not tensor.is_inference() else _plain(tensor)
        if out is tensor:
            place = source
        else:
            place = out if out is None or not out.is_inference() else _plain(out)
        return cls(
            request, source, place, FusionHandle(request.name, waiters), now_ns, mark(tensor)
        )

    @classmethod
    def stand_in(cls, response: Response, waiters: Waiters, device: int = 0) -> TensorTableEntry:
        """Return an entry with neutral values, for a rank that has called `join`.

        Args:
            response: Response to carry out; if it is a refusal, the entry has no tensor.
            waiters: Waiters of the engine.
            device: Number of this rank's device, since the request has another rank's device.
        """
        request = response.request
        handle = FusionHandle(request.name, waiters)
        if response.error or not request.dtype:
            return cls(request, None, None, handle, 0)
        kind = request.device.partition(":")[0]
        where = torch.device(kind) if kind == "cpu" else torch.device(kind, device)
        dtype = getattr(torch, request.dtype)
        neutral_tensor = torch.full(
            request.shape, neutral(request.op, dtype), dtype=dtype, device=where
        )
        return cls(request, neutral_tensor, neutral_tensor, handle, 0)


def _first(result: Result) -> torch.Tensor | None:
    first = result[0] if isinstance(result, tuple) else result
    return first if isinstance(first, torch.Tensor) else None


def neutral(op: str, dtype: torch.dtype) -> float:
    """Return the neutral element of a reduction; zero for Adasum."""
    if op == "product":
        return 1
    if op not in {"min", "max"}:
        return 0
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return float("inf") if op == "min" else float("-inf")
    bounds = torch.iinfo(dtype)
    return bounds.max if op == "min" else bounds.min


def mark(tensor: torch.Tensor | None) -> torch.cuda.Event | None:
    """Record a CUDA event after the queued work of this thread's stream; None on the CPU."""
    if tensor is None or tensor.device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))
    return event


def wait_for_points(
    events: Iterable[torch.cuda.Event | None], tensors: Iterable[torch.Tensor | None]
) -> None:
    """Make this thread's stream wait for events on other streams.

    Args:
        events: Events on other streams.
        tensors: Tensors that this stream uses afterwards; the allocator does not reuse their memory
            before this stream has finished with it.
    """
    for event, tensor in zip(events, tensors, strict=True):
        if event is not None and tensor is not None:
            stream = torch.cuda.current_stream(tensor.device)
            stream.wait_event(event)
            tensor.record_stream(stream)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same memory that the engine's thread may write to.

    Tensors from inference mode cannot be written to outside of it.
    """
    with torch.inference_mode(mode=False):
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        return empty.set_(tensor.untyped_storage(), *place)
