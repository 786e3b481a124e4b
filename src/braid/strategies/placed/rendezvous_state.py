"""Pairs values that producers put with receivers that ask for them; decides, and moves nothing.

    event                              value is here        no value yet
    put(key)                           InternalError        answer the asker, or keep the value
    ask(key, ticket)                   answer               wait
    end(graph, step)                   drop                 fail
    a key of an ended step             drop the value       fail immediately
    a key of another incarnation       -                    fail immediately

A key names the producer's device and incarnation, the receiver's device, the edge and the step. So
whichever comes first waits, a value is used once, and no value of an earlier life of a task is ever
taken for one of this life.

Source: TensorFlow's rendezvous (tensorflow/core/framework/rendezvous.h), with keys
`src_device;src_incarnation;dst_device;edge;frame:iteration`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from braid.errors import InternalError

__all__ = ["AnswerAsker", "DropValue", "FailAsker", "RendezvousKey", "RendezvousState"]


class RendezvousKey(NamedTuple):
    """Key of a value that one device sends another in one step.

    Attributes:
        source: Device that makes the value.
        incarnation: Identifier of the process of that device's task, different after a restart.
        target: Device that receives the value.
        edge: Edge of the graph: the value that is sent.
        graph: Name of the graph that runs.
        step: Number of the step.
    """

    source: str
    incarnation: str
    target: str
    edge: str
    graph: str
    step: int

    def __str__(self) -> str:
        return ";".join(map(str, self))


class AnswerAsker(NamedTuple):
    """Instruction: send the value of a key to a waiting receiver, and drop the value."""

    ticket: int
    key: RendezvousKey


class FailAsker(NamedTuple):
    """Instruction: make the future of a waiting receiver raise an error."""

    ticket: int
    reason: str


class DropValue(NamedTuple):
    """Instruction: drop the value of a key."""

    key: RendezvousKey


RendezvousInstruction = AnswerAsker | FailAsker | DropValue


@dataclass(slots=True)
class _StepPairs:
    kept: set[RendezvousKey] = field(default_factory=set)
    waiting: dict[RendezvousKey, int] = field(default_factory=dict)


class RendezvousState:
    """Values of one task that receivers have not taken, and receivers that wait for values.

    Args:
        incarnation: Identifier of the task's process, different after a restart.
    """

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._steps: dict[tuple[str, int], _StepPairs] = {}
        self._ended: dict[str, tuple[int, str]] = {}  # last step that ended, by graph, and why

    @property
    def num_pending(self) -> int:
        """Number of values without a request, plus the number of requests without a value."""
        return sum(len(pairs.kept) + len(pairs.waiting) for pairs in self._steps.values())

    def put(self, key: RendezvousKey) -> list[RendezvousInstruction]:
        """Return the instructions to carry out when the value of `key` has been put."""
        if self._has_ended(key.graph, key.step):
            return [DropValue(key)]
        pairs = self._steps.setdefault((key.graph, key.step), _StepPairs())
        if key in pairs.kept:
            msg = f"the value {key} was put into the rendezvous twice"
            raise InternalError(msg)
        ticket = pairs.waiting.pop(key, None)
        if ticket is None:
            pairs.kept.add(key)
            return []
        self._forget_if_empty(key)
        return [AnswerAsker(ticket, key)]

    def ask(self, key: RendezvousKey, ticket: int) -> list[RendezvousInstruction]:
        """Return the instructions for a receiver that asks for `key`; `ticket` is its number."""
        if key.incarnation != self._incarnation:
            reason = (
                f"{key.source} has restarted: {key.edge} of step {key.step} was requested from its "
                f"process {key.incarnation}, but {self._incarnation} runs there now"
            )
            return [FailAsker(ticket, reason)]
        if self._has_ended(key.graph, key.step):
            why = self._ended[key.graph][1]
            return [FailAsker(ticket, f"step {key.step} has ended on {key.source}: {why}")]
        pairs = self._steps.setdefault((key.graph, key.step), _StepPairs())
        if key in pairs.waiting:
            return [FailAsker(ticket, f"{key} is asked for twice")]
        if key in pairs.kept:
            pairs.kept.remove(key)
            self._forget_if_empty(key)
            return [AnswerAsker(ticket, key)]
        pairs.waiting[key] = ticket
        return []

    def end(self, graph: str, step: int, reason: str) -> list[RendezvousInstruction]:
        """Return the instructions that end a graph's steps up to `step`, for a reason (text)."""
        if not self._has_ended(graph, step):
            self._ended[graph] = step, reason
        instructions: list[RendezvousInstruction] = []
        for name in [key for key in self._steps if key[0] == graph and key[1] <= step]:
            pairs = self._steps.pop(name)
            instructions += [DropValue(key) for key in sorted(pairs.kept)]
            for key, ticket in pairs.waiting.items():
                text = f"{key.edge} does not come: step {step} has ended on {key.source}: {reason}"
                instructions.append(FailAsker(ticket, text))
        return instructions

    def forget(self, graph: str) -> list[RendezvousInstruction]:
        """Return the instructions that drop all state of a graph."""
        last = max((step for name, step in self._steps if name == graph), default=-1)
        instructions = self.end(graph, last, "its graph was closed")
        self._ended.pop(graph, None)
        return instructions

    def _has_ended(self, graph: str, step: int) -> bool:
        return graph in self._ended and step <= self._ended[graph][0]

    def _forget_if_empty(self, key: RendezvousKey) -> None:
        pairs = self._steps[key.graph, key.step]
        if not pairs.kept and not pairs.waiting:
            del self._steps[key.graph, key.step]
