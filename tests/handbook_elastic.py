"""Pictures of the pages on fault tolerance.

They are drawn from the state machine of an elastic run's members, from the functions that deal
micro-batches to ranks, from the mesh and the ring of an elastic mesh, and from a simulated run that
fails at random and resumes from checkpoints.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from braid.comm.tensors.node_map import NodeMap
from braid.elasticity.gradient_sums import num_rounds, shard_of
from braid.elasticity.mesh_choice import mesh_for
from braid.elasticity.shadow import ring_of
from braid.launch.process.job import ElasticLimits
from braid.launch.supervise.membership_state import (
    Begin,
    MembershipState,
    Order,
    Pause,
    Replace,
)
from braid.programs.layout import Mesh
from braid.programs.schedule.bars import COLOURS, Bar, draw
from handbook_servers import GREY, LOST, _line, _svg, _text

BLUE, RED, GREEN, YELLOW = COLOURS[:4]
PURPLE, DARK = COLOURS[5], "#666666"

# -- members and epochs

NUM_SHARDS = 3
ROUND_S, MEET_S = 100e-3, 60e-3  # a micro-batch and its sum; a meeting of the members of an epoch
MESSAGE_S, START_S = 20e-3, 500e-3  # between a process and the launcher; of a new process
KILLED_S, END_S = 270e-3, 1.6
VICTIM, NEWCOMER = 1, 3
ORDERS_LANE, EPOCHS_LANE = 4, 5


class _ElasticRun:
    """A membership and its processes, whose messages take 20 ms."""

    def __init__(self) -> None:
        limits = ElasticLimits(min_ranks=2, restarts=1)
        self.state = MembershipState(limits, NUM_SHARDS)
        self.bars: list[Bar] = []
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.members: tuple[int, ...] = ()
        self.epoch = -1
        self.begun_s = 0.0
        self.num_steps = 0
        self.pauses = self.is_to_start = False
        self.waits_from_s: dict[int, float] = {}
        self.num_events = 0

    def at(self, time_s: float, call: Callable[[float], None]) -> None:
        """Call a function at a time."""
        heapq.heappush(self.events, (time_s, self.num_events, call))
        self.num_events += 1

    def run(self) -> None:
        """Start three processes, kill one, and take another one in."""
        for rank in range(NUM_SHARDS):
            self.act(self.state.started(rank), 0.0)
            self.ready(rank, 0.0, -1)
        self.at(KILLED_S, self.kill)
        while self.events and self.events[0][0] < END_S:
            now_s, _, call = heapq.heappop(self.events)
            call(now_s)
        self.end_epoch(END_S)

    def ready(self, rank: int, now_s: float, num_steps: int) -> None:
        """Send Ready to the launcher."""
        self.waits_from_s[rank] = now_s
        epoch = self.epoch if rank in self.members else -1
        self.at(
            now_s + MESSAGE_S,
            lambda t: self.act(self.state.ready(rank, epoch, num_steps), t),
        )

    def act(self, orders: Sequence[Order], now_s: float) -> None:
        """Execute the orders of the membership."""
        for order in orders:
            match order:
                case Begin(epoch, members, num_steps):
                    self.show_order(now_s, "Begin", GREEN)
                    self.end_epoch(now_s)
                    self.epoch, self.members, self.begun_s = epoch, members, now_s
                    self.num_steps, self.pauses = max(0, *num_steps), False
                    self.at(now_s + MESSAGE_S, self.meet)
                case Pause():
                    self.show_order(now_s, "Pause", PURPLE)
                    self.at(now_s + MESSAGE_S, self.pause)
                case Replace():
                    self.show_order(now_s, "Replace", YELLOW)
                    self.is_to_start = True

    def start(self, now_s: float) -> None:
        """Start another process, after the first step of the members that are left."""
        self.is_to_start = False
        self.act(self.state.started(NEWCOMER), now_s)
        end_s = now_s + START_S
        self.bars.append(Bar(NEWCOMER, now_s, end_s, YELLOW, "starts", "starts"))
        self.at(end_s, lambda t: self.ready(NEWCOMER, t, -1))

    def show_order(self, now_s: float, name: str, colour: str) -> None:
        """Draw an order of the launcher."""
        self.bars.append(Bar(ORDERS_LANE, now_s, now_s + MESSAGE_S, colour, name))

    def end_epoch(self, now_s: float) -> None:
        """Draw the epoch that ends."""
        if self.members:
            name, text = f"epoch {self.epoch}", f"{self.epoch}"
            self.bars.append(Bar(EPOCHS_LANE, self.begun_s, now_s, DARK, name, text))

    def pause(self, _now_s: float) -> None:
        """Note that members get ready after their step."""
        self.pauses = True

    def meet(self, now_s: float) -> None:
        """Let the members of an epoch meet."""
        end_s = now_s + MEET_S
        for rank in self.members:
            self.bars.append(Bar(rank, self.waits_from_s[rank], now_s, GREY, "waits"))
            self.bars.append(Bar(rank, now_s, end_s, GREEN, "meets, and gets the state"))
        self.step(end_s)

    def step(self, now_s: float) -> None:
        """Take a step in the rounds that the number of members needs."""
        end_s = now_s + ROUND_S * num_rounds(NUM_SHARDS, len(self.members))
        number = self.num_steps
        broken = now_s < KILLED_S < end_s
        shown_s = KILLED_S if broken else min(end_s, END_S)
        for rank in self.members:
            until_s = KILLED_S + 2 * MESSAGE_S if broken and rank != VICTIM else shown_s
            title = f"step {number}{', broken' if broken else ''}"
            self.bars.append(Bar(rank, now_s, until_s, RED if broken else BLUE, title, f"{number}"))
        if broken:
            return

        def end(now_s: float) -> None:
            self.num_steps += 1
            self.state.trained(self.members[0])
            if self.is_to_start and not self.state.is_recovering:
                self.at(now_s + MESSAGE_S, self.start)
            if self.pauses:
                for rank in self.members:
                    self.ready(rank, now_s, self.num_steps)
            else:
                self.step(now_s)

        self.at(end_s, end)

    def kill(self, now_s: float) -> None:
        """Kill a process: the launcher notices, and tells the other members."""
        self.bars.append(Bar(VICTIM, now_s, END_S, LOST, "process 1 is killed", "killed"))
        self.at(now_s + MESSAGE_S, lambda t: self.act(self.state.lost(VICTIM), t))
        for rank in self.members:
            if rank != VICTIM:
                told_s = now_s + 2 * MESSAGE_S
                self.at(told_s, lambda t, r=rank: self.ready(r, t, self.num_steps))


def members_and_epochs() -> str:
    """Draw three processes, a kill, and a process that is taken in after a step."""
    run = _ElasticRun()
    run.run()
    lanes = [*(f"process {rank}" for rank in range(4)), "orders", "epoch"]
    legend = {
        "step": BLUE, "broken": RED, "waits": GREY, "Begin": GREEN, "Pause": PURPLE,
        "Replace": YELLOW, "killed": LOST,
    }  # fmt: skip
    return draw(lanes, run.bars, END_S, legend=legend)


# -- micro-batches in rounds

DEALT = 5  # micro-batches of a step
CELL, HIGH, SPACE = 78, 24, 4  # pixels of a micro-batch


def micro_batches_in_rounds() -> str:
    """Draw who has which micro-batch with three ranks and with two, and the sum after each round."""
    parts: list[str] = []
    y = 16.0
    for num_ranks in (3, 2, 1):
        plural = "s" if num_ranks > 1 else ""
        parts.append(_text(4, y, f"{num_ranks} rank{plural}"))
        rounds = range(num_rounds(DEALT, num_ranks))
        total = ""
        for number in rounds:
            x = 70 + number * (CELL + 12)
            parts.append(_text(x + CELL / 2, y, f"round {number}", "middle"))
            for rank in range(num_ranks):
                top = y + 8 + rank * (HIGH + SPACE)
                if not number:
                    parts.append(_text(4, top + 16, f"rank {rank}"))
                shard = shard_of(number, rank, num_ranks, DEALT)
                term = "-0.0" if shard is None else f"g{shard}"
                held = number > 0 and rank == 0
                first = f"s + {term}" if held else term
                colour, ink = (GREY, "black") if shard is None else (BLUE, "white")
                size = f'width="{CELL}" height="{HIGH}"'
                parts.append(f'<rect x="{x}" y="{top}" {size} fill="{colour}"/>')
                parts.append(_text(x + CELL / 2, top + 16, first, "middle", ink))
                if shard is not None:
                    total = f"({total} + g{shard})" if total else f"g{shard}"
        y += 26 + num_ranks * (HIGH + SPACE)
        parts.append(_text(70, y, f"s = {total}"))
        y += 34
    return _svg(70 + DEALT * (CELL + 12), y - 20, parts)


# -- checkpoints

SAVE_S, LOAD_S, MTBF_S = 30.0, 120.0, 3 * 3600.0
RECOVERY_S = 1.0  # of a recovery in place
INTERVALS_S = tuple(60.0 * minutes for minutes in (2, 4, 8, 13.4, 20, 30, 45, 60))
SIMULATED_S = 400 * MTBF_S
MOST_LOST, LONGEST_S = 0.24, 3600.0


def lost_share(every_s: float) -> float:
    """Return the share of time that saves, repeated work and restarts take, to first order."""
    return SAVE_S / every_s + (every_s / 2 + LOAD_S) / MTBF_S


def simulated_share(every_s: float) -> float:
    """Return the share that a run has lost whose failures come at random."""
    rng = random.Random(0)
    now_s, kept_s = 0.0, 0.0
    failure_s = rng.expovariate(1 / MTBF_S)
    while now_s < SIMULATED_S:
        if now_s + every_s + SAVE_S <= failure_s:
            now_s += every_s + SAVE_S
            kept_s += every_s
        else:  # work since the last checkpoint is lost
            now_s = failure_s + LOAD_S
            failure_s = now_s + rng.expovariate(1 / MTBF_S)
    return 1 - kept_s / now_s


def checkpoints_and_failures() -> str:
    """Draw the lost share of a run over the time between two checkpoints."""
    wide, high, left, top = 600, 220, 50, 16

    def x(seconds: float) -> float:
        return left + wide * seconds / LONGEST_S

    def y(share: float) -> float:
        return top + high * (1 - share / MOST_LOST)

    parts = []
    for minutes in range(0, 61, 10):
        at = x(60 * minutes)
        parts.append(_line(f"M{at:.1f} {top}V{top + high}", GREY))
        parts.append(_text(at, top + high + 16, str(minutes), "middle"))
    for percent in range(0, 25, 4):
        parts.append(_line(f"M{left} {y(percent / 100):.1f}H{left + wide}", GREY))
        parts.append(_text(left - 6, y(percent / 100) + 4, f"{percent} %", "end"))
    parts.append(_text(left + wide, top + high + 34, "minutes between checkpoints", "end"))
    curve = [(s, lost_share(s)) for s in range(150, int(LONGEST_S) + 1, 30)]
    points = [f"{x(s):.1f} {y(share):.1f}" for s, share in curve]
    parts.append(_line(f"M{'L'.join(points)}", BLUE, ' stroke-width="2.5"'))
    for seconds in INTERVALS_S:
        place = f'cx="{x(seconds):.1f}" cy="{y(simulated_share(seconds)):.1f}"'
        parts.append(f'<circle {place} r="4" fill="{RED}"/>')
    best_s = math.sqrt(2 * SAVE_S * MTBF_S)
    parts.append(_line(f"M{x(best_s):.1f} {top}V{top + high}", GREEN, ' stroke-dasharray="4"'))
    parts.append(_text(x(best_s) + 6, top + 12, "sqrt(2 x save x MTBF)", fill=GREEN))
    in_place = RECOVERY_S / MTBF_S
    parts.append(_line(f"M{left} {y(in_place):.1f}H{left + wide}", PURPLE, ' stroke-width="2.5"'))
    parts.append(_text(left + wide - 4, y(in_place) - 6, "recovery in place", "end", PURPLE))
    parts.append(_text(x(3000.0), y(0.2) - 8, "checkpoints, formula", "end", BLUE))
    parts.append(_text(x(3000.0), y(0.2) + 16, "checkpoints, simulated", "end", RED))
    return _svg(left + wide + 20, top + high + 44, parts)


# -- parts on a ring

HOST_OF = "aabb"  # of each process
LOST_PROCESS = 1
WIDE, BETWEEN, DEEP = 150, 40, 24  # pixels of a process, and to the next one; of a block


def _blocks_of_ring(processes: Sequence[int], lost: int | None, y: float) -> list[str]:
    """Draw the parts of a sharded `pp=2,dp=2` mesh and their copies, in the order of the ring."""
    mesh = mesh_for(Mesh.parse("pp=2,dp=2"), len(processes))
    places = [mesh.coordinates(rank) for rank in range(mesh.size)]
    names = [",".join(f"{axis}={at}" for axis, at in place.items()) for place in places]
    hosts = ["ab".index(HOST_OF[process]) for process in processes]
    group: Any = SimpleNamespace(size=mesh.size, engine=SimpleNamespace(nodes=NodeMap.of(hosts)))
    ring = ring_of(group)
    parts = []
    for number, rank in enumerate(ring):
        x = 4 + number * (WIDE + BETWEEN)
        process, before = processes[rank], ring[number - 1]
        is_lost, saves = process == lost, processes[before] == lost
        parts.append(_text(x, y, f"process {process} on host {HOST_OF[process]}"))
        copy_colour = GREEN if saves else YELLOW
        blocks = ((names[rank], BLUE), (f"copy of {names[before]}", copy_colour))
        for row, (text, alive) in enumerate(blocks):
            top = y + 8 + row * (DEEP + 4)
            colour = LOST if is_lost else alive
            ink = "black" if colour == YELLOW else "white"
            size = f'width="{WIDE}" height="{DEEP}"'
            parts.append(f'<rect x="{x}" y="{top}" {size} fill="{colour}"/>')
            parts.append(_text(x + WIDE / 2, top + 16, text, "middle", ink))
        left, right, top = x + WIDE, x + WIDE + BETWEEN, y + 8 + DEEP / 2
        if number + 1 < len(ring):
            arrow = f"M{left + 3} {top}L{right - 4} {top + DEEP + 4}"
            head = f"M{right - 10} {top + DEEP - 5}L{right - 4} {top + DEEP + 4}h-9"
            parts += [_line(arrow, DARK), _line(head, DARK)]
    x, low = 4 + (len(ring) - 1) * (WIDE + BETWEEN) + WIDE, y + 8 + 2 * DEEP + 4
    around = f"M{x + 3} {y + 8 + DEEP / 2}h12V{low + 14}H{4 + WIDE / 2}V{low + 4}"
    head = f"M{4 + WIDE / 2 - 4} {low + 9}l4 -6l4 6"
    return [*parts, _line(around, DARK), _line(head, DARK)]


def parts_on_a_ring() -> str:
    """Draw parts and copies before a loss, at the loss, and on the mesh of the processes left."""
    remaining = [process for process in range(4) if process != LOST_PROCESS]
    rows: list[tuple[str, Sequence[int], int | None]] = [
        ("pp=2,dp=2: each process sends gradients to the next one", range(4), None),
        (f"process {LOST_PROCESS} is killed: the green copy has its part", range(4), LOST_PROCESS),
        (f"{mesh_for(Mesh.parse('pp=2,dp=2'), 3)}: new parts and new copies", remaining, None),
    ]
    parts, y = [], 16.0
    for title, processes, lost in rows:
        parts.append(f'<g font-weight="bold">{_text(4, y, title)}</g>')
        parts += _blocks_of_ring(processes, lost, y + 22)
        y += 132
    legend = {"trained part": BLUE, "copy": YELLOW, "copy that is used": GREEN, "lost": LOST}
    for number, (name, colour) in enumerate(legend.items()):
        x = 4 + number * 150
        parts.append(f'<rect x="{x}" y="{y - 20}" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(x + 18, y - 9, name))
    return _svg(4 * (WIDE + BETWEEN), y, parts)


ELASTIC = (
    members_and_epochs,
    micro_batches_in_rounds,
    checkpoints_and_failures,
    parts_on_a_ring,
)
