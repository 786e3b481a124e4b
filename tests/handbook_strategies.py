"""Pictures of the pages on distribution strategies.

They are drawn from the queue of a coordinator and the state of a shard, from the variables of a
parameter server strategy on a node that records its tables, and from the readers of TF_CONFIG.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from braid.programs.schedule.bars import COLOURS, Bar, draw
from braid.ps import Consistency
from braid.ps.protocol.instructions import Merge, View
from braid.ps.protocol.shard_state import ShardState, TaskKey
from braid.strategies.coordinator.queue_state import Assign, ClosureQueue, EndClosure
from braid.strategies.parameter_server import FixedShardsPartitioner
from braid.strategies.parameter_server.variables import ServerVariables
from handbook_servers import GREY, LOST, _svg, _text

BLUE, RED, GREEN = COLOURS[:3]

# -- closures of a coordinator, and the updates that a server adds

CLOSURE_S, MESSAGE_S = 4e-3, 0.5e-3
NUM_CLOSURES = 6
KILLED_S, STARTED_S = 11.25e-3, 16e-3  # worker 0: after its push was added, before its result comes
SHOWN_S = 0.75e-3  # width of an instant
TICK_S = 4e-3  # four ticks of whole milliseconds
LANES = ["coordinator", "worker 0", "worker 1", "server"]


class _CoordinatedRun:
    """A queue, two workers and a shard, whose messages take half a millisecond."""

    def __init__(self) -> None:
        self.queue = ClosureQueue(NUM_CLOSURES)
        self.shard = ShardState(0, Consistency(staleness=math.inf, aggregate="sum"))
        self.shard.configure(View(0, (0,), {}, {0: 0, 1: 0}))
        self.bars: list[Bar] = []
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.lives = [0, 0]  # number of the process of each worker
        self.num_messages = 0

    def at(self, time_s: float, call: Callable[[float], None]) -> None:
        """Call a function at a time."""
        heapq.heappush(self.events, (time_s, self.num_messages, call))
        self.num_messages += 1

    def run(self) -> None:
        """Schedule all closures, lose worker 0 and start it again."""
        for worker in (0, 1):
            name = f"worker:{worker}"
            self.at(worker * 1e-3, lambda t, name=name: self.act(self.queue.ready(name), t))
        for number in range(NUM_CLOSURES):
            self.at(0.0, lambda now_s, n=number: self.act(self.queue.schedule(n), now_s))
        self.at(KILLED_S, self.kill)
        self.at(STARTED_S, lambda now_s: self.act(self.queue.ready("worker:0"), now_s))
        while self.events:
            now_s, _, call = heapq.heappop(self.events)
            call(now_s)

    def act(self, instructions: Sequence[Any], now_s: float) -> None:
        """Carry out what the queue decides."""
        for each in instructions:
            match each:
                case Assign(number, name):
                    worker = int(name[-1])
                    begin_s = now_s + MESSAGE_S
                    oldest, life = self.queue.oldest or 0, self.lives[worker]
                    self.at(begin_s, lambda t, a=(worker, life, number, oldest): self.begin(t, *a))
                case EndClosure(number):
                    title = f"closure {number} is over"
                    self.bars.append(Bar(0, now_s, now_s + SHOWN_S, GREEN, title, f"{number}"))

    def begin(self, now_s: float, worker: int, life: int, number: int, oldest: int) -> None:
        """Run a closure: compute, then push."""
        end_s = now_s + CLOSURE_S
        killed = worker == 0 and life == 0 and end_s > KILLED_S
        shown_s = KILLED_S if killed else end_s
        self.bars.append(Bar(1 + worker, now_s, shown_s, BLUE, f"closure {number}", f"{number}"))
        push_s = end_s + MESSAGE_S
        if not killed:
            key = TaskKey(number, 0, oldest)
            self.at(push_s, lambda t: self.push(t, worker, life, key))

    def push(self, now_s: float, worker: int, life: int, key: TaskKey) -> None:
        """Add the update of a closure at the server, or drop it."""
        clock = self.shard.clock(worker)
        done = self.shard.push(worker, clock, (f"worker:{worker}", clock), key)
        dropped = any(each.record.dropped for each in done if isinstance(each, Merge))
        colour, text = (GREY, "dropped") if dropped else (GREEN, "added")
        title = f"the update of closure {key.task} is {text}"
        self.bars.append(Bar(3, now_s, now_s + SHOWN_S, colour, title, f"{key.task}"))
        result_s = now_s + 2 * MESSAGE_S  # the push is accepted, then the result is sent
        self.at(result_s, lambda t: self.over(t, worker, life, key.task))

    def over(self, now_s: float, worker: int, life: int, number: int) -> None:
        """Take the result, unless the worker was killed before it could send it."""
        if self.lives[worker] == life:
            self.act(self.queue.over(number, f"worker:{worker}"), now_s)

    def kill(self, now_s: float) -> None:
        """Lose worker 0."""
        self.lives[0] += 1
        self.bars.append(Bar(1, now_s, STARTED_S, LOST, "worker 0 is lost", "lost"))
        self.act(self.queue.lost("worker:0"), now_s)


def closures_run_again() -> str:
    """Draw six closures, one of which runs twice, and the updates that a server adds."""
    run = _CoordinatedRun()
    run.run()
    legend = {"runs": BLUE, "added, over": GREEN, "dropped": GREY, "lost": LOST}
    end_s = math.ceil(max(bar.end_s for bar in run.bars) / TICK_S) * TICK_S
    return draw(LANES, run.bars, end_s, legend=legend, width=680)


# -- shards of variables on servers

ROW, WIDE, LEFT, TOP = 15, 44, 120, 40  # pixels: a row of a variable, a column, margins


class _RecordingNode:
    """A node that records the tables that a strategy declares."""

    num_servers, is_server, is_worker = 2, False, False

    def dense(self, name: str, values: torch.Tensor, *_: Any, **options: Any) -> Any:
        """Return a table with the lengths of its shards."""
        return SimpleNamespace(name=name, lengths=options["lengths"], values=values)


def variables_on_servers() -> str:
    """Draw the rows of five variables, their servers, and the one table that they are in."""
    layers = {"layer": nn.Linear(4, 13), "hidden": nn.Linear(13, 6), "head": nn.Linear(6, 1)}
    model = nn.ModuleDict(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    node: Any = _RecordingNode()
    variables = ServerVariables(
        node,
        [model],
        [optimizer],
        Consistency(staleness=math.inf),
        partitioner=FixedShardsPartitioner(5),
        restore=None,
    )
    (table,) = variables._trained[optimizer]
    parts, x = [], LEFT
    for name, param in model.named_parameters():
        pieces = sorted((p for p in table.pieces if p.name == name), key=lambda p: p.begin)
        row = param.numel() // param.shape[0]
        parts.append(_text(x, TOP - 20, name.replace(".", " ").replace(" weight", "")))
        parts.append(_text(x, TOP - 6, str([*param.shape])))
        y = TOP
        for piece, server in zip(pieces, variables.servers_of(name), strict=True):
            rows = (piece.end - piece.begin) // row
            parts.append(_shard(x, y, WIDE, rows * ROW - 2, COLOURS[server], str(rows)))
            y += rows * ROW
        x += WIDE + 50
    y = TOP + 13 * ROW + 40
    parts.append(_text(4, TOP + 10, "rows of a shard"))
    for server in range(2):
        x = LEFT
        parts.append(_text(4, y + 15, f"server {server}"))
        for piece in table.pieces:
            if variables_server(variables, piece) == server:
                size = piece.end - piece.begin
                wide = 4 + size * 4
                parts.append(_shard(x, y, wide - 2, 22, COLOURS[server], str(size)))
                x += wide
        y += 30
    parts.append(_text(4, y + 12, "elements of each shard in the table of the optimizer"))
    return _svg(680, y + 22, parts)


def variables_server(variables: ServerVariables, piece: Any) -> int:
    """Return the server of a piece."""
    (tables,) = variables._trained.values()
    same = sorted(p.begin for table in tables for p in table.pieces if p.name == piece.name)
    return variables.servers_of(piece.name)[same.index(piece.begin)]


def _shard(x: float, y: float, wide: float, high: float, colour: str, text: str) -> str:
    box = f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" fill="{colour}"/>'
    fits = wide >= 7 * len(text) and high >= 12
    label = _text(x + wide / 2, y + high / 2 + 4, text, "middle", "white") if fits else ""
    return box + label


STRATEGIES = (closures_run_again, variables_on_servers)
