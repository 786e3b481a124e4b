"""Pictures of the pages on the parameter server.

They are drawn from its directory, the queue of a van, real nodes in a simulated network, and the
numbers that `examples/35_staleness.py` has recorded.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from braid.programs.schedule.bars import COLOURS, Bar, draw
from braid.ps import BSP, Options
from braid.ps.kv import SERVER_GROUP, WORKER_GROUP, SimpleApp, SimpleData, by_hash, by_range
from braid.ps.protocol.directory import Directory
from braid.runtime.message import VanConfig
from braid.runtime.message.protocol.heads import Beat, Open, unpack
from braid.runtime.message.protocol.send_queue import Outbox, Outgoing
from kv_nodes import Simulation as KVSimulation
from ps_simulation import Simulation
from support.message_faults import Faults

TEXT = 'font-family="sans-serif" font-size="12"'
STALENESS = Path(__file__).resolve().parent.parent / "docs" / "handbook" / "staleness.json"
LATENCY_S = 5e-4  # of the simulated network
GREY, LOST = "#dddddd", "#aa0000"
HEAD_COLOUR = COLOURS[2]


def _svg(wide: float, high: float, parts: Sequence[str]) -> str:
    size = f'width="{wide:g}" height="{high:g}"'
    return "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" {size} {TEXT}>', *parts, "</svg>", ""]
    )


def _text(x: float, y: float, text: str, anchor: str = "start", fill: str = "black") -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}"'
    return f"<text {where}>{escape(text)}</text>"


def _line(path: str, colour: str, more: str = "") -> str:
    return f'<path d="{path}" stroke="{colour}" fill="none"{more}/>'


# -- bytes of a step

WORKERS = 16


def bytes_of_servers() -> str:
    """Bytes that pass through the busiest link in a step, over the number of servers."""
    wide, high, left, top = 560, 220, 60, 20
    counts = [1 << k for k in range(6)]
    lines = {
        "a server": [2 * WORKERS / servers for servers in counts],
        "a worker": [2.0 for _ in counts],
        "a rank of an all-reduce": [4 * (WORKERS - 1) / WORKERS for _ in counts],
    }

    def x(servers: float) -> float:
        return left + wide * math.log2(servers) / math.log2(counts[-1])

    def y(value: float) -> float:
        return top + high * (1 - math.log2(value) / math.log2(counts[-1]))

    parts = []
    for n in counts:
        parts.append(_line(f"M{x(n):.1f} {top}V{top + high}M{left} {y(n):.1f}H{left + wide}", GREY))
        parts.append(_text(x(n), top + high + 16, str(n), "middle"))
        parts.append(_text(left - 6, y(n) + 4, f"{n} P", "end"))
    parts.append(_text(left + wide, top + high + 34, f"servers, for {WORKERS} workers", "end"))
    for colour, (name, values) in zip(COLOURS, lines.items(), strict=False):
        points = [f"{x(n):.1f} {y(v):.1f}" for n, v in zip(counts, values, strict=True)]
        parts.append(_line(f"M{'L'.join(points)}", colour, ' stroke-width="2.5"'))
        parts.append(_text(left + 8, y(values[0]) + 16, name, fill=colour))
    return _svg(left + wide + 20, top + high + 44, parts)


# -- a link of a van

LINK_BYTES_PER_S = 2e9


def chunks_on_a_link() -> str:
    """Which bytes of four messages leave when: the queue of one link."""
    comes = [  # ms, priority, MiB
        (0.0, 0, 6),
        (0.3, 0, 2),
        (0.8, 8, 2),
        (2.2, 15, 1 / 1024),
    ]
    colours = [COLOURS[0], COLOURS[4], COLOURS[2], COLOURS[1]]
    names = ["6 MiB", "2 MiB", "2 MiB, urgent", "a note"]
    box = Outbox("server:0", VanConfig(), Counter())
    bars, now_s, waiting, beat_s = [], 0.0, list(enumerate(comes)), 3.1e-3
    number_of = {}
    while waiting or not box.is_empty:
        while waiting and waiting[0][1][0] <= now_s * 1e3 + 1e-9:
            number, (_, priority, mib) = waiting.pop(0)
            head = Open(number + 1, "", priority, 0, 0, 0, b"", 0, ())
            box.put(Outgoing.make(head, b"", [bytes(round(mib * (1 << 20)))], None))
            number_of.setdefault(priority, []).append(number)
        if beat_s <= now_s:
            box.send_control(Beat(0))
            beat_s = math.inf
        frame = box.next_frame(round(now_s * 1e9))
        if frame is None:
            now_s = waiting[0][1][0] / 1e3
            continue
        nbytes = len(frame.meta) + sum(map(len, frame.pieces))
        end_s = now_s + nbytes / LINK_BYTES_PER_S
        head = unpack(frame.meta, "")
        kind = type(head).__name__
        if isinstance(head, Beat):
            lane, colour, title = 4, COLOURS[5], "heartbeat"
        else:
            lane = number_of[head.priority][0]
            colour, title = colours[lane], f"{kind}, {nbytes:,} bytes"
        shown_s = max(end_s, now_s + 2e-5)  # else it would not be seen
        bars.append(Bar(lane, now_s, shown_s, colour, title, kind))
        box.frame_sent(round(end_s * 1e9))
        if not isinstance(head, Beat) and _is_done(box, head.priority, number_of):
            number_of[head.priority].pop(0)
        now_s = end_s
    lanes = [f"priority {p}: {n}" for n, (_, p, _) in zip(names, comes, strict=True)]
    return draw([*lanes, "control: heartbeat"], bars, now_s)


def _is_done(box: Outbox, priority: int, number_of: dict[int, list[int]]) -> bool:
    """Whether the first message of a priority has left."""
    waiting = sum(map(len, number_of.values()))
    del priority
    return box.queued < waiting


# -- keys of servers

NUM_KEYS = 4000


def keys_on_servers() -> str:
    """Share of the keys that each of four servers has, for three sets of keys and two slicers."""
    sets = {
        "0, 1, 2, ...": torch.arange(NUM_KEYS).to(torch.uint64),
        "spread over 2^64": torch.tensor(
            [(k << 64) // NUM_KEYS for k in range(NUM_KEYS)], dtype=torch.uint64
        ),
        "multiples of 1,000": (1000 * torch.arange(NUM_KEYS)).to(torch.uint64),
    }
    lanes, bars = [], []
    for slicer in (by_range, by_hash):
        for name, keys in sets.items():
            at = 0.0
            for server, places in sorted(slicer(keys, 4).items()):
                share = len(keys.view(torch.int64)[places]) / NUM_KEYS
                title = f"server {server}: {share:.1%}"
                bars.append(Bar(len(lanes), at, at + share, COLOURS[server], title, f"{share:.0%}"))
                at += share
            lanes.append(f"{slicer.__name__}: {name}")
    legend = {f"server {server}": COLOURS[server] for server in range(4)}
    return draw(lanes, bars, 1.0, legend=legend, axis=False)


# -- nodes in a simulated network: who sends what to whom


class Message(NamedTuple):
    """A message of a node; it has been lost if it never came."""

    sent_s: float
    came_s: float | None
    sender: str
    receiver: str
    kind: str


COLOUR_OF = {
    "Push": COLOURS[0],
    "Pull": COLOURS[4],
    "Update": COLOURS[2],
    "RecordsConfirmed": COLOURS[3],
    "Here": COLOURS[1],
    "NodeJoin": COLOURS[5],
    "Installed": COLOURS[6],
    "ShardSnapshot": COLOURS[5],
    "Note": COLOURS[0],
}
ANSWERS = {"Accepted": "Push", "Pulled": "Pull", "Elsewhere": "Here", "NoteReceived": "Note"}


class Wire:
    """Records all messages of a simulation.

    Args:
        run: The simulation, whose nodes have just been made.
    """

    def __init__(self, run: Simulation | KVSimulation) -> None:
        self._clock = run.network.clock
        self._later = partial(run.network.call_later, 0.0)
        self._directories: dict[str, object] = {}  # by receiver: sent at one moment, in any order
        self._sent: list[tuple[float, str, str, str, int]] = []
        self._came: dict[tuple[str, int], list[float]] = {}
        self._first: dict[tuple[str, int], tuple[str, str]] = {}
        for node in run.nodes.values():
            office = node.postoffice
            office.handle = partial(self._handle, office.node, office.handle)
            office.van.send = partial(self._send, office.van, office.van.send)

    @property
    def now_s(self) -> float:
        """Virtual time."""
        return self._clock.now_ns() / 1e9

    def _handle(self, node, original, delivery):
        message = delivery.sender, delivery.id
        self._came.setdefault(message, []).append(self.now_s)
        self._first.setdefault(message, (node, type(delivery.message).__name__))
        original(delivery)

    def _send(self, van, original, to, message, *, message_id=0, **options):
        def send():
            number = message_id or van.new_id()
            self._sent.append((self.now_s, van.node, to, type(message).__name__, number))
            return original(to, message, message_id=number, **options)

        if type(message).__name__ != "Here":
            return send()
        if not self._directories:
            self._later(self._publish)
        self._directories[to] = send
        return None

    def _publish(self):
        """Send directories in the order of their receivers, so that each run is the same."""
        sends, self._directories = sorted(self._directories.items()), {}
        for _, send in sends:
            send()

    def messages(self) -> list[Message]:
        """Return what was sent; each with its first arrival after that."""
        found = []
        for sent_s, sender, to, kind, number in self._sent:
            came = [at for at in self._came.get((sender, number), ()) if at >= sent_s]
            found.append(Message(sent_s, min(came, default=None), sender, to, kind))
        known = {(sender, number) for _, sender, _, _, number in self._sent}
        for (sender, number), came in self._came.items():
            if number and (sender, number) not in known:  # sent before the recording
                to, kind = self._first[sender, number]
                found.append(Message(came[0] - LATENCY_S, came[0], sender, to, kind))
        one_each = {(m.sent_s, m.sender, m.receiver, m.kind): m for m in found}
        return [each for _, each in sorted(one_each.items())]


def _arrows(
    nodes: Sequence[str],
    messages: Sequence[Message],
    span_s: tuple[float, float],
    *,
    ends: Sequence[tuple[str, float]] = (),
    heads: Sequence[tuple[str, float, float]] = (),
    notes: Sequence[tuple[float, str]] = (),
    most_s: float = 1.0,
) -> str:
    """Draw a line for each node, and an arrow for each message; pauses longer than `most_s` are cut out."""
    wide, lane, left, top = 680, 46, 80, 50
    begin_s, end_s = span_s
    bottom = top + (len(nodes) - 1) * lane
    inside = [
        each
        for each in messages
        if begin_s <= each.sent_s and (each.came_s or each.sent_s) <= end_s
        if {each.sender, each.receiver} <= {*nodes}
        if ANSWERS.get(each.kind, each.kind) in COLOUR_OF
    ]

    moments = sorted(
        {begin_s, end_s, *(at for m in inside for at in (m.sent_s, m.came_s) if at is not None)}
    )
    spans, cuts = _without_pauses(moments, most_s)
    length_s = sum(last - first for first, last in spans)
    cut = 44.0  # pixels of a pause
    per_s = (wide - cut * len(cuts)) / length_s

    def x(at_s: float) -> float:
        before = [(first, last) for first, last in spans if first <= at_s]
        passed_s = sum(min(last, at_s) - first for first, last in before)
        return left + passed_s * per_s + cut * max(0, len(before) - 1)

    def y(node: str) -> float:
        return top + nodes.index(node) * lane

    kinds = dict.fromkeys(ANSWERS.get(each.kind, each.kind) for each in inside)
    parts = ["<defs>"]
    parts += [
        f'<marker id="{kind}" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="5" markerHeight="5" '
        f'orient="auto"><path d="M0 0L6 3L0 6z" fill="{COLOUR_OF[kind]}"/></marker>'
        for kind in kinds
    ]
    parts.append("</defs>")
    at = left
    for kind in kinds:
        parts.append(_line(f"M{at} 14h22", COLOUR_OF[kind], ' stroke-width="2.5"'))
        parts.append(_text(at + 27, 18, kind))
        at += 44 + 7 * len(kind)
    gone = dict(ends)
    for node in nodes:
        last_s = gone.get(node, end_s)
        parts.append(_line(f"M{left} {y(node)}H{x(last_s):.1f}", "#bbbbbb"))
        parts.append(_text(left - 8, y(node) + 4, node, "end"))
        if node in gone:
            parts.append(_cross(x(last_s), y(node)))
    for node, from_s, to_s in heads:
        more = ' stroke-width="5" opacity="0.5"'
        parts.append(_line(f"M{x(from_s):.1f} {y(node)}H{x(to_s):.1f}", HEAD_COLOUR, more))
        parts.append(_text(x(from_s) + 30, y(node) - 6, "head", "middle", HEAD_COLOUR))
    for first_s, last_s in cuts:
        middle = (x(first_s) + x(last_s)) / 2
        parts.append(
            f'<rect x="{middle - 4:.1f}" y="{top - 8}" width="8" height="{bottom - top + 16}" fill="white"/>'
        )
        parts.append(
            _text(middle, bottom + 26, f"{1e3 * (last_s - first_s):.0f} ms", "middle", "#888888")
        )
    for at_s, text in notes:
        parts.append(
            _line(f"M{x(at_s):.1f} {top - 16}V{bottom + 12}", "#888888", ' stroke-dasharray="2 3"')
        )
        parts.append(_text(x(at_s), bottom + 26, text, "middle"))
    drawn: Counter[tuple[object, ...]] = Counter()
    for each in inside:
        kind = ANSWERS.get(each.kind, each.kind)
        dash = ' stroke-dasharray="4 3"' if each.kind in ANSWERS else ""
        title = f"<title>{each.kind}: {each.sender} to {each.receiver}</title>"
        beside = each.sent_s, each.sender, each.receiver  # sent at the same time
        shift = 5 * drawn[beside]
        drawn[beside] += 1
        x0, y0, y1 = x(each.sent_s) + shift, y(each.sender), y(each.receiver)
        if each.came_s is None:
            parts.append(_line(f"M{x0:.1f} {y0}V{(y0 + y1) / 2}", COLOUR_OF[kind], dash))
            parts.append(_cross(x0, (y0 + y1) / 2))
            continue
        path = f"M{x0:.1f} {y0}L{x(each.came_s) + shift:.1f} {y1}"
        parts.append(
            f'<path d="{path}" stroke="{COLOUR_OF[kind]}" stroke-width="1.6" fill="none"{dash} '
            f'marker-end="url(#{kind})">{title}</path>'
        )
    for number in _milliseconds(spans, begin_s):
        at = x(begin_s + number / 1e3)
        parts.append(_line(f"M{at:.1f} {bottom + 34}v5", "#888888"))
        parts.append(_text(at, bottom + 52, f"{number} ms", "middle"))
    return _svg(left + wide + 30, bottom + 62, parts)


def _milliseconds(spans: Sequence[tuple[float, float]], begin_s: float) -> Iterator[int]:
    """Yield the whole milliseconds after `begin_s` that are inside of spans."""
    for first_s, last_s in spans:
        yield from range(
            math.ceil(1e3 * (first_s - begin_s) - 1e-6), int(1e3 * (last_s - begin_s) + 1e-6) + 1
        )


def _without_pauses(
    moments: Sequence[float], most_s: float
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return the spans of time in which something happens, and the pauses between them."""
    around_s = 0.4e-3  # is shown before and after each event
    spans = [(moments[0], moments[0])]
    for at_s in moments[1:]:
        first, last = spans[-1]
        if at_s - last <= most_s:
            spans[-1] = (first, at_s)
        else:
            spans[-1] = (first, last + around_s)
            spans.append((at_s - around_s, at_s))
    return spans, [(one[1], other[0]) for one, other in pairwise(spans)]


