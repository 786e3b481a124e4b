"""Pictures of the pages on remote calls.

They are drawn from messages of real nodes, the state machine of references, torch's own graph, and
the numbers that `examples/44_serving.py` has recorded. `handbook_backwards` draws backwards.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from braid import rpc
from braid.programs.schedule.bars import COLOURS, Bar, draw
from braid.rpc import dist_autograd
from braid.rpc.autograd.graph import Receive
from braid.rpc.messages import Call, CallReply, Raised
from braid.rpc.protocol.reference_messages import Id
from handbook_servers import GREY, _line, _svg, _text
from references_simulation import Packet, World
from rpc_nodes import first_of

SERVING = Path(__file__).resolve().parent.parent / "docs" / "handbook" / "serving.json"
PAPER = ' paint-order="stroke" stroke="white" stroke-width="4"'


class Row(NamedTuple):
    """A message in a ladder: the time grows downward.

    Attributes:
        sender: Place of its sender.
        receiver: Place of its receiver.
        text: Label.
        kind: Name of its colour.
        note: Text beside it.
    """

    sender: int
    receiver: int
    text: str
    kind: str
    note: str = ""


def heads_of(kinds: Mapping[str, str], prefix: str) -> list[str]:
    """Return the heads of arrows, one for each colour."""
    return [
        "<defs>",
        *(
            f'<marker id="{prefix}{kind}" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" '
            f'markerHeight="6" orient="auto"><path d="M0 0L6 3L0 6z" fill="{colour}"/></marker>'
            for kind, colour in kinds.items()
        ),
        "</defs>",
    ]


def arrow(path: str, kind: str, colours: Mapping[str, str], prefix: str, more: str = "") -> str:
    return (
        f'<path d="{path}" stroke="{colours[kind]}" stroke-width="1.6" fill="none"{more} '
        f'marker-end="url(#{prefix}{kind})"/>'
    )


def _ladder(names: Sequence[str], rows: Sequence[Row], kinds: Mapping[str, str]) -> str:
    """Draw messages one below the other."""
    wide, high, left, top = 500 // (len(names) - 1), 32, 90, 34
    bottom = top + high * len(rows) + 10
    parts = heads_of(kinds, "l")
    for place, name in enumerate(names):
        x = left + wide * place
        parts.append(_text(x, top - 16, name, "middle"))
        parts.append(_line(f"M{x} {top - 8}V{bottom}", "#bbbbbb"))
    notes_at = left + wide * (len(names) - 1) + 16
    for number, row in enumerate(rows):
        y = top + high * number + 18
        x0, x1 = left + wide * row.sender, left + wide * row.receiver
        parts.append(arrow(f"M{x0} {y - 6}L{x1} {y + 6}", row.kind, kinds, "l"))
        middle = _text((x0 + x1) / 2, y - 8, row.text, "middle")
        parts.append(middle.replace("<text", f"<text{PAPER}"))
        if row.note:
            parts.append(_text(notes_at, y + 6, row.note, fill="#666666"))
    return _svg(notes_at + 190, bottom + 10, parts)


# -- a call


def a_call() -> str:
    """Messages of two nodes, one call after the other."""
    rows: list[Row] = []
    with first_of(2) as agents:
        for place, agent in enumerate(agents):
            agent.peers.send = _recorded(place, agent.peers.send, rows)

        def ended(note: str, first: int) -> int:
            """Put a note beside the first of the messages that belong together."""
            _until(
                lambda: (
                    all(each.references.state.is_quiet for each in agents)
                    and not any(each.contexts.numbers for each in agents)
                )
            )
            rows[first:] = sorted(rows[first:], key=lambda row: row.kind == "other")
            rows[first] = rows[first]._replace(note=note)
            return len(rows)

        x = torch.arange(4.0)
        rpc.rpc_sync("w1", torch.add, (x, 2))
        count = ended("rpc_sync", 0)
        with contextlib.suppress(RuntimeError):
            rpc.rpc_sync("w1", torch.dot, (x, x[:2]))
        count = ended("an exception", count)
        made = rpc.remote("w1", torch.mul, (x, x))
        count = ended("remote: the result stays", count)
        made.to_here()
        count = ended("to_here", count)
        with dist_autograd.context():
            rpc.rpc_sync("w1", torch.neg, (x.requires_grad_(),))
        count = ended("inside a context, which ends", count)
        del made
        agents[0].references.collect()
        ended("the last handle goes", count)
    colours = {
        "Call": COLOURS[0],
        "CallReply": COLOURS[2],
        "Raised": COLOURS[1],
        "other": COLOURS[4],
    }
    return _ladder(["caller", "callee"], rows, colours)


def _recorded(place: int, send: Callable[..., None], rows: list[Row]) -> Callable[..., None]:
    def record(to: int, message: Any, *args: Any, **options: Any) -> None:
        name, *text = type(message).__name__, ""
        if isinstance(message, Call | CallReply):
            text = [str(each) for each in message.body.specs]
            text += ["edge"] * (message.edge is not None and message.edge.number >= 0)
        if isinstance(message, Call):
            text = [message.function.removeprefix("braid.rpc."), *text]
        kind = name if isinstance(message, Call | CallReply | Raised) else "other"
        rows.append(Row(place, to, f"{name} {', '.join(text)}".strip(), kind))
        send(to, message, *args, **options)

    return record


def _until(is_over: Callable[[], bool]) -> None:
    for _ in range(2000):
        if is_over():
            return
        threading.Event().wait(0.005)
    msg = "it does not come"
    raise AssertionError(msg)


# -- references


class _Recorded(World):
    """A world whose messages are recorded in the order in which they arrive."""

    def run(self, rows: list[Row], note: str = "") -> None:
        """Let all messages arrive."""
        first = True
        while self.packets:
            packet = self.packets[0]
            rows.append(_row(packet, note if first else ""))
            first = False
            self.deliver(0)
            owned = self.states[1].num_forks
            before = rows[-1].note
            rows[-1] = rows[-1]._replace(note=f"forks: {owned}{'  ' + before if before else ''}")


KINDS = {"call": COLOURS[0], "fork": COLOURS[4], "confirm": COLOURS[2], "delete": COLOURS[1]}
KIND_OF = {
    "create": "call",
    "created": "call",
    "pass": "call",
    "Fork": "fork",
    "Forked": "fork",
    "Confirmed": "confirm",
    "Noted": "confirm",
    "UserDelete": "delete",
    "Deleted": "delete",
}
CALLS = {
    "create": "call that makes the value",
    "created": "its answer",
    "pass": "call, with a fork",
}


def _row(packet: Packet, note: str) -> Row:
    name = packet.kind if packet.message is None else type(packet.message).__name__
    return Row(packet.sender, packet.to, CALLS.get(name, name), KIND_OF[name], note)


def references() -> str:
    """A value of one process, whose reference passes from a second one to a third."""
    world, rows = _Recorded(3, fifo=True), []
    first = world.new_remote(0, 1)
    world.run(rows, "made")
    second = world.share(first, 2)
    world.release(first)  # at once: it stays until its child is confirmed
    world.run(rows, "passed on, and let go")
    world.release(second)
    world.run(rows, "let go there")
    assert world.leaks() == []
    assert len(world.dropped) == 1
    return _ladder(["user", "owner", "other user"], rows, KINDS)


# -- the graph of a context


WIDTH = 800  # pixels of a graph


class GraphPart(NamedTuple):
    """A function of a graph: its process or stage, its text, and the functions that it needs."""

    process: int
    text: str
    inputs: tuple[int, ...]


def a_context() -> str:
    """The graph of a forward in two processes, as torch and the context have it."""
    with first_of(2) as agents, dist_autograd.context() as context:
        x, w = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        hidden = torch.tanh(x * w)
        loss = (rpc.rpc_sync("w1", torch.exp, (hidden,)) * w).sum()
        own = [each.contexts.get(context) for each in agents]
        nodes = _nodes(loss, own, {id(x): "x", id(w): "w"})
    return graph_picture(nodes, ["process 0", "process 1"])


def _nodes(
    root: torch.Tensor, contexts: Sequence[Any], leaves: Mapping[int, str]
) -> list[GraphPart]:
    """Walk the functions of all processes; a receive needs the send at its other end."""
    nodes: list[GraphPart] = []
    places: dict[Any, int] = {}
    sends = {edge: (n, own.sends[edge]) for n, own in enumerate(contexts) for edge in own.sends}
    order = {edge: number for number, edge in enumerate(sends)}

    def add(key: Any, process: int, text: str, inputs: Callable[[], list[int]]) -> int:
        if key not in places:
            needed = tuple(inputs())
            places[key] = len(nodes)
            nodes.append(GraphPart(process, text, needed))
        return places[key]

    def function(process: int, each: Any) -> int:
        receive = getattr(each, "receive", None)
        variable = getattr(each, "variable", None)
        if isinstance(receive, Receive):
            edge = receive.edge
            return add(each, process, f"receive {order[edge]}", lambda: [send(edge)])
        if variable is not None:
            return add(id(variable), process, leaves[id(variable)], list)
        text = each.name().removesuffix("0").removesuffix("Backward").lower()
        needed = [f for f, _ in each.next_functions if f is not None]
        return add(each, process, text, lambda: [function(process, f) for f in needed])

    def send(edge: Id) -> int:
        process, tensors = sends[edge]

        def inputs() -> list[int]:
            return [
                function(process, each.grad_fn)
                if each.grad_fn is not None
                else add(id(each), process, leaves[id(each)], list)
                for each in tensors
            ]

        return add(edge, process, f"send {order[edge]}", inputs)

    last = function(0, root.grad_fn)
    nodes.append(GraphPart(0, "loss", (last,)))
    return nodes


def graph_picture(nodes: Sequence[GraphPart], names: Sequence[str]) -> str:
    """Draw functions from left to right, a band for each process or stage."""
    high, left, top = 52, 90, 14
    columns: list[int] = []
    rows: list[int] = []
    used: dict[tuple[int, int], int] = {}
    for node in nodes:
        column = max((columns[each] + 1 for each in node.inputs), default=0)
        columns.append(column)
        rows.append(used.get((node.process, column), 0))
        used[node.process, column] = rows[-1] + 1
    for place, node in enumerate(nodes):  # what needs nothing stands beside what needs it
        users = [columns[n] for n, other in enumerate(nodes) if place in other.inputs]
        if not node.inputs and min(users) > 1 and not used.get((node.process, min(users) - 1)):
            columns[place] = min(users) - 1
    wide = min(150, (WIDTH - left - 10) // (max(columns) + 1))
    box = wide - 14
    tall = [1 + max(r for r, n in zip(rows, nodes, strict=True) if n.process == p) for p in (0, 1)]
    tops = [top, top + high * tall[0] + 24]
    parts = heads_of({"inside": "#777777", "between": COLOURS[1]}, "g")
    for name, y, count in zip(names, tops, tall, strict=True):
        across = wide * (max(columns) + 1) + 10
        parts.append(
            f'<rect x="80" y="{y - 12}" width="{across}" height="{high * count}" fill="#f4f4f4"/>'
        )
        parts.append(_text(4, y + high * count / 2 - 6, name))

    def at(place: int) -> tuple[float, float]:
        return left + wide * columns[place], tops[nodes[place].process] + high * rows[place]

    for place, node in enumerate(nodes):
        x, y = at(place)
        for each in node.inputs:
            x0, y0 = at(each)
            kind = "inside" if nodes[each].process == node.process else "between"
            colours = {"inside": "#777777", "between": COLOURS[1]}
            if kind == "inside" and columns[place] > columns[each] + 1:
                middle = x + box / 2
                path = f"M{x0 + box} {y0 + 14}H{x - 10}Q{middle} {y0 + 14} {middle} {y + 28}"
            elif kind == "inside":
                path = f"M{x0 + box} {y0 + 14}L{x} {y + 14}"
            else:  # down or up
                edge = (28, 0) if y > y0 else (0, 28)
                path = f"M{x0 + box / 2} {y0 + edge[0]}L{x + box / 2} {y + edge[1]}"
            parts.append(arrow(path, kind, colours, "g"))
    for place, node in enumerate(nodes):
        x, y = at(place)
        is_seam = node.text.startswith(("send", "receive"))
        is_leaf = not node.inputs
        fill = COLOURS[1] if is_seam else COLOURS[2] if is_leaf else "white"
        colour = "white" if is_seam or is_leaf else "black"
        parts.append(
            f'<rect x="{x}" y="{y}" width="{box}" height="28" rx="5" fill="{fill}" '
            f'stroke="#777777"/>'
        )
        text = _text(x + box / 2, y + 18, node.text, "middle", colour)
        small = ' font-size="10"' if 7 * len(node.text) > box else ""
        parts.append(text.replace("<text", f"<text{small}"))
    return _svg(left + wide * (max(columns) + 1) + 10, tops[1] + high * tall[1], parts)


# -- optimizers compared

MODEL_BYTES = 4  # of a parameter, whose gradient has as many, and Adam's states twice as many


def optimizers_compared() -> str:
    """Bytes of gradients and states on the busiest rank, and what it sends in a step."""
    ranks = [1 << k for k in range(1, 7)]
    ways: dict[str, tuple[Callable[[int], float], Callable[[int], float]]] = {
        "DDP, Horovod": (lambda _: 4.0, lambda n: 2 * (n - 1) / n),
        "ZeRO-1": (lambda n: 2 + 2 / n, lambda n: 2 * (n - 1) / n),
        "ZeRO-3": (lambda n: 4 / n, lambda n: 3 * (n - 1) / n),
        "server of n trainers": (lambda _: 4.0, float),
    }
    wide, high, left, top, gap = 270, 190, 60, 50, 80
    parts = []
    for panel, title in enumerate(("memory, in P", "bytes sent in a step, in P")):
        x0 = left + panel * (wide + gap)
        most = 6.0
        parts.append(_text(x0, top - 10, title))
        for k in range(7):
            y = top + high * (1 - k / most)
            parts.append(_line(f"M{x0} {y:.1f}h{wide}", GREY))
            parts.append(_text(x0 - 6, y + 4, str(k), "end"))
        for place, n in enumerate(ranks):
            x = x0 + wide * place / (len(ranks) - 1)
            parts.append(_text(x, top + high + 16, str(n), "middle"))
        for colour, (name, formulas) in zip(COLOURS, ways.items(), strict=False):
            points = [
                f"{x0 + wide * place / (len(ranks) - 1):.1f} "
                f"{top + high * (1 - formulas[panel](n) / most):.1f}"
                for place, n in enumerate(ranks)
                if formulas[panel](n) <= most
            ]
            dash = "" if name.startswith("DDP") else ' stroke-dasharray="7 5"'  # lines may coincide
            more = f' stroke-width="2.5"{dash}><title>{name}</title></path'
            parts.append(_line(f"M{'L'.join(points)}", colour, more).replace("/>", ">"))
        parts.append(_text(x0 + wide, top + high + 34, "ranks", "end"))
    for place, (colour, name) in enumerate(zip(COLOURS, ways, strict=False)):
        x = left + 165 * place
        parts.append(f'<rect x="{x}" y="6" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(x + 16, 16, name))
    return _svg(left + 2 * wide + gap + 20, top + high + 44, parts)


# -- serving


def serving_measured() -> str:
    """Requests a second over the size of batches, from recorded numbers."""
    rates = json.loads(SERVING.read_text())
    most = max(rates.values())
    bars = [
        Bar(place, 0.0, rate, COLOURS[0], f"{rate} requests/s", f"{rate} requests/s")
        for place, rate in enumerate(rates.values())
    ]
    return draw([f"batches of up to {size}" for size in rates], bars, most, axis=False)


CALL_PICTURES = (
    a_call,
    references,
    a_context,
    optimizers_compared,
    serving_measured,
)
