"""State machine of a distributed autograd context in one process: the order of its backwards.

Problem: a graph lies in several processes. An edge leaves one in a message (a send) and enters the
next (a receive). Backward goes the other way: a receive may ship its gradient once all functions
that depend on it have run. Some sends never get a gradient, since their results are not used, and
no process can see that alone. Expecting a gradient for every send (torch's FAST) then never ends,
and asking along the graph before the backward (SMART) doubles the messages.

Idea: each message of the forward carries its history, the numbers of all edges that it depends on.
So the process that begins a backward knows all edges that its roots depend on, the plan. The plan
goes with the gradients: each process waits for the sends that are in it, and for no others.

    recording ── begin ──> running ── all answered ──> over
                               └───── an error ──────> failed

Each message is answered when all its consequences are over, so the origin knows the end. A process
answers after its local backward, and counts the answer in the gradients that it sends to the same
process, if there are any. It answers the message that made it busy when it is idle again.

Edges of a process in a context have successive numbers, so a history is a list of spans: one for
each process, and one more for each gap of edges that it does not depend on.

An error fails one backward, and another may follow; the loss of a process fails every backward of
its contexts.

Sources: E. Dijkstra, C. Scholten, "Termination detection for diffusing computations", 1980; PyTorch
team, "Distributed Autograd Design", for FAST and SMART.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

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
    "Release",
    "RunBackward",
    "Ship",
    "Span",
    "SparseSpec",
]

Span: TypeAlias = tuple[int, int]  # first and last number of successive edges


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


class Gradients(msgspec.Struct, tag="rpc.gradients", frozen=True):
    """A receiver of tensors sends their gradients to the process that sent the tensors.

    Attributes:
        context: Number of the context.
        backward: Number of the backward.
        edge: Number of the edge (the message) that carried the tensors.
        plan: Numbers of all edges that the roots depend on.
        retains: Whether graphs are kept.
        packed: A gradient or None for each tensor, packed by `codec`.
        specs: Specs of the tensors, sent as buffers of the message.
        sparse: Specs of sparse tensors, each made of two of the tensors.
        answers: Number of messages of the receiver that this one answers, as `Acknowledge` does.
        failed: Earlier backwards of the context that have failed.
    """

    context: int
    backward: Id
    edge: int
    plan: list[Span]
    retains: bool
    packed: bytes
    specs: list[TensorSpec]
    sparse: list[SparseSpec] = []
    answers: int = 0
    failed: list[Id] = []


class Acknowledge(msgspec.Struct, tag="rpc.acknowledge", frozen=True):
    """Answer to `Gradients`: they are handled, and so are all messages that they caused.

    Attributes:
        context: Number of the context.
        backward: Number of the backward.
        answers: Number of messages that this one answers.
    """

    context: int
    backward: Id
    answers: int = 1


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


AutogradMessage: TypeAlias = Gradients | Acknowledge | BackwardFailed | Release


class RunBackward(NamedTuple):
    """Instruction: run the local backward from the tensors of the sent message `edge`.

    An `edge` of None means the roots of the backward.
    """

    edge: int | None
    backward: Id


class Ship(NamedTuple):
    """Instruction: send the gradients of received tensors to the process that sent the tensors.

    The fields are explained at `Gradients`.
    """

    edge: int
    to: int
    backward: Id
    plan: list[Span]
    answers: int


class BackwardFinished(NamedTuple):
    """Instruction for the process that began a backward: it is over on all processes."""


class FailBackward(NamedTuple):
    """Instruction: fail a backward; with None, fail all backwards of the context."""

    backward: Id | None


Instruction: TypeAlias = Send | RunBackward | Ship | BackwardFinished | FailBackward


@dataclass(slots=True)
class _Backward:
    """One backward, as this process takes part in it.

    Attributes:
        number: Number of the backward.
        plan: Numbers of all edges that the roots depend on.
        open_sources: Roots (None) and sends with a local backward still to run.
        waits: Sources for which each receive waits.
        engaged_by: Process that waits for the answer to the message that made this one busy; -1 if
            there is none.
        answers: Number of further messages to answer, by their sender.
        unanswered: Messages of this process that are not answered.
        running: Local backwards that run now.
    """

    number: Id
    plan: list[Span]
    open_sources: set[int | None] = field(default_factory=set)
    waits: dict[int, set[int | None]] = field(default_factory=dict)
    engaged_by: int = -1
    answers: Counter[int] = field(default_factory=Counter)
    unanswered: int = 0
    running: int = 0


class ContextState:
    """State of one context of distributed autograd in one process.

    Args:
        process: Number of this process.
        context: Number of the context.
        reaches: Function that returns the receives on which the tensors of a send, or the roots
            (None), depend inside of this process.
    """

    def __init__(
        self, process: int, context: int, reaches: Callable[[int | None], Iterable[int]]
    ) -> None:
        self.process = process
        self.context = context
        self._reaches = reaches
        self.sends: dict[int, int] = {}
        self.receives: dict[int, int] = {}
        self._histories: dict[int, Sequence[Span]] = {}  # of the receives
        self.known: set[int] = set()
        self.failures: dict[Id | None, str] = {}  # by backward; None for all of them
        self._backward: _Backward | None = None

    # -- recording

    def sent(self, edge: int, to: int) -> list[Span]:
        """Record an edge: a message with tensors that this process has sent to process `to`.

        Returns:
            The edge's history: all edges that it depends on.
        """
        self.sends[edge] = to
        self.known.add(to)
        return self._history(edge)

    def received(self, edge: int, sender: int, history: Sequence[Span] = ()) -> None:
        """Record an edge: a message with tensors that `sender` has sent to this process."""
        self.receives[edge] = sender
        self._histories[edge] = history
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

    def is_last(self, source: int | None) -> bool:
        """Return whether no local backward but the one from `source` is left to run.

        Its caller can then free the graphs.
        """
        return self._backward is not None and self._backward.open_sources <= {source}

    def begin(self, number: Id) -> list[Instruction]:
        """Begin a backward in the process that calls `backward`; its roots are set before."""
        record = self._join(number, self._history(None))
        self._open(record, None)
        record.running += 1
        return [RunBackward(None, number)]

    def on_gradients(self, sender: int, message: Gradients) -> list[Instruction]:
        """Handle `Gradients`: run the local backward of the send to which they belong."""
        backward = message.backward
        if self._is_over(backward):
            return [self._fail_message(sender, backward)]
        instructions = self._learn(message.failed)
        record = self._join(backward, message.plan)
        record.unanswered -= message.answers
        if record.engaged_by < 0 and backward.process != self.process:
            record.engaged_by = sender
        else:
            record.answers[sender] += 1
        if message.edge not in record.open_sources:
            reason = f"gradients came twice for edge {message.edge}"
            return [*instructions, *self.fail(reason, backward)]
        record.running += 1
        return [*instructions, RunBackward(message.edge, backward)]

    def finished(self, source: int | None, backward: Id) -> list[Instruction]:
        """Continue after the local backward of a source (a send, or None for the roots) has run."""
        record = self._backward
        if record is None or not self.is_current(backward):
            return []
        record.running -= 1
        record.open_sources.discard(source)
        instructions: list[Instruction] = []
        for edge in [edge for edge, sources in record.waits.items() if source in sources]:
            record.waits[edge].discard(source)
            if not record.waits[edge]:
                del record.waits[edge]
                record.unanswered += 1
                to = self.receives[edge]
                answers = record.answers.pop(to, 0)
                instructions.append(Ship(edge, to, backward, record.plan, answers))
        return [*instructions, *self._advance(record)]

    def on_acknowledge(self, message: Acknowledge) -> list[Instruction]:
        """Handle an `Acknowledge` of messages that this process has sent."""
        record = self._backward
        if record is None or not self.is_current(message.backward):
            return []
        record.unanswered -= message.answers
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

    def release(self, sender: int | None = None) -> list[Instruction]:
        """Return messages that release the context on all other processes that take part.

        `sender` is the process that has released it before; None for no process.
        """
        others = sorted(self.known - {self.process, sender})
        return [Send(to, Release(self.context)) for to in others]

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

    def _history(self, source: int | None) -> list[Span]:
        """Return the numbers of all edges that a send, or the roots (None), depend on."""
        reached = self._reaches(source)
        return _merged(span for edge in reached for span in ((edge, edge), *self._histories[edge]))

    def _join(self, number: Id, plan: list[Span]) -> _Backward:
        if self._backward is None or self._backward.number != number:
            record = self._backward = _Backward(number, plan)
            for edge in self.sends:
                if _has(plan, edge):
                    self._open(record, edge)
        return self._backward

    def _open(self, record: _Backward, source: int | None) -> None:
        """Make the receives that a source depends on wait for its local backward."""
        record.open_sources.add(source)
        for edge in self._reaches(source):
            record.waits.setdefault(edge, set()).add(source)

    def _advance(self, record: _Backward) -> list[Instruction]:
        """Answer messages; the origin ends the backward once it is idle."""
        is_idle = not record.unanswered and not record.running
        if is_idle and record.engaged_by >= 0:
            record.answers[record.engaged_by] += 1
            record.engaged_by = -1
        answers, record.answers = record.answers, Counter()
        instructions: list[Instruction] = [
            Send(to, Acknowledge(self.context, record.number, count))
            for to, count in answers.items()
        ]
        if is_idle and record.number.process == self.process:
            self._backward = None
            instructions.append(BackwardFinished())
        return instructions

    def _fail_message(self, to: int, backward: Id) -> Send:
        reason = self.failure_of(backward) or "another backward of this context has begun"
        return Send(to, BackwardFailed(self.context, reason, backward))


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Return the same numbers in ascending spans that neither overlap nor touch."""
    merged: list[Span] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return merged


def _has(spans: Sequence[Span], edge: int) -> bool:
    """Return whether a number is in ascending spans."""
    place = bisect_right(spans, edge, key=lambda span: span[0])
    return place > 0 and edge <= spans[place - 1][1]