def _cross(x: float, y: float) -> str:
    return _line(f"M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10", LOST, ' stroke-width="2"')


def _gradient(values: torch.Tensor, worker: int, clock: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * worker + clock)
    return values + torch.randn(values.shape, generator=generator)


def _simulation(**options: object) -> tuple[Simulation, Wire]:
    run = Simulation(
        3,
        consistency=BSP,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        gradient=_gradient,
        **options,
    )
    return run, Wire(run)


def who_is_here() -> str:
    """Nodes join, the scheduler answers with the first directory, and one clock passes."""
    run, wire = _simulation(clocks=1)
    run.run()
    nodes = ["scheduler", "server:0", "server:1", "worker:0", "worker:1"]
    messages = wire.messages()
    begin_s = min(each.sent_s for each in messages if each.kind == "NodeJoin")
    return _arrows(nodes, messages, (begin_s - 2e-4, begin_s + 4e-3))


def lost_and_sent_again() -> str:
    """A worker's pushes and pulls over links that lose every fifth message."""
    run, wire = _simulation(servers=1, workers=1, clocks=3)
    run.begin(0.0)
    run.network.faults = Faults(drop=0.2)
    begin_s = wire.now_s
    run.run()
    nodes = ["worker:0", "server:0"]
    last_s = max(each.came_s or each.sent_s for each in wire.messages())
    return _arrows(nodes, wire.messages(), (begin_s - 4e-4, last_s + 4e-4), most_s=0.02)


