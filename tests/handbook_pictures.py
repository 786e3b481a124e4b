"""Draws the pictures of docs/handbook: `python tests/handbook_pictures.py`.

Each picture is drawn by the code that the page is about, so it cannot say anything else; a test holds the files to
what this writes. A picture is a function without arguments that returns SVG; its file has the function's name.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from pathlib import Path

from braid.plan.described import DescribedMachines
from braid.plan.search import Training, find_splits
from braid.plan.tables import comparison
from braid.programs.schedule import Costs, simulate
from braid.programs.schedule.bars import (
    BACKWARD,
    COLOURS,
    FORWARD,
    RECEIVE,
    SEND,
    WAIT,
    Bar,
    draw,
)
from braid.programs.schedule.blocks import CELL, row_of_blocks
from braid.programs.schedule.collective import algorithm, collective_costs, program
from braid.programs.schedule.collective.vocabulary import (
    OPERATIONS,
    ROOTED,
    held_at_end,
    held_at_start,
    num_slots,
)
from braid.programs.schedule.pipeline import one_f_one_b
from braid.programs.schedule.simulate import Timeline
from braid.programs.topology import DEVICES, Cluster, Level, flat
from braid.runtime.store.store_state import Missing, MultiGet, Request, Set, StoreState, StoreWait
from braid.train.models import described
from handbook_actors import lag_of_actors
from handbook_backwards import BACKWARDS
from handbook_calls import CALL_PICTURES
from handbook_data_parallel import DATA_PARALLEL
from handbook_elastic import ELASTIC
from handbook_interfaces import INTERFACES
from handbook_launching import LAUNCHING
from handbook_meshes import MESHES
from handbook_optimizers import parts_of_optimizers
from handbook_pipedream import PIPEDREAM
from handbook_pipelines import PIPELINES
from handbook_placed import placed_step
from handbook_racks import RACK_PICTURES
from handbook_sequences import SEQUENCES
from handbook_servers import LOST, SERVERS
from handbook_sharding import SHARDING
from handbook_slices import SLICES
from handbook_strategies import STRATEGIES

HANDBOOK = Path(__file__).resolve().parent.parent / "docs" / "handbook"
NUM_RANKS = 4
NETWORK = flat(NUM_RANKS, 5e-6, 10e9)  # 5 us per message, 10 GB/s per rank
FORWARD_S, BACKWARD_S = 1e-3, 2e-3  # of a micro-batch in one of the layers
LAYERS, MICROBATCHES = NUM_RANKS, 8
LAYER_BYTES, MICROBATCH_BYTES = 5e6, 1e6  # weights of a layer, activations of a micro-batch


def ways_of_training() -> str:
    """One step of the same model and batch on four ranks, five ways."""
    share = MICROBATCHES // NUM_RANKS  # of the batch, or of a layer

    def work(kind: str, times: int) -> tuple[str, float]:
        return kind, times * (FORWARD_S if kind == "F" else BACKWARD_S)

    model, batch = LAYERS * LAYER_BYTES, MICROBATCHES * MICROBATCH_BYTES
    summed = ("ring", "all_reduce", batch)
    weights = ("ring", "all_gather", LAYER_BYTES)
    ways = {
        "data": [
            work("F", share * LAYERS),
            work("B", share * LAYERS),
            ("ring", "all_reduce", model),
        ],
        "sharded": [weights, work("F", share)] * LAYERS
        + [weights, work("B", share), ("ring", "reduce_scatter", LAYER_BYTES)] * LAYERS,
        "server": [
            ("naive", "broadcast", model),
            work("F", share * LAYERS),
            work("B", share * LAYERS),
            ("naive", "reduce", model),
        ],
        "tensor": [work("F", share), summed] * LAYERS + [work("B", share), summed] * LAYERS,
    }
    bars, lanes = [], []
    for name, phases in ways.items():
        bars += _phases(len(lanes), phases)
        lanes += [f"{name} {rank}" for rank in range(NUM_RANKS)]
    seconds = {"F": FORWARD_S, "B": BACKWARD_S}
    pipeline = simulate(
        one_f_one_b(LAYERS, MICROBATCHES),
        Costs(lambda _r, _a: MICROBATCH_BYTES, lambda _r, action: seconds.get(action.kind, 0.0)),
        NETWORK,
    )
    bars += _timeline(len(lanes), 0.0, pipeline)
    lanes += [f"pipeline {rank}" for rank in range(NUM_RANKS)]
    legend = {"forward": FORWARD, "backward": BACKWARD, "send": SEND, "receive": RECEIVE}
    return draw(lanes, bars, max(bar.end_s for bar in bars), legend=legend)


def _phases(lane: int, phases: Sequence[tuple[str, float] | tuple[str, str, float]]) -> list[Bar]:
    """Draw work (kind, seconds) and collectives (algorithm, operation, bytes), one after the other."""
    bars, now_s = [], 0.0
    for phase in phases:
        if len(phase) == 3:
            name, operation, nbytes = phase
            made = program(
                algorithm(name, operation, NUM_RANKS, root=0 if name == "naive" else None)
            )
            timeline = simulate(made, collective_costs(made, nbytes), NETWORK)
            bars += _timeline(lane, now_s, timeline)
            now_s += timeline.seconds
            continue
        kind, seconds = phase
        colour = FORWARD if kind == "F" else BACKWARD
        bars += [
            Bar(lane + rank, now_s, now_s + seconds, colour, kind, kind)
            for rank in range(NUM_RANKS)
        ]
        now_s += seconds
    return bars


def _timeline(lane: int, start_s: float, timeline: Timeline) -> list[Bar]:
    """Draw a simulated program: sends in the upper half, receives in the lower one."""
    colours = {"F": FORWARD, "B": BACKWARD, "send": SEND}
    return [
        Bar(
            lane + i.rank,
            start_s + i.start_s,
            start_s + i.end_s,
            colours.get(i.action.kind.partition("_")[0], RECEIVE),
            f"{i.action.kind} {i.action.index}",
            "" if i.is_message else f"{i.action.kind}{i.action.index}",
            ("upper" if i.action.kind.startswith("send") else "lower") if i.is_message else "whole",
        )
        for i in timeline.intervals
    ]


NAME, GAP = 56, 66  # pixels: a rank's name, between before and after
PANEL = 2 * NUM_RANKS * CELL + NAME + GAP


def before_and_after() -> str:
    """What each rank holds before and after every collective: a colour per rank, a number per block."""
    high = 30 + NUM_RANKS * (CELL + 2)
    size = f'width="{2 * PANEL + 50}" height="{len(OPERATIONS) // 2 * high}"'
    text = 'font-family="sans-serif" font-size="12"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} {text}>']
    for number, operation in enumerate(OPERATIONS):
        left, top = 4 + number % 2 * (PANEL + 40), number // 2 * high + 18
        root = 0 if operation in ROOTED else -1
        slots = num_slots(operation, NUM_RANKS, NUM_RANKS)
        what = (operation, NUM_RANKS, slots if operation == "all_to_all" else NUM_RANKS, root)
        title = operation if root < 0 else f"{operation}, root {root}"
        parts.append(f'<text x="{left}" y="{top - 5}" font-weight="bold">{title}</text>')
        sides = (held_at_start(*what), held_at_end(*what))
        for rank in range(NUM_RANKS):
            y = top + rank * (CELL + 2)
            parts.append(f'<text x="{left}" y="{y + 18}">rank {rank}</text>')
            for side, held in enumerate(sides):
                x = left + NAME + side * (NUM_RANKS * CELL + GAP)
                # an all-to-all receives into a second buffer
                shown = {slot % NUM_RANKS: content for slot, content in held[rank].items()}
                parts += row_of_blocks(x, y, shown, NUM_RANKS, NUM_RANKS)
            if rank == 1:
                arrow = left + NAME + NUM_RANKS * CELL + GAP // 2
                parts.append(f'<text x="{arrow}" y="{y + 34}" text-anchor="middle">becomes</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


STORE_COLOURS = {
    "Set": SEND,
    "Wait": WAIT,
    "MultiGet": RECEIVE,
    "missing": LOST,
}
HOST = 4  # ranks of a host, which are a row of the mesh


def groups_of_a_mesh() -> str:
    """An all-reduce on two hosts of four ranks, a colour for each group that takes part in it."""
    hosts = Cluster(
        [
            Level(name="host", size=HOST, latency_s=5e-6, bytes_per_s=10e9),
            Level(name="network", size=2, latency_s=20e-6, bytes_per_s=10e9),
        ]
    )
    made = program(algorithm("hierarchical", "all_reduce", hosts.num_ranks, row=HOST))
    timeline = simulate(made, collective_costs(made, 1 << 22), hosts)
    names = [f"row {row}" for row in range(2)] + [f"column {place}" for place in range(HOST)]
    colours = dict(zip(names, COLOURS, strict=False))
    bars = []
    for interval in timeline.intervals:
        rank, peer = interval.rank, interval.action.peer
        if not interval.is_message:
            continue
        inside = rank // HOST == peer // HOST
        name = f"row {rank // HOST}" if inside else f"column {rank % HOST}"
        sends = interval.action.kind.startswith("send")
        title = f"{name}: block {interval.action.unit} {'to' if sends else 'from'} rank {peer}"
        part = "upper" if sends else "lower"
        bars.append(Bar(rank, interval.start_s, interval.end_s, colours[name], title, part=part))
    lanes = [f"rank {rank}" for rank in range(hosts.num_ranks)]
    return draw(lanes, bars, timeline.seconds, legend=colours)


COMES_MS = (0.0, 5.0, 9.0, 22.0)  # when each rank is started
TRIP_MS, DEADLINE_MS = 1.5, 20.0  # of a message to the store or back; of a wait
KILLED = 2  # rank that does not come to the second meeting


def two_meetings() -> str:
    """Four ranks meet through the state machine of a store, twice; the second time one is missing."""
    state = StoreState()
    everybody = {
        topic: [f"{topic}/{rank}" for rank in range(NUM_RANKS)] for topic in ("names", "mapped")
    }
    left: list[list[Request]] = []
    for rank in range(NUM_RANKS):
        first = [
            Set(f"names/{rank}", b""),
            StoreWait(everybody["names"]),
            MultiGet(everybody["names"]),
        ]
        second = [Set(f"mapped/{rank}", b""), StoreWait(everybody["mapped"])]
        left.append(first if rank == KILLED else first + second)
    arrivals = [(int((ms + TRIP_MS) * 1e6), rank) for rank, ms in enumerate(COMES_MS)]
    trip_ns, deadline_ns = int(TRIP_MS * 1e6), int(DEADLINE_MS * 1e6)
    sent = {rank: (now_ns - trip_ns, left[rank].pop(0)) for now_ns, rank in arrivals}
    bars = []
    heapq.heapify(arrivals)
    while arrivals or state.num_waiting:
        expires_ns = state.next_deadline_ns()
        if arrivals and (expires_ns is None or arrivals[0][0] <= expires_ns):
            now_ns, rank = heapq.heappop(arrivals)
            due = state.request(rank, now_ns, sent[rank][1], now_ns=now_ns, timeout_ns=deadline_ns)
        else:
            now_ns = expires_ns or 0
            due = state.expire(now_ns)
        for delivery in due:
            rank = delivery.client
            begin_ns, request = sent[rank]
            end_ns = now_ns + trip_ns
            missing = isinstance(delivery.reply, Missing)
            kind = type(request).__name__.removeprefix("Store")
            colour = STORE_COLOURS["missing" if missing else kind]
            label = (
                f"missing: {', '.join(delivery.reply.keys)}"
                if missing
                else kind.removeprefix("Multi")
            )
            bars.append(Bar(rank, begin_ns / 1e9, end_ns / 1e9, colour, f"{request}", label))
            if left[rank] and not missing:
                sent[rank] = (end_ns, left[rank].pop(0))
                heapq.heappush(arrivals, (end_ns + trip_ns, rank))
    lanes = [f"rank {rank}" for rank in range(NUM_RANKS)]
    seconds = max(bar.end_s for bar in bars)
    return draw(lanes, bars, seconds, legend=STORE_COLOURS)


def kinds_of_splits() -> str:
    """Draw the fastest split of each kind for a GPT on four hosts of eight devices."""
    levels = [
        Level(name="host", size=8, latency_s=3e-6, bytes_per_s=300e9),
        Level(name="rack", size=4, latency_s=10e-6, bytes_per_s=25e9),
    ]
    device = DEVICES["a100-40gb"]
    model, _ = described("", "gpt2-medium", 1024, device, "bf16")
    machines = DescribedMachines(Cluster(levels), device, dtype="bf16")
    return comparison(find_splits(model, machines, Training(64, dtype="bf16")))


PICTURES: tuple[Callable[[], str], ...] = (
    ways_of_training,
    *DATA_PARALLEL,
    parts_of_optimizers,
    *PIPELINES,
    *PIPEDREAM,
    *SEQUENCES,
    *SLICES,
    *SHARDING,
    *MESHES,
    *RACK_PICTURES,
    *SERVERS,
    lag_of_actors,
    *CALL_PICTURES,
    *BACKWARDS,
    *LAUNCHING,
    placed_step,
    *INTERFACES,
    *STRATEGIES,
    *ELASTIC,
    before_and_after,
    groups_of_a_mesh,
    two_meetings,
    kinds_of_splits,
)


def main() -> None:
    """Write all pictures."""
    for picture in PICTURES:
        (HANDBOOK / f"{picture.__name__}.svg").write_text(picture())


if __name__ == "__main__":
    main()
