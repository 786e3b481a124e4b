"""Messages between stages on the devices of one process, passed between threads.

Between devices they are copied on separate streams: a copy waits for the computation of its tensor,
the computation that uses it waits for the copy, and nothing else waits.

    device 0   compute  F0 ──┐  F1           F2
               copy          └─▶ F0 ──┐
    device 1   copy              F0 ──┤
               compute                └─▶ F0            F1

Source: C. Kim et al., torchgpipe (2020), section 3.2 (copies on non-default streams).
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from braid.comm.autograd import Stream, copy
from braid.comm.autograd.nested import map_tensors
from braid.comm.autograd.streams import current_stream, new_stream, wait_stream
from braid.errors import CommError

__all__ = ["ActionSpan", "LocalCarrier", "LocalWire"]


class ActionSpan(NamedTuple):
    """Start and end of an action's execution; GPU work of the action may end later."""

    rank: int
    name: str
    microbatch: int
    begin_ns: int
    end_ns: int


class LocalWire:
    """Queues of messages between the threads of a pipeline in one process.

    Args:
        devices: Device of each rank.
        records: Whether to record the actions of all ranks.

    Attributes:
        devices: Argument.
        spans: Actions so far, if they are recorded.
    """

    def __init__(self, devices: Sequence[torch.device], *, records: bool = False) -> None:
        self.devices = [_with_index(device) for device in devices]
        self.spans: list[ActionSpan] | None = [] if records else None
        self._lines: dict[tuple[int, int, int], deque[Any]] = defaultdict(deque)
        self._changed = threading.Condition()
        self._failure = ""
        self._streams: dict[tuple[torch.device, bool], Stream] = {}

    def put(self, source: int, target: int, edge: int, value: Any) -> None:
        """Send a value from rank `source` to rank `target` over the connection `edge`."""
        with self._changed:
            self._lines[source, target, edge].append(value)
            self._changed.notify_all()

    def get(self, source: int, target: int, edge: int) -> Any:
        """Wait for the next value from rank `source` to rank `target` over `edge`, and return it.

        Raises:
            CommError: A rank has failed.
        """
        with self._changed:
            line = self._lines[source, target, edge]  # with the lock, as only one may make it
            self._changed.wait_for(lambda: line or self._failure)
            if self._failure:
                raise CommError(self._failure)
            return line.popleft()

    def abort(self, text: str) -> None:
        """Make all current and later waits raise an error with this text."""
        with self._changed:
            self._failure = self._failure or text
            self._changed.notify_all()

    def stream(self, device: torch.device, *, sends: bool) -> Stream:
        """Return the CUDA stream for copies from a device (`sends`), or to the device."""
        with self._changed:
            key = device, sends
            if key not in self._streams:
                self._streams[key] = new_stream(device)
            return self._streams[key]


class LocalCarrier:
    """Carrier between threads; see `Carrier`.

    Args:
        wire: Queues that all threads share.
        rank: Number of this thread and its device.
    """

    def __init__(self, wire: LocalWire, rank: int) -> None:
        self.rank, self.size = rank, len(wire.devices)
        self._wire = wire
        self._device = wire.devices[rank]

    def send_value(self, value: Any, peer: int, edge: int = 0) -> None:
        """Send an output to rank `peer`; see `Carrier.send_value`."""
        self._wire.put(self.rank, peer, edge, map_tensors(value, lambda x: self._moved(x, peer)))

    def recv_value(self, peer: int, edge: int = 0) -> Any:
        """Receive the output that rank `peer` has sent; see `Carrier.recv_value`."""
        value = self._wire.get(peer, self.rank, edge)
        arriving = self._wire.stream(self._device, sends=False)
        wait_stream(current_stream(self._device), arriving)
        return value

    def send_tensors(self, tensors: Sequence[torch.Tensor], peer: int, edge: int = 0) -> None:
        """Send tensors of known shapes; see `Carrier.send_tensors`."""
        self.send_value(list(tensors), peer, edge)

    def recv_tensors(
        self, like: Sequence[torch.Tensor], peer: int, edge: int = 0
    ) -> list[torch.Tensor]:
        """Receive tensors with the shapes and dtypes of `like`; see `Carrier.recv_tensors`."""
        tensors = self.recv_value(peer, edge)
        assert len(tensors) == len(like), "gradients of other outputs than the sent ones"
        return tensors  # type: ignore[no-any-return]

    def finish(self) -> None:
        """Wait until all messages have been sent; see `Carrier.finish`."""

    @contextmanager
    def span(self, name: str, microbatch: int) -> Iterator[None]:
        """Return a context that records the duration of an action; see `Carrier.span`."""
        if self._wire.spans is None:
            yield
            return
        begin_ns = time.monotonic_ns()
        yield
        span = ActionSpan(self.rank, name, microbatch, begin_ns, time.monotonic_ns())
        self._wire.spans.append(span)

    def abort(self, text: str) -> None:
        """Make all other ranks raise an error with this text; see `Carrier.abort`."""
        self._wire.abort(f"device {self._device} of stage {self.rank} {text}")

    def pass_on(self, text: str) -> None:
        """Forward an error from another rank to this rank's other groups; see `Carrier.pass_on`."""

    def _moved(self, x: torch.Tensor, peer: int) -> torch.Tensor:
        """Return a tensor on the device of `peer`; tensors on the CPU stay there."""
        device, y = self._wire.devices[peer], x.detach()
        if x.device == self._device != device:
            source = self._wire.stream(x.device, sends=True)
            target = self._wire.stream(device, sends=False)
            wait_stream(source, current_stream(x.device))
            with torch.no_grad():
                (y,) = copy(y, source=source, destination=target)
        return y.requires_grad_(x.requires_grad)


def _with_index(device: torch.device) -> torch.device:
    """Return a device with its index, as tensors have it."""
    if str(device) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device
