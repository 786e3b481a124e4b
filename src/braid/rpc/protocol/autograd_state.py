"""A context of distributed autograd in one process, as a state machine: what runs, and when.

Problem: a graph lies in several processes. An edge leaves one in a message (a send) and enters the
next (a receive). Backward goes the other way: a receive may ship its gradient once all that depends
on it has run, and a process cannot know that alone. Counting on a gradient for every send (FAST)
waits for ever when a result was not used.

Idea: a wave of marks (SMART). It begins at the roots, goes from each reached receive to the send at
its other end, and on to what that reaches. Each message is answered when all that it caused is
over, so the origin knows when the wave has ended: then each process knows which sends get
gradients. The backward is a second wave of the same kind, whose messages are gradients.

    recording ── begin ──> marking ── all acknowledged ──> running ── all acknowledged ──> over
                     FAST: no wave of marks ──────────────────┘             an error ──> failed

An error fails one backward, and another may follow; the loss of a process fails every backward of
its contexts. A process answers at once, but for the message that made it busy: that one, when it is
idle again.

Sources: E. Dijkstra, C. Scholten, "Termination detection for diffusing computations", 1980; PyTorch
team, "Distributed Autograd Design", for FAST and SMART.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from braid.rpc.protocol.references_state import Id, Send
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
    """Edges of a process that wait for gradients; of two records, the one with more steps holds."""

    steps: int
    edges: tuple[Id, ...]


class Mark(msgspec.Struct, tag="rpc.mark", frozen=True):
    """The roots of a backward depend on the tensors that this edge has carried.

    Attributes:
        context: Number of the context.
        backward: The backward.
        edge: The edge.
        failed: Earlier backwards of the context that have failed.
    """

    context: int
    backward: Id
    edge: Id
    failed: list[Id] = []


class Gradients(msgspec.Struct, tag="rpc.gradients", frozen=True):
    """The gradients of an edge's tensors.

    Attributes:
        context: Number of the context.
        backward: The backward.
        edge: The edge.
        mode: Whether marks came before.
        retains: Whether graphs are kept.
        packed: A gradient or None for each tensor, packed by `codec`.
        specs: Specs of the tensors that travel beside.
        sparse: Sparse tensors, each of two of them.
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
    """All that a mark or a gradient has caused is over; processes may still wait for gradients."""

    context: int
    backward: Id
    pending: dict[int, PendingEdges] = {}


class BackwardFailed(msgspec.Struct, tag="rpc.backward-failed", frozen=True):
    """A backward has failed on all processes; every backward of the context if it names none."""

    context: int
    reason: str
    backward: Id | None = None


class Release(msgspec.Struct, tag="rpc.release", frozen=True):
    """A context is over: nothing of it is needed any more."""

    context: int


AutogradMessage: TypeAlias = Mark | Gradients | Acknowledge | BackwardFailed | Release


class RunBackward(NamedTuple):
    """Run the local backward from the roots (None), or from the tensors of a send."""

    edge: Id | None
    backward: Id


class Ship(NamedTuple):
    """Send what has accumulated for a receive to the process that it came from."""

    edge: Id
    to: int
    backward: Id


class BackwardFinished(NamedTuple):
    """The backward is over on all processes. Pending edges mean that it is incomplete."""

    pending: dict[int, tuple[Id, ...]]


class FailBackward(NamedTuple):
    """The backward has failed, or all backwards of the context have (None)."""

    backward: Id | None


Instruction: TypeAlias = Send | RunBackward | Ship | BackwardFinished | FailBackward


