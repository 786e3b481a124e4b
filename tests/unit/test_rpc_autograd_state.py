"""Distributed backwards over random graphs: each result runs once, in order, and all values add up."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from braid.rpc.protocol.autograd_state import (
    Acknowledge,
    BackwardFailed,
    BackwardFinished,
    ContextState,
    FailBackward,
    Gradients,
    Instruction,
    Release,
    RunBackward,
    Send,
    Ship,
)
from braid.rpc.protocol.reference_messages import Id

CONTEXT = 7


def seeds(fast: int, proof: int) -> object:
    """Run a test with blocks of 100 seeds, since a test of its own for each would cost more."""
    blocks = [range(first, first + 100) for first in range(0, proof, 100)]
    marks = [pytest.mark.proof if block.start >= fast else () for block in blocks]
    return pytest.mark.parametrize(
        "block", [pytest.param(block, marks=own) for block, own in zip(blocks, marks, strict=True)]
    )


@dataclass
class Graph:
    """Edges between processes; each carries a sum of the edges that entered its process before.

    Attributes:
        size: Number of processes.
        ends: First and second process of each edge, in the order in which they were sent.
        inputs: Edges on which an edge depends, or the roots (None), with the number of paths.
    """

    size: int
    ends: dict[int, tuple[int, int]] = field(default_factory=dict)
    inputs: dict[int | None, Counter[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, chance: random.Random, *, is_used: bool) -> Graph:
        """Return a random graph; all its edges are reachable from the roots if it is used."""
        own = cls(chance.randint(2, 5))
        entered: dict[int, list[int]] = {process: [] for process in range(own.size)}
        for edge in range(chance.randint(0, 14)):
            sender, to = chance.randrange(own.size), chance.randrange(own.size)
            own.ends[edge] = sender, to
            own.inputs[edge] = own._choose(chance, entered[sender])
            entered[to].append(edge)
        own.inputs[None] = own._choose(chance, entered[0])
        if is_used:
            own._use_all(entered)
        return own

    @staticmethod
    def _choose(chance: random.Random, edges: list[int]) -> Counter[int]:
        chosen = chance.sample(edges, chance.randint(0, len(edges)))
        return Counter({edge: chance.randint(1, 3) for edge in chosen})

    def _use_all(self, entered: dict[int, list[int]]) -> None:
        """Send from each process what was not used there to the origin, for the roots."""
        for process in range(1, self.size):
            last = 100 + process
            self.ends[last] = process, 0
            used = {edge for own in self.inputs.values() for edge in own}
            self.inputs[last] = Counter(edge for edge in entered[process] if edge not in used)
            entered[0].append(last)
        used = {edge for own in self.inputs.values() for edge in own}
        self.inputs[None].update(edge for edge in entered[0] if edge not in used)

    @property
    def gradients(self) -> dict[int, int]:
        """Gradients of all edges that the roots reach: the number of paths to them."""
        total: Counter[int] = Counter()
        total.update(self.inputs[None])
        for edge in sorted(self.ends, reverse=True):
            for each, paths in self.inputs[edge].items():
                total[each] += paths * total[edge]
        return {edge: paths for edge, paths in total.items() if paths}


class Backward:
    """Processes that run a backward, and the messages between them.

    Args:
        graph: The graph.
        chance: Generator that chooses which message arrives next, and which local backward ends.
    """

    def __init__(self, graph: Graph, chance: random.Random) -> None:
        self.graph = graph
        self.chance = chance
        self.states = [
            ContextState(process, CONTEXT, lambda source: list(graph.inputs[source]))
            for process in range(graph.size)
        ]
        for edge, (sender, to) in graph.ends.items():
            history = self.states[sender].sent(edge, to)
            self.states[to].received(edge, sender, history)
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.packets: list[tuple[int, int, Any]] = []
        self.running: list[tuple[int, int | None, Id]] = []
        self.forget()

    def forget(self) -> None:
        """Count for another backward; what is under way stays."""
        self.ran: list[int | None] = []
        self.received: Counter[int] = Counter()
        self.shipped: dict[int, int] = {}
        self.finished: list[tuple[int, BackwardFinished]] = []
        self.failed: dict[int, str] = {}

    def begin(self, number: int) -> None:
        self.number = Id(0, number)
        self.act(0, self.states[0].begin(self.number))

    def act(self, process: int, instructions: list[Instruction]) -> None:
        for each in instructions:
            match each:
                case Send(to, message):
                    self.packets.append((process, to, message))
                case RunBackward(edge, backward):
                    self.running.append((process, edge, backward))
                case Ship(edge, to, backward, plan, answers):
                    failed = self.states[process].failed
                    message = Gradients(
                        *(CONTEXT, backward, edge, plan, False, b"", []),
                        answers=answers,
                        failed=failed,
                    )
                    self.packets.append((process, to, message))
                    if backward == self.number:
                        assert edge not in self.shipped, "shipped once"
                        assert not process_waits(self, edge), "after all that depends on it"
                        self.shipped[edge] = self.received[edge]
                case BackwardFinished():
                    assert all(number_of(each[2]) != self.number for each in self.packets)
                    assert all(each[2] != self.number for each in self.running)
                    self.finished.append((process, each))
                case FailBackward(backward) if backward not in (None, self.number):
                    pass
                case FailBackward(backward):
                    assert process not in self.failed or backward is None
                    self.failed[process] = self.states[process].failures[backward]

    def step(self) -> bool:
        """Let one message arrive, or one local backward end."""
        if not self.packets and not self.running:
            return False
        place = self.chance.randrange(len(self.packets) + len(self.running))
        if place >= len(self.packets):
            process, source, backward = self.running.pop(place - len(self.packets))
            if backward != self.number:  # of one that has failed
                self.act(process, self.states[process].finished(source, backward))
                return True
            self.ran.append(source)
            paths = 1 if source is None else self.shipped[source]
            for edge, number in self.graph.inputs[source].items():
                self.received[edge] += paths * number
            self.act(process, self.states[process].finished(source, backward))
            return True
        sender, to, message = self.packets.pop(place)
        state = self.states[to]
        match message:
            case Acknowledge():
                self.act(to, state.on_acknowledge(message))
            case BackwardFailed(_, reason, backward):
                self.act(to, state.fail(reason, backward))
            case Gradients():
                self.act(to, state.on_gradients(sender, message))
        return True

    def to_end(self) -> None:
        while self.step():
            pass

    def connected(self, process: int) -> set[int]:
        """Return all processes that a process knows directly or through others."""
        known, more = {process}, [process]
        while more:
            for each in self.states[more.pop()].known - known:
                known.add(each)
                more.append(each)
        return known


def number_of(message: Any) -> Id | None:
    """Return the backward to which a message belongs; None for news of a failure."""
    return None if isinstance(message, BackwardFailed) else message.backward


def process_waits(run: Backward, edge: int) -> bool:
    """Return whether something that the roots reach, and that depends on an edge, has not run."""
    reached = {None, *run.graph.gradients}
    return any(
        edge in inputs and source in reached and source not in run.ran
        for source, inputs in run.graph.inputs.items()
    )


def check_complete(run: Backward) -> None:
    gradients = run.graph.gradients
    assert run.finished == [(0, BackwardFinished())]
    assert Counter(run.ran) == Counter([None, *gradients])
    assert run.shipped == gradients
    assert run.failed == {}


@seeds(200, 5000)
def test_each_result_that_the_roots_use_gets_its_gradients_once(block):
    for seed in block:
        chance = random.Random(seed)
        run = Backward(Graph.of(chance, is_used=False), chance)
        for number in range(2):
            run.clear()
            run.begin(number)
            run.to_end()
            check_complete(run)


@seeds(200, 5000)
def test_a_failure_reaches_all_and_leaves_none_hanging(block):
    for seed in block:
        chance = random.Random(seed)
        run = Backward(Graph.of(chance, is_used=bool(seed % 2)), chance)
        run.begin(0)
        for _ in range(chance.randrange(30)):
            run.step()
        if run.finished:
            continue
        process = chance.randrange(run.graph.size)
        everybody = run.connected(process)
        if chance.random() < 0.5 or run.graph.size == 2:
            run.act(process, run.states[process].fail("a reason", run.number))
        else:  # a process dies, and all that know it learn of it
            run.packets = [each for each in run.packets if process not in each[:2]]
            run.running = [each for each in run.running if each[0] != process]
            everybody = {each for each in everybody if process in run.states[each].known}
            everybody.discard(process)
            for each in range(run.graph.size):
                if each != process:
                    run.act(each, run.states[each].lost(process, "a reason"))
            run.packets = [each for each in run.packets if each[1] != process]
        run.to_end()
        assert everybody <= set(run.failed)
        assert set(run.failed.values()) <= {"a reason"}


@seeds(200, 5000)
def test_a_backward_after_a_failed_one_is_complete(block):
    for seed in block:
        chance = random.Random(seed)
        run = Backward(Graph.of(chance, is_used=True), chance)
        run.begin(0)
        for _ in range(chance.randrange(30)):
            run.step()
        if run.finished:
            continue
        process = chance.choice(sorted(run.connected(0)))
        run.act(process, run.states[process].fail("a reason", run.number))
        while 0 not in run.failed:
            run.step()
        run.forget()  # messages of the first one are still on their way
        run.begin(1)
        run.to_end()
        check_complete(run)
        assert all(None not in each.failures for each in run.states)


def test_answers_go_with_gradients_to_the_same_process():
    """The process 0 calls 1 twice, the second time with the first result."""
    run = Backward(
        Graph(2, {0: (1, 0), 1: (0, 1), 2: (1, 0)}, {None: {2: 1}, 0: {}, 1: {0: 1}, 2: {1: 1}}),
        random.Random(0),
    )
    run.begin(0)
    sent = []
    while run.packets or run.running:
        sent += [type(message).__name__ for _, _, message in run.packets]
        run.step()
    assert sent == ["Gradients", "Gradients", "Gradients", "Acknowledge"]
    check_complete(run)


def test_a_history_of_a_chain_of_calls_has_a_span_for_each_process():
    chain = {edge: (edge % 2, 1 - edge % 2) for edge in range(100)}
    inputs = {edge: {edge - 1: 1} for edge in range(1, 100)}
    run = Backward(Graph(2, chain, {None: {99: 1}, 0: {}, **inputs}), random.Random(0))
    run.begin(0)
    run.to_end()
    check_complete(run)
    assert run.states[0]._histories[99] == [(0, 98)]


def test_an_origin_ends_a_context_on_all_that_it_knows():
    state = ContextState(0, CONTEXT, lambda _: [])
    state.met(0)
    state.met(2)
    state.sent(1, 1)
    assert state.release() == [Send(1, Release(CONTEXT)), Send(2, Release(CONTEXT))]
    assert state.release(sender=1) == [Send(2, Release(CONTEXT))]
