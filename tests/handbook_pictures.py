"""Draws the pictures of docs/handbook: `python tests/handbook_pictures.py`.

Each picture is drawn by the code that the page is about, so it cannot say anything else; a test holds the files to
what this writes. A picture is a function without arguments that returns SVG; its file has the function's name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from braid.schedule import Costs, simulate
from braid.schedule.bars import COLOURS, Bar, draw
from braid.schedule.collective import algorithm, collective_costs, program
from braid.schedule.pipeline import one_f_one_b
from braid.schedule.simulate import Timeline
from braid.topology import flat
from handbook_data_parallel import replicas

HANDBOOK = Path(__file__).resolve().parent.parent / "docs" / "handbook"
WIDTH = 760  # pixels of a time axis

FORWARD, TRANSFER, BACKWARD = COLOURS[:3]
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
    legend = {"forward": FORWARD, "backward": BACKWARD, "transfer": TRANSFER}
    return draw(lanes, bars, max(bar.end_s for bar in bars), legend=legend, width=WIDTH)


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
    colours = {"F": FORWARD, "B": BACKWARD}
    return [
        Bar(
            lane + i.rank,
            start_s + i.start_s,
            start_s + i.end_s,
            colours.get(i.action.kind, TRANSFER),
            f"{i.action.kind} {i.action.index}",
            "" if i.is_message else f"{i.action.kind}{i.action.index}",
            ("upper" if i.action.kind.startswith("send") else "lower") if i.is_message else "whole",
        )
        for i in timeline.intervals
    ]


PICTURES: tuple[Callable[[], str], ...] = (ways_of_training, replicas)


def main() -> None:
    """Write all pictures."""
    for picture in PICTURES:
        (HANDBOOK / f"{picture.__name__}.svg").write_text(picture())


if __name__ == "__main__":
    main()