@dataclass(slots=True)
class _Backward:
    """One backward, as this process takes part in it.

    Attributes:
        number: Number of the backward.
        mode: Way in which it is known which sends get gradients.
        open_sources: Roots (None) and sends whose local backward is still to run.
        waits: Sources for which each reached receive waits.
        engaged_by: Process whose message is still to be answered; -1 if there is none.
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
    """A context, as one process sees it.

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
        """Record an edge that leaves."""
        self.sends[edge] = to
        self.known.add(to)

    def received(self, edge: Id, sender: int) -> None:
        """Record an edge that enters."""
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
        """Backwards that have failed."""
        return [each for each in self.failures if each is not None]

    def is_current(self, backward: Id) -> bool:
        """Whether this process takes part in a backward that has not failed."""
        own = self._backward
        return own is not None and own.number == backward and not self.failure_of(backward)

    def failure_of(self, backward: Id) -> str:
        """Return the reason why a backward has failed; empty if it has not."""
        return self.failures.get(None) or self.failures.get(backward, "")

    def is_last(self, source: Id | None) -> bool:
        """Whether no other local backward is still to run, so that graphs can be freed."""
        return self._backward is not None and self._backward.open_sources <= {source}

    def begin(self, number: Id, mode: Mode) -> list[Instruction]:
        """Begin a backward, as its origin, once its roots are set."""
        own = self._join(number, mode)
        own.open_sources.add(None)
        own.is_marking = mode == "smart"
        done = self._reach(own, None)
        return [*done, *self._advance(own)]

    def on_mark(self, sender: int, message: Mark) -> list[Instruction]:
        """Let a send count on a gradient."""
        if self._is_over(message.backward):
            return [self._fail_message(sender, message.backward)]
        done = self._learn(message.failed)
        own = self._join(message.backward, "smart")
        done += self._engage(own, sender)
        if message.edge not in own.open_sources:
            own.open_sources.add(message.edge)
            done += self._reach(own, message.edge)
        return [*done, *self._advance(own)]

    def on_gradients(
        self, sender: int, backward: Id, edge: Id, mode: Mode, failed: Iterable[Id] = ()
    ) -> list[Instruction]:
        """Run the local backward of a send, whose gradients have come."""
        if self._is_over(backward):
            return [self._fail_message(sender, backward)]
        done = self._learn(failed)
        own = self._join(backward, mode)
        done += self._engage(own, sender)
        if edge not in own.open_sources:
            reason = f"gradients came twice for edge {tuple(edge)}"
            return [*done, *self.fail(reason, backward)]
        own.running += 1
        return [*done, RunBackward(edge, backward)]

    def finished(self, source: Id | None, backward: Id) -> list[Instruction]:
        """Continue after the local backward of a source has run."""
        own = self._backward
        if own is None or not self.is_current(backward):
            return []
        own.running -= 1
        own.steps += 1
        own.open_sources.discard(source)
        done: list[Instruction] = []
        for edge in [edge for edge, sources in own.waits.items() if source in sources]:
            own.waits[edge].discard(source)
            if not own.waits[edge]:
                del own.waits[edge]
                own.unanswered += 1
                done.append(Ship(edge, self.receives[edge], backward))
        return [*done, *self._advance(own)]

    def on_acknowledge(self, message: Acknowledge) -> list[Instruction]:
        """Note that a message of this process, and all that it caused, is over."""
        own = self._backward
        if own is None or not self.is_current(message.backward):
            return []
        own.unanswered -= 1
        self._merge(own, message.pending)
        return self._advance(own)

    def waiting(self) -> list[str]:
        """Return what a backward waits for here, as text."""
        own = self._backward
        if own is None:
            return []
        lines = [
            f"process {self.process} waits for the gradients of "
            f"{sum(each is not None for each in sources)} results that it sent"
            for sources in own.waits.values()
            if sources
        ]
        if own.unanswered:
            known = ", ".join(map(str, sorted(self.known)))
            lines.append(
                f"process {self.process} waits for {own.unanswered} answers of processes {known}"
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
        """Fail if a process that takes part is lost."""
        if process not in self.known:
            return []
        self.known.discard(process)
        return self.fail(reason)

    def release(self) -> list[Instruction]:
        """End the context here and on all processes that take part."""
        return [Send(to, Release(self.context)) for to in sorted(self.known - {self.process})]

    # -- inside

    def _learn(self, failed: Iterable[Id]) -> list[Instruction]:
        """Fail earlier backwards, so that none of their gradients stay."""
        reason = "the backward failed on another process"
        return [instruction for each in failed for instruction in self.fail(reason, each)]

    def _is_over(self, backward: Id) -> bool:
        """Whether a backward has failed, also where only its successor is known here."""
        own = self._backward
        return bool(self.failure_of(backward)) or (
            own is not None and own.number.process == backward.process and own.number > backward
        )

    def _join(self, number: Id, mode: Mode) -> _Backward:
        if self._backward is None or self._backward.number != number:
            own = self._backward = _Backward(number, mode)
            if mode == "fast":
                own.open_sources.update(self.sends)
                for edge in self.sends:
                    for receive in self._reaches(edge):
                        own.waits.setdefault(receive, set()).add(edge)
        return self._backward

    def _reach(self, own: _Backward, source: Id | None) -> list[Instruction]:
        """Let the receives that a source depends on wait for it; mark those that are new."""
        done: list[Instruction] = []
        for edge in self._reaches(source):
            if edge not in own.waits and own.mode == "smart":
                own.unanswered += 1
                mark = Mark(self.context, own.number, edge, self.failed)
                done.append(Send(self.receives[edge], mark))
            own.waits.setdefault(edge, set()).add(source)
        return done

    def _engage(self, own: _Backward, sender: int) -> list[Instruction]:
        """Answer a message at once, unless it makes this process busy."""
        own.steps += 1
        is_origin = own.number.process == self.process
        if own.engaged_by < 0 and not is_origin:
            own.engaged_by = sender
            return []
        return [Send(sender, self._answer(own))]

    def _advance(self, own: _Backward) -> list[Instruction]:
        """Go on to the next phase, or answer, when nothing is under way here."""
        if own.unanswered or own.running:
            return []
        if own.number.process != self.process:
            if own.engaged_by < 0:
                return []
            to, own.engaged_by = own.engaged_by, -1
            return [Send(to, self._answer(own))]
        if None in own.open_sources:
            own.is_marking = False
            own.running += 1
            return [RunBackward(None, own.number)]
        self._backward = None
        own.pending[self.process] = self._own_pending(own)
        pending = {process: each.edges for process, each in own.pending.items() if each.edges}
        return [BackwardFinished(pending)]

    def _own_pending(self, own: _Backward) -> PendingEdges:
        return PendingEdges(
            own.steps, tuple(edge for edge, sources in own.waits.items() if sources)
        )

    def _answer(self, own: _Backward) -> Acknowledge:
        pending = {**own.pending, self.process: self._own_pending(own)}
        return Acknowledge(self.context, own.number, pending if own.mode == "fast" else {})

    def _merge(self, own: _Backward, pending: dict[int, PendingEdges]) -> None:
        own.steps += 1
        for process, theirs in pending.items():
            if process not in own.pending or own.pending[process].steps < theirs.steps:
                own.pending[process] = theirs

    def _fail_message(self, to: int, backward: Id) -> Send:
        reason = self.failure_of(backward) or "another backward has begun"
        return Send(to, BackwardFailed(self.context, reason, backward))
