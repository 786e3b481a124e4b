"""A tensor on its way: what was asked, where the result goes, and who waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from braid.fusion.request import Request

__all__ = ["Entry", "Handle", "Result"]

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | int | None


class Handle:
    """What `Fusion` gives for an operation that it carries out later.

    Args:
        name: Of the operation.
        waited_for: Called before a wait that is not over at once.
    """

    def __init__(self, name: str, waited_for: Callable[[], None]) -> None:
        self.name = name
        self._waited_for = waited_for
        self._done = threading.Event()
        self._result: Result = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it has been carried out, or has failed."""
        return self._done.is_set()

    def wait(self) -> Result:
        """The result, once it is there.

        Raises:
            CommError: It was refused on all ranks, or could not be carried out.
        """
        if not self._done.is_set():
            self._waited_for()
            self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def finish(self, result: Result) -> None:
        """By the engine: it has been carried out."""
        self._result = result
        self._done.set()

    def fail(self, error: BaseException) -> None:
        """By the engine: it cannot be carried out."""
        if not self._done.is_set():
            self._error = error
            self._done.set()

    def __repr__(self) -> str:
        return f"Handle({self.name!r}, {'done' if self.done() else 'under way'})"


class Entry(NamedTuple):
    """One operation of this rank.

    Attributes:
        request: What the ranks hear of it.
        tensor: What goes in; None where nothing does.
        out: Where the result goes if its shape is known before; may be `tensor`.
        handle: Who waits.
        submitted_ns: When.
    """

    request: Request
    tensor: torch.Tensor | None
    out: torch.Tensor | None
    handle: Handle
    submitted_ns: int

    @classmethod
    def stand_in(cls, request: Request) -> Entry:
        """Zeros, of a rank that has joined."""
        if not request.dtype:
            return cls(request, None, None, Handle(request.name, lambda: None), 0)
        device = request.device.partition(":")[0]  # the number is another rank's
        zeros = torch.zeros(request.shape, dtype=getattr(torch, request.dtype), device=device)
        return cls(request, zeros, zeros, Handle(request.name, lambda: None), 0)