def failover() -> str:
    """A head dies between a record and its confirmation; its successor goes on."""
    run, wire = _simulation(servers=3, clocks=8, options=Options(replicas=1, on_worker_loss="wait"))
    run.begin(0.0)
    (head,) = run.heads()
    name = f"server:{head}"
    updates = lambda: [m for m in wire.messages() if m.kind == "Update" and m.came_s]  # noqa: E731
    run.network.run_until(lambda: len(updates()) == 3)
    died_s = wire.now_s
    run.crash(name)
    run.run()
    order = [name, f"server:{(head + 1) % 3}", f"server:{(head + 2) % 3}"]
    nodes = ["worker:0", "worker:1", *order, "scheduler"]
    (successor,) = (f"server:{number}" for number in run.heads())
    chosen_s = min(
        each.came_s
        for each in wire.messages()
        if each.kind == "Here" and each.receiver == successor and (each.came_s or 0.0) > died_s
    )
    span_s = died_s - 3.4e-3, died_s + 6e-3
    return _arrows(
        nodes,
        wire.messages(),
        span_s,
        ends=[(name, died_s)],
        heads=[(name, span_s[0], died_s), (successor, chosen_s, span_s[1])],
    )


SAVING_S = 2e-3  # of a server, until it answers


def commands_to_groups() -> str:
    """A command to both servers, of which one answers later, and one to servers and workers."""
    run = KVSimulation(3, servers=2, workers=2)
    wire = Wire(run)
    apps = {name: SimpleApp(node, 1) for name, node in run.nodes.items()}

    def answer(app: SimpleApp, asked: SimpleData) -> None:
        app.response(asked, "done")

    for name, app in apps.items():
        later_s = SAVING_S if name == "server:1" else 0.0
        app.set_request_handle(
            lambda asked, app, later_s=later_s: run.network.call_later(
                later_s, partial(answer, app, asked)
            )
        )
    begin_s, ends = wire.now_s, []
    for name, to in (("worker:0", SERVER_GROUP), ("scheduler", SERVER_GROUP + WORKER_GROUP)):
        app = apps[name]
        stamp = app.request(1, "save", to)
        run.until(lambda app=app, stamp=stamp: app.customer.is_done(stamp))
        ends.append(wire.now_s)
    nodes = ["scheduler", "worker:0", "worker:1", "server:0", "server:1"]
    notes = [(at_s, "complete") for at_s in ends]
    span_s = begin_s - 2e-4, ends[-1] + 1e-3
    return _arrows(nodes, wire.messages(), span_s, notes=notes)


