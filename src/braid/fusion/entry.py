"""A tensor on its way: what was asked, where the result goes, and who waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from braid.fusion.request import Request, Response
from braid.fusion.streams import follow, mark

__all__ = ["Entry", "Handle", "Result", "Waiters", "neutral"]

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | int | None


class Waiters:
    """Those of one engine: they share one condition, so that a handle costs next to nothing.

    Args:
        hurry: Called before a wait that is not over at once.

    Attributes:
        number: Of those that wait now.
    """

    def __init__(self, hurry: Callable[[], None]) -> None:
        self.hurry = hurry
        self.number = 0
        self._changed = threading.Condition()

    def wait_for(self, handle: Handle) -> None:
        """Until it is done."""
        with self._changed:
            self.number += 1
            try:
                self._changed.wait_for(lambda: handle._done)  # noqa: SLF001 - its other half
            finally:
                self.number -= 1

    def wake(self) -> None:
        """Some are done."""
        with self._changed:
            self._changed.notify_all()


class Handle:
    """What `Fusion` gives for an operation that it carries out later.

    Args:
        name: Of the operation.
        waiters: Those of the engine.
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
        """Whether it has been carried out, or has failed."""
        if not self._done:
            self._waiters.hurry()
        return self._done

    def wait(self) -> Result:
        """The result, once it is there.

        Raises:
            CommError: It was refused on all ranks, or could not be carried out.
        """
        if not self._done:
            self._waiters.hurry()
            self._waiters.wait_for(self)
        if self._error is not None:
            raise self._error
        if self._point is not None:
            follow([self._point], [_first(self._result)])
        return self._result

    def finish(self, result: Result) -> None:
        """By the engine, which wakes the waiters afterwards: it has been carried out."""
        self._result = result
        self._point = mark(_first(result))
        self._done = True

    def fail(self, error: BaseException) -> None:
        """By the engine, likewise: it cannot be carried out."""
        if not self._done:
            self._error = error
            self._done = True

    def __repr__(self) -> str:
        return f"Handle({self.name!r}, {'done' if self._done else 'under way'})"


class Entry(NamedTuple):
    """One operation of this rank.

    Attributes:
        request: What the ranks hear of it.
        tensor: What goes in; None where nothing does.
        out: Where the result goes if its shape is known before; may be `tensor`.
        handle: Who waits.
        submitted_ns: When.
        point: Behind what computes `tensor`.
    """

    request: Request
    tensor: torch.Tensor | None
    out: torch.Tensor | None
    handle: Handle
    submitted_ns: int
    point: torch.cuda.Event | None = None

    @property
    def is_stand_in(self) -> bool:
        """Whether this rank has joined, and these are zeros."""
        return not self.submitted_ns

    @classmethod
    def of(
        cls,
        request: Request,
        tensor: torch.Tensor | None,
        out: torch.Tensor | None,
        waiters: Waiters,
        now_ns: int,
    ) -> Entry:
        """What a caller wants done."""
        given = tensor if tensor is None or not tensor.is_inference() else _plain(tensor)
        if out is tensor:
            place = given
        else:
            place = out if out is None or not out.is_inference() else _plain(out)
        return cls(request, given, place, Handle(request.name, waiters), now_ns, mark(tensor))

    @classmethod
    def stand_in(cls, response: Response, waiters: Waiters, device: int = 0) -> Entry:
        """What changes nothing, of a rank that has joined.

        Args:
            response: What is carried out; nothing is needed for what is refused.
            waiters: Those of the engine.
            device: Number of this rank's device: the request's is another rank's.
        """
        request = response.request
        handle = Handle(request.name, waiters)
        if response.error or not request.dtype:
            return cls(request, None, None, handle, 0)
        kind = request.device.partition(":")[0]
        where = torch.device(kind) if kind == "cpu" else torch.device(kind, device)
        dtype = getattr(torch, request.dtype)
        same = torch.full(request.shape, neutral(request.op, dtype), dtype=dtype, device=where)
        return cls(request, same, same, handle, 0)


def _first(result: Result) -> torch.Tensor | None:
    found = result[0] if isinstance(result, tuple) else result
    return found if isinstance(found, torch.Tensor) else None


def neutral(op: str, dtype: torch.dtype) -> float:
    """What a reduction with it leaves as it is; Adasum does so with zeros."""
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


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, for the engine's thread: outside of inference mode, tensors that were made in it refuse to be written to."""
    with torch.inference_mode(mode=False):
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        return empty.set_(tensor.untyped_storage(), *place)
