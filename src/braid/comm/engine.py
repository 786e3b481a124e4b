"""How a group carries out what it is asked for: the seam between the user's face and the ways of moving data.

A `Call` says what is wanted, in plain words and flat tensors; an `Engine` does it. `MemoryEngine` does it in shared
memory; message transports, hierarchies and foreign backends are further engines behind the same six methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch

from braid.comm import move
from braid.comm.all_reduce import all_reduce
from braid.comm.channel import ABANDONED, Channel, Port
from braid.comm.progress import Progress
from braid.comm.work import Operation, Work
from braid.events import Recorder
from braid.transport import MemoryTransport, Steps
from braid.types import text_digest

__all__ = ["Call", "Engine", "MemoryEngine", "Statistics"]


class Call(NamedTuple):
    """One collective as a rank asks for it.

    Attributes:
        kind: Name of the operation.
        text: The whole description, equal on all ranks.
        digest: Its digest.
        tensors: What it works on, flat or with one row per rank as the algorithm wants it.
        op: Reduction.
        peer: Root of a broadcast, partner of a send or receive, else -1.
        algorithm: By name, None for the engine's choice.
        nbytes: Size of the largest full buffer.
        site: Digest of the call site.
        timeout_s: Deadline.
        after: Called when the steps are done, to copy a result to where the user wants it.
    """

    kind: str
    text: str
    digest: int
    tensors: tuple[torch.Tensor, ...]
    op: str = "sum"
    peer: int = -1
    algorithm: str | None = None
    nbytes: int = 0
    site: int = 0
    timeout_s: float = 300.0
    after: Callable[[], object] | None = None


@dataclass(slots=True)
class Statistics:
    """What a group has done so far on this rank, in the threads that called it.

    Attributes:
        num_operations: Operations carried out or handed to the progress thread.
        nbytes: Bytes of their largest full buffers.
        spent_ns: Time in operations, waits included.
        waited_ns: Time of it in which nothing could be done but wait for others.
    """

    num_operations: int = 0
    nbytes: int = 0
    spent_ns: int = 0
    waited_ns: int = 0


class Engine(Protocol):
    """A way of carrying out calls for one group."""

    device_types: frozenset[str]
    statistics: Statistics

    def run(self, call: Call) -> None:
        """Carry it out in this thread."""
        ...

    def start(self, call: Call) -> Work:
        """Carry it out in the background."""
        ...

    def begin(self, call: Call, number: int, scale: float | None) -> Work:
        """Start persistent request `number`; the caller's thread takes the steps."""
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Tensor where this engine moves it fastest."""
        ...

    def stop(self, reason: str) -> None:
        """Tell the members that this rank takes no further part."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class MemoryEngine:
    """Collectives in shared memory.

    Args:
        transport: This rank's end of it.
        port: The group's control lines.
        progress: The rank's progress thread.
        events: Recorder of the rank.
        owns_progress: Whether closing this engine ends the progress thread.
    """

    device_types = frozenset({"cpu"})

    def __init__(
        self,
        transport: MemoryTransport,
        port: Port,
        progress: Progress,
        events: Recorder,
        *,
        owns_progress: bool = False,
    ) -> None:
        self.transport = transport
        self.port = port
        self.progress = progress
        self.statistics = Statistics()
        self._events = events
        self._owns_progress = owns_progress
        self._collectives = port.channel(0)

    def run(self, call: Call) -> None:
        """Carry `call` out in this thread, behind what is queued on the same channel."""
        operation = self._operation(call, None)
        if self.progress.busy(operation.channel):
            self.progress.join(self.progress.submit(operation), operation)
        else:
            self._timed(self.progress.run, operation)
        self._count(call, operation)

    def start(self, call: Call) -> Work:
        """Hand `call` to the progress thread."""
        operation = self._operation(call, None)
        ended = self.progress.submit(operation)
        self._count(call, operation)
        return Work(operation, partial(self.progress.join, ended), background=True)

    def begin(self, call: Call, number: int, scale: float | None) -> Work:
        """Publish this rank's part of a persistent request and take the steps that are possible now."""
        channel = self.port.channel(self.port.request_index(number))
        if scale is not None:  # ranks must agree on it, too
            text = f"{call.text} scaled by {scale!r}"
            self.transport.names.add(text)
            call = call._replace(text=text, digest=text_digest(text))
        operation = self._operation(call, channel, scale)
        operation.on_done = lambda: self._count(call, operation)
        self._timed(self.progress.start, operation)
        return Work(operation, partial(self._timed, self.progress.run), background=False)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Tensor in the arena: collectives on it need no copies."""
        return self.transport.arena.empty(shape, dtype)

    def stop(self, reason: str) -> None:
        """Tell the members that this rank takes no further part."""
        self.port.stop(ABANDONED, reason=reason)

    def close(self) -> None:
        """Free the group's lines and slots."""
        if self._owns_progress:
            self.progress.close()
        self.progress.abandon(self.port)
        if not self._owns_progress:  # the group of all ranks ends with the transport
            self.port.close()

    def _operation(
        self, call: Call, channel: Channel | None, scale: float | None = None
    ) -> Operation:
        channel = channel or self._channel(call)
        steps = self._steps(call, channel, scale)
        if call.after is not None:
            steps = _then(steps, call.after)
        return Operation(
            self.port,
            channel,
            call.text,
            call.digest,
            steps,
            events=self._events,
            nbytes=call.nbytes,
            site=call.site,
            timeout_s=call.timeout_s,
            epoch=0,  # a member may have been lost while the group was made: that is news, too
        )

    def _channel(self, call: Call) -> Channel:
        if call.kind == "send":
            return self.port.channel(self.port.sending_index(call.peer))
        if call.kind == "recv":
            return self.port.incoming(call.peer)
        return self._collectives

    def _steps(self, call: Call, channel: Channel, scale: float | None) -> Steps:
        tensors = call.tensors
        if call.kind == "all_reduce":
            return all_reduce(channel, tensors[0], call.op, scale, call.algorithm)
        if call.kind == "reduce_scatter":
            return move.reduce_scatter(channel, tensors[0], tensors[1], call.op, scale)
        if call.kind == "all_gather":
            return move.all_gather(channel, tensors[0], tensors[1])
        if call.kind == "all_to_all":
            return move.all_to_all(channel, tensors[0], tensors[1])
        if call.kind == "broadcast":
            return move.broadcast(channel, tensors[0], call.peer)
        if call.kind == "barrier":
            return move.barrier(channel)
        port = self.port
        if call.kind == "send":
            acks = port.channel(port.acknowledging_index(port.rank))
            return move.send(channel, acks, tensors[0], call.peer)
        acks = port.channel(port.acknowledging_index(call.peer))
        return move.recv(channel, acks, tensors[0], call.peer)

    def _timed(
        self, act: Callable[..., None], operation: Operation, *timeout_s: float | None
    ) -> None:
        now_ns = self.transport.clock.now_ns
        start_ns = now_ns()
        try:
            act(operation, *timeout_s)
        finally:
            self.statistics.spent_ns += now_ns() - start_ns

    def _count(self, call: Call, operation: Operation) -> None:
        statistics = self.statistics
        statistics.num_operations += 1
        statistics.nbytes += call.nbytes
        statistics.waited_ns += operation.waited_ns


def _then(steps: Steps, after: Callable[[], object]) -> Steps:
    yield from steps
    after()
