"""Pictures of distributed backwards: the state machine of contexts, with a clock of whole numbers."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from braid.programs.schedule.bars import COLOURS
from braid.rpc.protocol.autograd_state import (
    Acknowledge,
    BackwardFinished,
    ContextState,
    Gradients,
    RunBackward,
    Send,
    Ship,
    Span,
)
from braid.rpc.protocol.reference_messages import Id
from handbook_calls import arrow, heads_of
from handbook_servers import LOST, _line, _svg, _text

Ends = dict[int, tuple[int, int]]
Inputs = dict["int | None", list[int]]
TRIP, LOCAL = 1, 2  # time of a message, and of a local backward


@dataclass
class _Backwards:
    """Processes that run a backward, with a clock of whole numbers.

    Attributes:
        ends: First and second process of each edge.
        inputs: Edges on which an edge, or the roots (None), depend inside of a process.
        sent: Messages: time, sender, receiver, kind.
        ran: Local backwards: time, process, source.
        waits: Sources for which receives wait: time, process, receive, number of sources.
    """

    ends: Ends
    inputs: Inputs
    sent: list[tuple[int, int, int, str]] = field(default_factory=list)
    ran: list[tuple[int, int, int | None]] = field(default_factory=list)
    waits: list[tuple[int, int, int, int]] = field(default_factory=list)
    now: int = 0

    def run(self) -> int:
        """Run a backward of process 0; return the time of its end."""
        size = 1 + max(itertools.chain(*self.ends.values()))
        reach = lambda source: list(self.inputs[source])  # noqa: E731
        self.states = [ContextState(process, 1, reach) for process in range(size)]
        self.histories: dict[int, list[Span]] = {}
        for edge, (sender, to) in self.ends.items():
            history = self.histories[edge] = self.states[sender].sent(edge, to)
            self.states[to].received(edge, sender, history)
        self.number = Id(0, 100)
        self.events: list[tuple[int, int, Callable[[], None]]] = []
        self.counts = itertools.count()
        self.busy = [0] * size
        self._act(0, self.states[0].begin(self.number))
        while self.events:
            self.now, _, event = heapq.heappop(self.events)
            event()
        return self.end

    def _later(self, after: int, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + after, next(self.counts), event))

    def _act(self, process: int, instructions: Sequence[Any]) -> None:
        for each in instructions:
            match each:
                case Send(to, message):
                    self._send(process, to, message)
                case Ship(edge, to, backward, plan, answers):
                    self.plan = plan
                    rest = (plan, False, b"", [], [], answers)
                    self._send(process, to, Gradients(1, backward, edge, *rest))
                case RunBackward(edge):
                    begin = max(self.now, self.busy[process])
                    self.busy[process] = begin + LOCAL
                    self.ran.append((begin, process, edge))
                    ended = lambda edge=edge: self._ended(process, edge)  # noqa: E731
                    self._later(self.busy[process] - self.now, ended)
                case BackwardFinished():
                    self.end = self.now
        own = self.states[process]._backward
        for edge, sources in own.waits.items() if own else ():
            known = [n for _, p, e, n in self.waits if (p, e) == (process, edge)]
            if known[-1:] != [len(sources)]:
                self.waits.append((self.now, process, edge, len(sources)))

    def _ended(self, process: int, source: Id | None) -> None:
        own = self.states[process]._backward
        last = [e for e, sources in own.waits.items() if sources == {source}] if own else []
        self.waits += [(self.now, process, edge, 0) for edge in last]
        self._act(process, self.states[process].finished(source, self.number))

    def _send(self, process: int, to: int, message: Any) -> None:
        self.sent.append((self.now, process, to, type(message).__name__))
        self._later(TRIP, lambda: self._arrived(process, to, message))

    def _arrived(self, sender: int, to: int, message: Any) -> None:
        state = self.states[to]
        match message:
            case Acknowledge():
                self._act(to, state.on_acknowledge(message))
            case Gradients():
                self._act(to, state.on_gradients(sender, message))


WAVES = {"Gradients": COLOURS[1], "Acknowledge": "#999999"}
UNUSED_CALL: tuple[Ends, Inputs] = (
    {
        0: (0, 1),
        1: (1, 2),
        2: (2, 1),
        3: (1, 0),
        4: (0, 2),
        5: (2, 0),  # a call of the origin whose result is not used
    },
    {
        None: [3],
        3: [0, 2],
        2: [1],
        1: [0],
        0: [],
        5: [4],
        4: [],
    },
)


def histories() -> str:
    """The histories of a forward with an unused result, and the messages of its backward."""
    run = _Backwards(*UNUSED_CALL)
    end = run.run()
    left, lane, unit, top = 90, 52, 640 / 16, 116
    parts = heads_of(WAVES, "w")
    sends = [f"send {edge} has {_spans(history)}" for edge, history in run.histories.items()]
    parts.append(_text(left, 14, f"Histories: {', '.join(sends)}"))
    parts.append(_text(left, 36, f"Plan of the roots: {_spans(run.plan)}"))
    for place, kind in enumerate(WAVES):
        parts.append(_line(f"M{left + 130 * place} 66h22", WAVES[kind], ' stroke-width="2.5"'))
        parts.append(_text(left + 27 + 130 * place, 70, kind))
    parts.append(
        f'<rect x="{left + 260}" y="58" width="22" height="14" rx="3" fill="{COLOURS[0]}"/>'
        + _text(left + 288, 70, "a local backward")
    )

    def x(at: float) -> float:
        return left + unit * at

    for place, name in enumerate(["a, the origin", "b", "c"]):
        y = top + lane * place
        parts.append(_line(f"M{left} {y}H{x(16):.1f}", "#dddddd"))
        parts.append(_text(left - 8, y + 4, name, "end"))
    for at, process, source in run.ran:
        y = top + lane * process
        title = "roots" if source is None else f"send {source}"
        parts.append(
            f'<rect x="{x(at):.1f}" y="{y - 8}" width="{unit * LOCAL:.1f}" height="16" rx="3" '
            f'fill="{COLOURS[0]}"/>'
        )
        parts.append(_text(x(at + LOCAL / 2), y + 4, title, "middle", "white"))
    beside: dict[tuple[int, int], int] = {}
    for at, sender, to, kind in run.sent:
        shift = 4 * beside.setdefault((at, sender), 0)
        beside[at, sender] += 1
        y0, y1 = top + lane * sender, top + lane * to
        dash = ' stroke-dasharray="4 3"' if kind == "Acknowledge" else ""
        path = f"M{x(at) + shift:.1f} {y0}L{x(at + TRIP) + shift:.1f} {y1}"
        parts.append(arrow(path, kind, WAVES, "w", dash))
    bottom = top + 2 * lane + 14
    parts.append(_line(f"M{x(end):.1f} {top - 14}V{bottom}", LOST))
    parts.append(_text(x(end) + 5, bottom + 12, "over", "end", LOST))
    return _svg(790, bottom + 24, parts)


def _spans(spans: Sequence[Span]) -> str:
    names = [str(first) if first == last else f"{first} to {last}" for first, last in spans]
    return " and ".join(names) or "none"


THROUGH: tuple[Ends, Inputs] = (  # of examples/42_engine.py
    {
        0: (0, 1),
        1: (1, 2),
        2: (2, 1),
        3: (1, 2),
        4: (2, 1),
        5: (1, 0),
        6: (0, 1),
        7: (1, 0),
    },
    {
        None: [7],
        7: [4, 6],
        6: [5],
        5: [0],
        4: [3],
        3: [0, 2],
        2: [1],
        1: [0],
        0: [],
    },
)


def local_backwards() -> str:
    """Local backwards of three processes, and the receives of one that wait for its sends."""
    run = _Backwards(*THROUGH)
    end = run.run()
    left, lane, top = 150, 44, 24
    unit = 620 / end
    parts = heads_of(WAVES, "b")
    for place, name in enumerate("abc"):
        y = top + lane * place
        parts.append(_line(f"M{left} {y}h{unit * end:.1f}", "#dddddd"))
        parts.append(_text(left - 8, y + 4, f"{name} runs", "end"))
    for at, process, source in run.ran:
        x, y = left + unit * at, top + lane * process
        name = "roots" if source is None else f"send {source}"
        parts.append(
            f'<rect x="{x:.1f}" y="{y - 9}" width="{unit * LOCAL - 1:.1f}" height="18" rx="3" '
            f'fill="{COLOURS[0]}"/>'
        )
        parts.append(_text(x + unit * LOCAL / 2, y + 4, name, "middle", "white"))
    for at, sender, to, kind in run.sent:
        if kind == "Gradients":
            path = f"M{left + unit * at:.1f} {top + lane * sender}"
            path += f"L{left + unit * (at + TRIP):.1f} {top + lane * to}"
            parts.append(arrow(path, kind, WAVES, "b"))
    y = top + 3 * lane
    for edge in sorted({e for _, p, e, _ in run.waits if p == 1}):
        counts = [(at, n) for at, process, each, n in run.waits if (process, each) == (1, edge)]
        name = f"receive {edge} of b waits"
        parts.append(_text(left - 8, y + 4, name, "end"))
        for (at, n), (until, _) in itertools.pairwise([*counts, (end, 0)]):
            if n:
                x = left + unit * at
                parts.append(
                    f'<rect x="{x:.1f}" y="{y - 9}" width="{unit * (until - at) - 1:.1f}" '
                    f'height="18" fill="{COLOURS[4]}" opacity="{0.3 + 0.2 * n:.1f}"/>'
                )
                parts.append(_text(x + 6, y + 4, str(n)))
        y += 26
    return _svg(left + 640, y, parts)


BACKWARDS = (histories, local_backwards)