# -- measured consistencies


def staleness_measured() -> str:
    """Time of a step and error over time, from recorded numbers."""
    curves = json.loads(STALENESS.read_text())["curves"]
    wide, high, left, top, gap = 300, 170, 60, 44, 70
    colours = dict(zip(next(iter(curves.values())), COLOURS, strict=False))
    parts = []
    for place, (way, colour) in enumerate(colours.items()):
        parts.append(
            f'<rect x="{left + 90 * place}" y="4" width="12" height="12" fill="{colour}"/>'
        )
        parts.append(_text(left + 90 * place + 16, 14, way))
    for row, (kind, ways) in enumerate(curves.items()):
        y0 = top + row * (high + gap)
        parts.append(_text(left, y0 - 8, f"workers are slow {kind}: ms of a step of worker 0"))
        step_ms = {way: 1e3 * curve[-1][0] / len(curve) for way, curve in ways.items()}
        most = 100.0
        for k in range(0, 101, 25):
            y = y0 + high * (1 - k / most)
            parts.append(_line(f"M{left} {y:.1f}h{wide}", GREY))
            parts.append(_text(left - 6, y + 4, str(k), "end"))
        for place, (way, ms) in enumerate(step_ms.items()):
            x, bar = left + 12 + place * (wide - 12) / len(ways), high * ms / most
            parts.append(
                f'<rect x="{x:.1f}" y="{y0 + high - bar:.1f}" width="36" height="{bar:.1f}" '
                f'fill="{colours[way]}"><title>{way}</title></rect>'
            )
            parts.append(_text(x + 18, y0 + high - bar - 4, f"{ms:.0f}", "middle"))
            parts.append(_text(x + 18, y0 + high + 16, way, "middle"))
        parts += _errors(ways, colours, left + wide + gap, y0, wide, high)
    return _svg(left + 2 * wide + gap + 30, top + 2 * (high + gap) - 20, parts)


