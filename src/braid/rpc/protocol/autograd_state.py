"""State machine of a distributed autograd context in one process: the order of its backwards.

Problem: a graph lies in several processes. An edge leaves one in a message (a send) and enters the
next (a receive). Backward goes the other way: a receive may ship its gradient once all functions
that depend on it have run, which one process cannot determine alone. Expecting a gradient for every
send (FAST) never ends if a result was not used.

Idea: a wave of marks (SMART). It begins at the roots, goes from each reached receive to the send at
its other end, and on to the receives which that send reaches. Each message is answered when all its
consequences are over, so the origin knows when the wave has ended: then each process knows which
sends get gradients. The backward is a second wave of the same kind, whose messages are gradients.

    recording ── begin ──> marking ── all acknowledged ──> running ── all acknowledged ──> over
                     FAST: no wave of marks ──────────────────┘             an error ──> failed

An error fails one backward, and another may follow; the loss of a process fails every backward of
its contexts. A process answers immediately, except the message that made it busy, which it answers
when it is idle again.

Sources: E. Dijkstra, C. Scholten, "Termination detection for diffusing computations", 1980; PyTorch
team, "Distributed Autograd Design", for FAST and SMART.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from braid.rpc.protocol.reference_messages import Id
from braid.rpc.protocol.references_state import Send
from braid.types import TensorSpec

__all__ = [
    "Acknowledge",
    "AutogradMessage",
    "BackwardFailed",
    "BackwardFinished",
    "ContextState",
    "FailBackward",
    "Gradients",
    "Instruction",
    "Mark",
    "Mode",
    "PendingEdges",
    "Release",
    "RunBackward",
    "Ship",
    "SparseSpec",
]

Mode: TypeAlias = Literal["smart", "fast"]


class SparseSpec(NamedTuple):
    """A sparse tensor of a message: two buffers, its indices and its values.

    Attributes:
        place: Place of its indices among the buffers; the values follow.
        shape: Extent of each dim.
        is_coalesced: Whether each index occurs once.
        requires_grad: Whether autograd follows it.
    """

    place: int
    shape: tuple[int, ...]
    is_coalesced: bool
    requires_grad: bool


class PendingEdges(NamedTuple):
    """Report of a process about its edges (messages with tensors) that wait for gradients.

    `steps` counts the events before the report: of two reports, the one with more is valid.
    """

    steps: int
    edges: tuple[Id, ...]


class Mark(msgspec.Struct, tag="rpc.mark", frozen=True):
    """A receiver of tensors reports to their sender that the roots of a backward depend on them.

    The sender then expects gradients for the edge, and marks the edges that it depends on itself.

    Attributes:
        context: Number of the context.
        backward: Number of the backward.
        edge: Number of the edge (the message) that carried the tensors.
        failed: Earlier backwards of the context that have failed.
    """

    context: int
    backward: Id
    edge: Id
    failed: list[Id] = []


class Gradients(msgspec.Struct, tag="rpc.gradients", frozen=True):
    """A receiver of tensors sends their gradients to the process that sent the tensors.

    Attributes:
        context: Number of the context.
        backward: Number of the backward.
        edge: Number of the edge (the message) that carried the tensors.
        mode: Mode of the backward; "smart" if marks came before.
        retains: Whether graphs are kept.
        packed: A gradient or None for each tensor, packed by `codec`.
        specs: Specs of the tensors, sent as buffers of the message.
        sparse: Specs of sparse tensors, each made of two of the tensors.
        failed: Earlier backwards of the context that have failed.
    """

    context: int
    backward: Id
    edge: Id
    mode: Mode
    retains: bool
    packed: bytes
    specs: list[TensorSpec]
    sparse: list[SparseSpec] = []
    failed: list[Id] = []


class Acknowledge(msgspec.Struct, tag="rpc.acknowledge", frozen=True):
    """Answer to a `Mark` or `Gradients`: it is handled, and so are all messages that it caused.

    Attributes:
        context: Number of the context.
        backward: Number of the backward.
        pending: Edges (messages with tensors) that still wait for gradients, by process.
    """

    context: int
    backward: Id
    pending: dict[int, PendingEdges] = {}


class BackwardFailed(msgspec.Struct, tag="rpc.backward-failed", frozen=True):
    """A process in which a backward failed sends this to all others, which then fail it as well.

    Attributes:
        context: Number of the context.
        reason: Text of the error.
        backward: Number of the backward that failed; None if all backwards of the context fail.
    """

    context: int
    reason: str
    backward: Id | None = None


class Release(msgspec.Struct, tag="rpc.release", frozen=True):
    """A process reports to all others that a context is over; they then release its state."""

    context: int


AutogradMessage: TypeAlias = Mark | Gradients | Acknowledge | BackwardFailed | Release


class RunBackward(NamedTuple):
    """Instruction: run the local backward from the tensors of the sent message `edge`.

    An `edge` of None means the roots of the backward.
    """

    edge: Id | None
    backward: Id


class Ship(NamedTuple):
    """Instruction: send the gradients of received tensors to the process that sent the tensors."""

    edge: Id
    to: int
    backward: Id


class BackwardFinished(NamedTuple):
    """Instruction for the process that began a backward: it is over on all processes.

    If `pending` is not empty, the backward is incomplete: these edges (messages with tensors) still
    wait for gradients.
    """

    pending: dict[int, tuple[Id, ...]]


class FailBackward(NamedTuple):
    """Instruction: fail a backward; with None, fail all backwards of the context."""

    backward: Id | None


Instruction: TypeAlias = Send | RunBackward | Ship | BackwardFinished | FailBackward


@dataclass(slots=True)
class _Backward:
    """One backward, as this process takes part in it.

    Attributes:
        number: Number of the backward.
        mode: "smart" if marks determine which sends get gradients, "fast" if all sends do.
        open_sources: Roots (None) and sends with a local backward still to run.
        waits: Sources for which each reached receive waits.
        engaged_by: Process that waits for the answer to its message; -1 if there is none.
        unanswered: Messages of this process that are not answered.
        running: Local backwards that run now.
        is_marking: Whether this process is the origin, and its wave of marks is under way.
        steps: Number of events, so that records of pending edges have an order.
        pending: Latest records of other processes.
    """

    number: Id
    mode: Mode
    open_sources: set[Id | None] = field(default_factory=set)
    waits: dict[Id, set[Id | None]] = field(default_factory=dict)
    engaged_by: int = -1
    unanswered: int = 0
    running: int = 0
    is_marking: bool = False
    steps: int = 0
    pending: dict[int, PendingEdges] = field(default_factory=dict)


class ContextState:
    """State of one context of distributed autograd in one process.

    Args:
        process: Number of this process.
        context: Number of the context.
        reaches: Function that returns the receives on which the tensors of a send, or the roots
            (None), depend inside of this process.
    """

    def __init__(
        self, process: int, context: int, reaches: Callable[[Id | None], Iterable[Id]]
    ) -> None:
        self.process = process
        self.context = context
        self._reaches = reaches
        self.sends: dict[Id, int] = {}
        self.receives: dict[Id, int] = {}
        self.known: set[int] = set()
        self.failures: dict[Id | None, str] = {}  # by backward; None for all of them
        self._backward: _Backward | None = None

    # -- recording

    def sent(self, edge: Id, to: int) -> None:
        """Record an edge: a message with tensors that this process has sent to process `to`."""
        self.sends[edge] = to
        self.known.add(to)

    def received(self, edge: Id, sender: int) -> None:
        """Record an edge: a message with tensors that `sender` has sent to this process."""
        self.receives[edge] = sender
        self.known.add(sender)

    def met(self, process: int) -> None:
        """Record a process that takes part in the context."""
        self.known.add(process)

    # -- backward

    @property
    def is_running(self) -> bool:
        """Whether a backward is under way here."""
        return self._backward is not None

    @property
    def failed(self) -> list[Id]:
        """Numbers of the backwards that have failed."""
        return [backward for backward in self.failures if backward is not None]

    def is_current(self, backward: Id) -> bool:
        """Return whether `backward` is this process's current backward and has not failed."""
        record = self._backward
        return record is not None and record.number == backward and not self.failure_of(backward)

    def failure_of(self, backward: Id) -> str:
        """Return the reason why a backward has failed; empty if it has not."""
        return self.failures.get(None) or self.failures.get(backward, "")

    def is_last(self, source: Id | None) -> bool:
        """Return whether no local backward but the one from `source` is left to run.

        Its caller can then free the graphs.
        """
        return self._backward is not None and self._backward.open_sources <= {source}

    def begin(self, number: Id, mode: Mode) -> list[Instruction]:
        """Begin a backward in the process that calls `backward`; its roots are set before."""
        record = self._join(number, mode)
        record.open_sources.add(None)
        record.is_marking = mode == "smart"
        instructions = self._reach(record, None)
        return [*instructions, *self._advance(record)]

    def on_mark(self, sender: int, message: Mark) -> list[Instruction]:
        """Handle a `Mark`: gradients will come for a message that this process has sent."""
        if self._is_over(message.backward):
            return [self._fail_message(sender, message.backward)]
        instructions = self._learn(message.failed)
        record = self._join(message.backward, "smart")
        instructions += self._engage(record, sender)
        if message.edge not in record.open_sources:
            record.open_sources.add(message.edge)
            instructions += self._reach(record, message.edge)
        return [*instructions, *self._advance(record)]

    def on_gradients(
        self, sender: int, backward: Id, edge: Id, mode: Mode, failed: Iterable[Id] = ()
    ) -> list[Instruction]:
        """Handle `Gradients`: run the local backward of the send to which they belong."""
        if self._is_over(backward):
            return [self._fail_message(sender, backward)]
        instructions = self._learn(failed)
        record = self._join(backward, mode)
        instructions += self._engage(record, sender)
        if edge not in record.open_sources:
            reason = f"gradients came twice for edge {tuple(edge)}"
            return [*instructions, *self.fail(reason, backward)]
        record.running += 1
        return [*instructions, RunBackward(edge, backward)]

    def finished(self, source: Id | None, backward: Id) -> list[Instruction]:
        """Continue after the local backward of a source (a send, or None for the roots) has run."""
        record = self._backward
        if record is None or not self.is_current(backward):
            return []
        record.running -= 1
        record.steps += 1
        record.open_sources.discard(source)
        instructions: list[Instruction] = []
        for edge in [edge for edge, sources in record.waits.items() if source in sources]:
            record.waits[edge].discard(source)
            if not record.waits[edge]:
                del record.waits[edge]
                record.unanswered += 1
                instructions.append(Ship(edge, self.receives[edge], backward))
        return [*instructions, *self._advance(record)]

    def on_acknowledge(self, message: Acknowledge) -> list[Instruction]:
        """Handle an `Acknowledge` of a message that this process has sent."""
        record = self._backward
        if record is None or not self.is_current(message.backward):
            return []
        record.unanswered -= 1
        self._merge(record, message.pending)
        return self._advance(record)

    def waiting(self) -> list[str]:
        """Return lines of text about the gradients and answers that this process waits for."""
        record = self._backward
        if record is None:
            return []
        lines = [
            f"process {self.process} waits for the gradients of "
            f"{sum(source is not None for source in sources)} results that it sent"
            for sources in record.waits.values()
            if sources
        ]
        if record.unanswered:
            known = ", ".join(map(str, sorted(self.known)))
            lines.append(
                f"process {self.process} waits for {record.unanswered} answers of processes {known}"
            )
        return lines

    # -- the end

    def fail(self, reason: str, backward: Id | None = None) -> list[Instruction]:
        """Fail a backward, or all backwards of the context (None), on all processes."""
        if None in self.failures or backward in self.failures:
            return []
        self.failures[backward] = reason
        message = BackwardFailed(self.context, reason, backward)
        sends = [Send(process, message) for process in sorted(self.known - {self.process})]
        return [*sends, FailBackward(backward)]

    def lost(self, process: int, reason: str) -> list[Instruction]:
        """Fail all backwards of the context if the lost process takes part in it."""
        if process not in self.known:
            return []
        self.known.discard(process)
        return self.fail(reason)

    def release(self) -> list[Instruction]:
        """Return the messages that release the context on all other processes that take part."""
        return [Send(to, Release(self.context)) for to in sorted(self.known - {self.process})]

    # -- inside

    def _learn(self, failed: Iterable[Id]) -> list[Instruction]:
        """Fail earlier backwards, so that none of their gradients stay."""
        reason = "the backward failed on another process"
        return [step for backward in failed for step in self.fail(reason, backward)]

    def _is_over(self, backward: Id) -> bool:
        """Return whether a backward has failed, or a later one of its origin has begun."""
        record = self._backward
        return bool(self.failure_of(backward)) or (
            record is not None
            and record.number.process == backward.process
            and record.number > backward
        )

    def _join(self, number: Id, mode: Mode) -> _Backward:
        if self._backward is None or self._backward.number != number:
            record = self._backward = _Backward(number, mode)
            if mode == "fast":
                record.open_sources.update(self.sends)
                for edge in self.sends:
                    for receive in self._reaches(edge):
                        record.waits.setdefault(receive, set()).add(edge)
        return self._backward

    def _reach(self, record: _Backward, source: Id | None) -> list[Instruction]:
        """Make the receives of a source wait for it; send marks for newly reached receives."""
        instructions: list[Instruction] = []
        for edge in self._reaches(source):
            if edge not in record.waits and record.mode == "smart":
                record.unanswered += 1
                mark = Mark(self.context, record.number, edge, self.failed)
                instructions.append(Send(self.receives[edge], mark))
            record.waits.setdefault(edge, set()).add(source)
        return instructions

    def _engage(self, record: _Backward, sender: int) -> list[Instruction]:
        """Answer a message immediately, unless it makes this process busy."""
        record.steps += 1
        is_origin = record.number.process == self.process
        if record.engaged_by < 0 and not is_origin:
            record.engaged_by = sender
            return []
        return [Send(sender, self._answer(record))]

    def _advance(self, record: _Backward) -> list[Instruction]:
        """Start the next phase or send the answer, once this process is idle."""
        if record.unanswered or record.running:
            return []
        if record.number.process != self.process:
            if record.engaged_by < 0:
                return []
            to, record.engaged_by = record.engaged_by, -1
            return [Send(to, self._answer(record))]
        if None in record.open_sources:
            record.is_marking = False
            record.running += 1
            return [RunBackward(None, record.number)]
        self._backward = None
        record.pending[self.process] = self._own_pending(record)
        pending = {process: other.edges for process, other in record.pending.items() if other.edges}
        return [BackwardFinished(pending)]

    def _own_pending(self, record: _Backward) -> PendingEdges:
        return PendingEdges(
            record.steps, tuple(edge for edge, sources in record.waits.items() if sources)
        )

    def _answer(self, record: _Backward) -> Acknowledge:
        pending = {**record.pending, self.process: self._own_pending(record)}
        return Acknowledge(self.context, record.number, pending if record.mode == "fast" else {})

    def _merge(self, record: _Backward, pending: dict[int, PendingEdges]) -> None:
        record.steps += 1
        for process, theirs in pending.items():
            if process not in record.pending or record.pending[process].steps < theirs.steps:
                record.pending[process] = theirs

    def _fail_message(self, to: int, backward: Id) -> Send:
        reason = self.failure_of(backward) or "another backward of this context has begun"
        return Send(to, BackwardFailed(self.context, reason, backward))
