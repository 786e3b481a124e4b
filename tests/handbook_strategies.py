"""Pictures of the pages on distribution strategies.

They are drawn from the queue of a coordinator and the state of a shard, from the variables of a
parameter server strategy on a node that records its tables, and from the readers of TF_CONFIG.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from braid.parallel.gradients.bucket_layout import Caps, plan_buckets
from braid.programs.schedule import simulate
from braid.programs.schedule.bars import (
    BACKWARD,
    COLOURS,
    FORWARD,
    RECEIVE,
    REDUCE,
    SEND,
    Bar,
    draw,
)
from braid.programs.schedule.collective import algorithm, collective_costs, program
from braid.programs.topology import Cluster, flat
from braid.ps import Consistency
from braid.ps.protocol.directory import SCHEDULER, server_node, worker_node
from braid.ps.protocol.instructions import Merge, View
from braid.ps.protocol.shard_state import ShardState, TaskKey
from braid.runtime.rendezvous.engine_ranks import engine_rank
from braid.strategies.coordinator.queue_state import Assign, ClosureQueue, EndClosure
from braid.strategies.parameter_server import FixedShardsPartitioner
from braid.strategies.parameter_server.variables import ServerVariables
from braid.types import TensorSpec
from handbook_servers import GREY, LOST, _svg, _text

BLUE, RED, GREEN = COLOURS[:3]

# -- closures of a coordinator, and the updates that a server adds

CLOSURE_S, MESSAGE_S = 4e-3, 0.5e-3
NUM_CLOSURES = 6
KILLED_S, STARTED_S = 11.25e-3, 16e-3  # worker 0: after its push was added, before its result comes
SHOWN_S = 0.75e-3  # width of an instant
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
        self.at(result_s, lambda t: self.finished(t, worker, life, key.task))

    def finished(self, now_s: float, worker: int, life: int, number: int) -> None:
        """Take the result, unless the worker was killed before it could send it."""
        if self.lives[worker] == life:
            self.act(self.queue.finished(number, f"worker:{worker}"), now_s)

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
    end_s = max(bar.end_s for bar in run.bars)
    return draw(LANES, run.bars, end_s, legend=legend)


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


# -- three steps of each strategy

STEP_S = ((4e-3, 4e-3, 4e-3), (4e-3, 8e-3, 4e-3))  # of each replica's share of a batch
NUM_STEPS = len(STEP_S[0])
PARAM_BYTES = 1.25e6
MEMORY = flat(2, 2e-6, 10e9)  # memory of a host: 10 GB/s for each replica
NETWORK = flat(2, 20e-6, 1.25e9)  # 10 Gbit/s for each host
TRANSFER_S = PARAM_BYTES / 1.25e9  # of all parameters between a worker and the server


def strategies_side_by_side() -> str:
    """Draw three steps of two replicas under four strategies; replica 1 is slow in the second."""
    bars: list[Bar] = []
    now_s = 0.0
    for step in range(NUM_STEPS):
        for replica in (0, 1):  # one device computes both shares
            end_s = now_s + STEP_S[replica][step]
            bars.append(Bar(0, now_s, end_s, FORWARD, f"step {step}, share {replica}", f"{step}"))
            now_s = end_s
    bars += _synchronous(1, MEMORY) + _synchronous(3, NETWORK) + _asynchronous(5)
    lanes = ["device", "thread 0", "thread 1", "process 0", "process 1"]
    lanes += ["worker 0", "worker 1", "server"]
    legend = {"computes": FORWARD, "push": SEND, "pull": RECEIVE, "all-reduce": REDUCE}
    return draw(lanes, bars, now_s, legend=legend)


def _synchronous(lane: int, cluster: Cluster) -> list[Bar]:
    """Draw two replicas whose gradients are averaged in each step, after backward."""
    made = program(algorithm("ring", "all_reduce", 2))
    seconds = simulate(made, collective_costs(made, PARAM_BYTES), cluster).seconds
    bars, now_s = [], 0.0
    for step in range(NUM_STEPS):
        ends_s = [now_s + STEP_S[replica][step] for replica in (0, 1)]
        met_s = max(ends_s)
        for replica, end_s in enumerate(ends_s):
            bars.append(Bar(lane + replica, now_s, end_s, FORWARD, f"step {step}", f"{step}"))
            bars.append(Bar(lane + replica, met_s, met_s + seconds, REDUCE, "all-reduce"))
        now_s = met_s + seconds
    return bars


def _asynchronous(lane: int) -> list[Bar]:
    """Draw two workers that pull, compute and push at their own pace."""
    shard = ShardState(0, Consistency(staleness=math.inf, aggregate="sum"))
    shard.configure(View(0, (0,), {}, {0: 0, 1: 0}))
    bars: list[Bar] = []
    free_s = {"lower": 0.0, "upper": 0.0}  # directions of the server's link: pulls and pushes
    events = [(0.0, worker, 0, "pull") for worker in (0, 1)]
    while events:
        now_s, worker, step, kind = heapq.heappop(events)
        request = f"worker:{worker}", len(bars)
        part = "lower" if kind == "pull" else "upper"
        begin_s = max(now_s, free_s[part])
        free_s[part] = end_s = begin_s + TRANSFER_S
        title = f"{kind} of worker {worker}"
        colour = RECEIVE if kind == "pull" else SEND
        bars.append(Bar(lane + worker, begin_s, end_s, colour, title, part=part))
        bars.append(Bar(lane + 2, begin_s, end_s, colour, title, part=part))
        if kind == "push":
            assert shard.push(worker, step, request), "a push is added as it comes"
            if step + 1 < NUM_STEPS:
                heapq.heappush(events, (end_s, worker, step + 1, "pull"))
            continue
        assert shard.pull(worker, step, request), "a pull waits for no other worker"
        done_s = end_s + STEP_S[worker][step]
        bars.append(Bar(lane + worker, end_s, done_s, FORWARD, f"step {step}", f"{step}"))
        heapq.heappush(events, (done_s, worker, step, "push"))
    return bars


# -- tasks of TF_CONFIG, and their ranks or nodes

MIRRORED = {"chief": ["a:2222"], "worker": ["a:2223", "b:2222", "b:2223"]}
SERVED = {"chief": ["a:2222"], "ps": ["b:2222", "c:2222"], "worker": ["b:2223", "c:2223"]}
BOX_WIDE, BOX_HIGH = 96, 46  # pixels of a task


def tasks_and_ranks() -> str:
    """Draw the tasks of two clusters on their hosts, with their ranks or nodes."""
    parts = [_text(4, 16, "MultiWorkerMirroredStrategy: each task is a rank")]
    parts += _hosts(28, MIRRORED, _rank_of)
    parts.append(_text(4, 136, "ParameterServerStrategy: each task is a node"))
    parts += _hosts(148, SERVED, _node_of)
    return _svg(690, 246, parts)


def _hosts(y: float, cluster: dict[str, list[str]], describe: Callable[..., str]) -> list[str]:
    """Draw a frame for each host, and its tasks."""
    by_host: dict[str, list[tuple[str, int, str]]] = {}
    for job, addresses in cluster.items():
        for index, address in enumerate(addresses):
            by_host.setdefault(address.partition(":")[0], []).append((job, index, address))
    parts, x = [], 4.0
    colours = {"chief": GREEN, "worker": BLUE, "ps": RED}
    for host, tasks in by_host.items():
        wide = len(tasks) * (BOX_WIDE + 8) + 8
        frame = f'width="{wide}" height="{BOX_HIGH + 32}" fill="none" stroke="{GREY}"'
        parts.append(f'<rect x="{x}" y="{y}" {frame}/>')
        parts.append(_text(x + 8, y + 16, f"host {host}"))
        for place, (job, index, address) in enumerate(tasks):
            left, top = x + 8 + place * (BOX_WIDE + 8), y + 24
            size = f'width="{BOX_WIDE}" height="{BOX_HIGH}"'
            parts.append(f'<rect x="{left}" y="{top}" {size} fill="{colours[job]}"/>')
            middle = left + BOX_WIDE / 2
            title = f"{job} {index}, :{address.partition(':')[2]}"
            parts.append(_text(middle, top + 19, title, "middle", "white"))
            parts.append(_text(middle, top + 37, describe(cluster, job, index), "middle", "white"))
        x += wide + 12
    return parts


def _rank_of(cluster: dict[str, list[str]], job: str, index: int) -> str:
    """Return rank and local rank of a task, as `braid.init` reads them."""
    task = {"type": job, "index": index}
    rank = engine_rank({"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})})
    assert rank is not None, "TF_CONFIG is set"
    return f"rank {rank.rank}, local {rank.local_rank}"


def _node_of(cluster: dict[str, list[str]], job: str, index: int) -> str:
    """Return the node of a task."""
    nodes = {"chief": SCHEDULER, "ps": server_node(index), "worker": worker_node(index)}
    assert index < len(cluster[job]), "the task is in the cluster"
    return nodes[job]


# -- buckets of gradients

PACKS = (1, 3, 0)  # num_packs of CrossDeviceOps; 0 for a bucket for each gradient
NUM_PARAMS, GRADIENT_BYTES, GRADIENT_S = 12, 1 << 19, 1e-3  # one gradient after the other
HOST = flat(2, 0.5e-3, 1e9)  # two replicas; a message costs as much as 0.5 MB


def packs_of_gradients() -> str:
    """Draw backward, and the all-reduces of its buckets, for three numbers of packs."""
    specs = {n: TensorSpec((GRADIENT_BYTES // 4,), "float32") for n in range(NUM_PARAMS)}
    total = NUM_PARAMS * GRADIENT_BYTES
    made = program(algorithm("ring", "all_reduce", 2))
    bars: list[Bar] = []
    for number, packs in enumerate(PACKS):
        cap_bytes = total / packs if packs else 1
        lane, now_s = 2 * number, 0.0
        for position in reversed(range(NUM_PARAMS)):  # backward begins with the last one
            begin_s = (NUM_PARAMS - 1 - position) * GRADIENT_S
            name = f"{position}"
            bars.append(
                Bar(lane, begin_s, begin_s + GRADIENT_S, BACKWARD, f"gradient {name}", name)
            )
        for bucket in plan_buckets(specs, Caps.of_mb(cap_bytes / (1 << 20))):
            ready_s = (NUM_PARAMS - min(bucket.members)) * GRADIENT_S
            costs = collective_costs(made, len(bucket.members) * GRADIENT_BYTES)
            begin_s = max(now_s, ready_s)
            now_s = begin_s + simulate(made, costs, HOST).seconds
            name = f"{len(bucket.members)}"
            title = f"all-reduce of {name} gradients"
            bars.append(Bar(lane + 1, begin_s, now_s, REDUCE, title, name))
    lanes = [name for packs in PACKS for name in (f"packs: {packs}", "all-reduce")]
    end_s = max(bar.end_s for bar in bars)
    legend = {"backward": BACKWARD, "all-reduce": REDUCE}
    return draw(lanes, bars, end_s, legend=legend)


STRATEGIES = (
    packs_of_gradients,
    tasks_and_ranks,
    strategies_side_by_side,
    closures_run_again,
    variables_on_servers,
)