def _errors(
    ways: dict[str, list[list[float]]],
    colours: dict[str, str],
    left: float,
    top: float,
    wide: float,
    high: float,
) -> list[str]:
    """Draw the error of each way over seconds."""
    last_s = max(curve[-1][0] for curve in ways.values())
    low, most = -2.5, 0.25  # powers of ten
    parts = [_text(left, top - 8, "error over seconds")]
    for k in range(-2, 1):
        y = top + high * (most - k) / (most - low)
        parts.append(_line(f"M{left} {y:.1f}h{wide}", GREY))
        parts.append(_text(left - 6, y + 4, f"{10.0**k:g}", "end"))
    for second in range(math.floor(last_s) + 1):
        x = left + wide * second / last_s
        parts.append(_text(x, top + high + 16, str(second), "middle"))
    for way, curve in ways.items():
        points = [
            f"{left + wide * at / last_s:.1f} "
            f"{top + high * (most - max(math.log10(e), low)) / (most - low):.1f}"
            for at, e in curve
        ]
        more = f' stroke-width="2"><title>{way}</title></path'
        parts.append(_line(f"M{'L'.join(points)}", colours[way], more).replace("/>", ">"))
    return parts


# -- the directory over epochs


def shards_over_epochs() -> str:
    """Heads and copies of all virtual shards, as servers come, die and leave."""
    directory = Directory.begin({0: "", 1: "", 2: ""}, [0], replicas=1)
    rows = [("three servers", directory)]
    directory = _settled(directory.with_server(3, ""))
    rows.append(("server 3 comes", directory))
    lost = directory.without(1)
    rows.append(("server 1 dies", lost))
    directory = _settled(lost)
    rows.append(("new copies", directory))
    directory = _settled(directory.drained(0))
    rows.append(("server 0 leaves", directory))
    left, top, cell, high = 168, 26, 9, 44
    parts = [_text(left, 16, "virtual shards 0 to 63: head above, copy below")]
    for server in range(4):
        x = left + 310 + 74 * server
        parts.append(f'<rect x="{x}" y="6" width="12" height="12" fill="{COLOURS[server]}"/>')
        parts.append(_text(x + 16, 16, f"server {server}"))
    for row, (name, each) in enumerate(rows):
        y = top + row * high
        parts.append(_text(4, y + 18, name))
        parts.append(_text(left - 8, y + 18, f"epoch {each.epoch}", "end", "#888888"))
        for shard, chain in enumerate(each.chains):
            for place, server in enumerate(chain):
                parts.append(
                    f'<rect x="{left + shard * cell}" y="{y + 15 * place}" width="{cell - 1}" '
                    f'height="14" fill="{COLOURS[server]}"/>'
                )
    return _svg(left + 64 * cell + 30, top + len(rows) * high, parts)


def _settled(directory: Directory) -> Directory:
    """Return it after all moves that it calls for, as the scheduler publishes them."""
    while True:
        if moves := directory.moves():
            directory = directory.with_copies(moves)
        joining = [
            (s, *new) for s, all_new in enumerate(directory.joining) for new in all_new.items()
        ]
        if not joining:
            return directory
        directory = directory.installed(*joining[0])


SERVERS = (
    bytes_of_servers,
    who_is_here,
    chunks_on_a_link,
    lost_and_sent_again,
    keys_on_servers,
    commands_to_groups,
    staleness_measured,
    failover,
    shards_over_epochs,
)
