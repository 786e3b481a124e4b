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
    Mark,
    Mode,
    RunBackward,
    Send,
    Ship,
)
from braid.rpc.protocol.reference_messages import Id
from handbook_calls import arrow, heads_of
from handbook_servers import LOST, _line, _svg, _text

Ends = dict[Id, tuple[int, int]]
Inputs = dict["Id | None", list[Id]]
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
    ran: list[tuple[int, int, Id | None]] = field(default_factory=list)
    waits: list[tuple[int, int, Id, int]] = field(default_factory=list)
    finished: BackwardFinished | None = None
    now: int = 0

    def run(self, mode: Mode) -> int:
        """Run a backward of process 0; return the time of its end."""
        size = 1 + max(itertools.chain(*self.ends.values()))
        reach = lambda source: list(self.inputs[source])  # noqa: E731
        self.states = [ContextState(process, 1, reach) for process in range(size)]
        for edge, (sender, to) in self.ends.items():
            self.states[sender].sent(edge, to)
            self.states[to].received(edge, sender)
        self.mode, self.number = mode, Id(0, 100)
        self.events: list[tuple[int, int, Callable[[], None]]] = []
        self.counts = itertools.count()
        self.busy = [0] * size
        self._act(0, self.states[0].begin(self.number, mode))
        while self.events:
            self.now, _, event = heapq.heappop(self.events)
            event()
        return self.now

    def _later(self, after: int, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + after, next(self.counts), event))

    def _act(self, process: int, instructions: Sequence[Any]) -> None:
        for each in instructions:
            match each:
                case Send(to, message):
                    self._send(process, to, message)
                case Ship(edge, to):
                    self._send(process, to, edge)
                case RunBackward(edge):
                    begin = max(self.now, self.busy[process])
                    self.busy[process] = begin + LOCAL
                    self.ran.append((begin, process, edge))
                    ended = lambda edge=edge: self._ended(process, edge)  # noqa: E731
                    self._later(self.busy[process] - self.now, ended)
                case BackwardFinished():
                    self.finished = each
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
        kind = "Gradients" if isinstance(message, Id) else type(message).__name__
        self.sent.append((self.now, process, to, kind))
        self._later(TRIP, lambda: self._arrived(process, to, message))

    def _arrived(self, sender: int, to: int, message: Any) -> None:
        state = self.states[to]
        match message:
            case Mark():
                self._act(to, state.on_mark(sender, message))
            case Acknowledge():
                self._act(to, state.on_acknowledge(message))
            case _:
                self._act(to, state.on_gradients(sender, self.number, message, self.mode))


WAVES = {"Mark": COLOURS[4], "Gradients": COLOURS[1], "Acknowledge": "#999999"}
UNUSED_CALL: tuple[Ends, Inputs] = (
    {
        Id(0, 0): (0, 1),
        Id(1, 1): (1, 2),
        Id(2, 2): (2, 1),
        Id(1, 3): (1, 0),
        Id(0, 4): (0, 2),
        Id(2, 5): (2, 0),  # a call of the origin whose result is not used
    },
    {
        None: [Id(1, 3)],
        Id(1, 3): [Id(0, 0), Id(2, 2)],
        Id(2, 2): [Id(1, 1)],
        Id(1, 1): [Id(0, 0)],
        Id(0, 0): [],
        Id(2, 5): [Id(0, 4)],
        Id(0, 4): [],
    },
)


def fast_and_smart() -> str:
    """The messages of one backward in both modes, on a graph that has an unused result."""
    parts = heads_of(WAVES, "w")
    for place, kind in enumerate(WAVES):
        parts.append(_line(f"M{90 + 130 * place} 12h22", WAVES[kind], ' stroke-width="2.5"'))
        parts.append(_text(117 + 130 * place, 16, kind))
    parts.append(
        f'<rect x="480" y="4" width="22" height="14" rx="3" fill="{COLOURS[0]}"/>'
        + _text(508, 16, "a local backward")
    )
    bottom = 30
    for mode, title in (
        ("smart", "SMART: marks find out what the roots depend on"),
        ("fast", "FAST: every send counts on a gradient"),
    ):
        run = _Backwards(*UNUSED_CALL)
        end = run.run(mode)
        assert run.finished is not None
        pending = run.finished.pending
        waiting = ", ".join(
            f"{'abc'[p]} still waits for {len(e)} receive" for p, e in pending.items()
        )
        parts += _waves(run, title, end, 22, bottom, waiting)
        bottom += 200
    return _svg(790, bottom, parts)


def _waves(
    run: _Backwards, title: str, end: int, longest: int, top: float, waiting: str
) -> list[str]:
    left, lane, unit = 90, 52, 640 / longest
    names = ["a, the origin", "b", "c"]
    parts = [_text(left, top + 14, title)]
    top += 40

    def x(at: float) -> float:
        return left + unit * at

    for place, name in enumerate(names):
        y = top + lane * place
        parts.append(_line(f"M{left} {y}H{x(longest):.1f}", "#dddddd"))
        parts.append(_text(left - 8, y + 4, name, "end"))
    for at, process, source in run.ran:
        y = top + lane * process
        title = "roots" if source is None else f"send {source.number}"
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
    parts.append(_line(f"M{x(end):.1f} {top - 14}V{top + 2 * lane + 14}", LOST))
    text = "over" if not waiting else f"over, but incomplete: {waiting}"
    parts.append(_text(x(end) + 5, top + 2 * lane + 26, text, "end", LOST))
    return parts


THROUGH: tuple[Ends, Inputs] = (  # of examples/42_engine.py
    {
        Id(0, 0): (0, 1),
        Id(1, 1): (1, 2),
        Id(2, 2): (2, 1),
        Id(1, 3): (1, 2),
        Id(2, 4): (2, 1),
        Id(1, 5): (1, 0),
        Id(0, 6): (0, 1),
        Id(1, 7): (1, 0),
    },
    {
        None: [Id(1, 7)],
        Id(1, 7): [Id(2, 4), Id(0, 6)],
        Id(0, 6): [Id(1, 5)],
        Id(1, 5): [Id(0, 0)],
        Id(2, 4): [Id(1, 3)],
        Id(1, 3): [Id(0, 0), Id(2, 2)],
        Id(2, 2): [Id(1, 1)],
        Id(1, 1): [Id(0, 0)],
        Id(0, 0): [],
    },
)


def local_backwards() -> str:
    """Local backwards of three processes, and the receives of one that wait for its sends."""
    run = _Backwards(*THROUGH)
    end = run.run("fast")
    assert run.finished == BackwardFinished({})
    left, lane, top = 150, 44, 24
    unit = 620 / end
    parts = heads_of(WAVES, "b")
    for place, name in enumerate("abc"):
        y = top + lane * place
        parts.append(_line(f"M{left} {y}h{unit * end:.1f}", "#dddddd"))
        parts.append(_text(left - 8, y + 4, f"{name} runs", "end"))
    for at, process, source in run.ran:
        x, y = left + unit * at, top + lane * process
        name = "roots" if source is None else f"send {source.number}"
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
    for edge in sorted({e for _, p, e, _ in run.waits if p == 1}, key=lambda e: e.number):
        counts = [(at, n) for at, process, each, n in run.waits if (process, each) == (1, edge)]
        name = f"receive {edge.number} of b waits"
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


BACKWARDS = (fast_and_smart, local_backwards)
