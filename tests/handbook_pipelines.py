"""Pictures of the pages on pipelines, each drawn from the programs that braid executes."""

from __future__ import annotations

from collections.abc import Callable

from braid.programs.schedule import Costs, Program, simulate
from braid.programs.schedule.bars import COLOUR_OF, SEND, Bar, draw
from braid.programs.schedule.pipeline import (
    SCHEDULES,
    asynchronous,
    gpipe,
    one_f_one_b,
    staleness,
    with_recompute,
)
from braid.programs.schedule.pipeline.measures import bubble, peak_activations
from braid.programs.schedule.simulate import Interval, Timeline
from braid.programs.topology import flat

RANKS, MICROBATCHES = 4, 8
COLOUR = {**COLOUR_OF, "copy": SEND}
FORWARD_S = 1.0  # of a micro-batch through the share of a rank; a backward takes twice as long
COST = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "R": 1.0}


def timeline_of(program: Program, nbytes: float = 0.0, bytes_per_s: float = 1.0) -> Timeline:
    """Simulate a program whose ranks all have the same share of the model."""
    # of the same batch: a larger number of micro-batches makes them smaller
    share = program.num_ranks / program.header.num_units * MICROBATCHES / program.header.num_indices
    costs = Costs(lambda _r, _a: nbytes, lambda _r, a: share * COST.get(a.kind, 0.0) * FORWARD_S)
    return simulate(program, costs, flat(program.num_ranks, 0.0, bytes_per_s), buffered=True)


def bars_of(timeline: Timeline, first_lane: int = 0, *, messages: bool = False) -> list[Bar]:
    """Return a bar for each work, and for each message if wanted."""
    return [
        Bar(
            first_lane + i.rank,
            i.start_s,
            i.end_s,
            COLOUR[i.action.kind.partition("_")[0]],
            _title(i),
            "" if i.is_message else str(i.action.index),
            ("upper" if i.action.kind.startswith("send") else "lower") if i.is_message else "whole",
        )
        for i in timeline.intervals
        if messages or not i.is_message
    ]


def weight_versions() -> str:
    """Three rules for the weights of micro-batches; the number of a work is the version it uses."""
    bars: list[Bar] = []
    lanes: list[str] = []
    notes: list[str] = []
    end_s = 0.0
    for rule, every in (("stash", 1), ("vertical_sync", 1), ("2bw", 3)):
        program = asynchronous((1, 1, 1), 9, versions=rule, every=every)
        timeline = timeline_of(program)
        version = {(a.kind, a.unit, a.index): a.version for own in program.ranks for a in own}
        for interval in timeline.intervals:
            kind, stage, i = interval.action[:3]
            if kind in {"F", "B"}:
                title = f"{_title(interval)}, version {version[kind, stage, i]}"
                lane, text = len(lanes) + interval.rank, str(version[kind, stage, i])
                bars.append(Bar(lane, interval.start_s, interval.end_s, COLOUR[kind], title, text))
        for stage, ages in staleness(program).items():
            lanes.append(f"{rule} {stage}")
            notes.append(f"at most {max(ages)} old")
        end_s = max(end_s, timeline.seconds)
    legend = {"forward": COLOUR["F"], "backward": COLOUR["B"]}
    return draw(lanes, bars, end_s, legend=legend, notes=notes)


def _title(interval: Interval) -> str:
    action = interval.action
    return f"{action.kind} of stage {action.unit}, micro-batch {action.index}"


def drawn(
    programs: dict[str, Program], kinds: str, *, messages: bool = False, nbytes: float = 0.0
) -> str:
    """Draw programs below each other, with bubble and memory of each."""
    bars: list[Bar] = []
    lanes: list[str] = []
    notes: list[str] = []
    end_s = 0.0
    for name, program in programs.items():
        timeline = timeline_of(program, nbytes)
        bars += bars_of(timeline, len(lanes), messages=messages)
        held = peak_activations(program)
        for rank in range(program.num_ranks):
            lanes.append(f"{name} {rank}" if name else f"rank {rank}")
            first = f", bubble {bubble(timeline):.1%}" if not rank else ""
            notes.append(f"holds {held[rank]:g}{first}")
        end_s = max(end_s, timeline.seconds)
    legend = {
        "F": "forward",
        "B": "backward",
        "R": "forward again",
        "I": "to inputs",
        "W": "to weights",
        "copy": "message",
    }
    shown = {text: COLOUR[kind] for kind, text in legend.items() if kind in kinds.split()}
    return draw(lanes, bars, end_s, legend=shown, notes=notes)


def model_by_hand() -> str:
    """One batch through four ranks, each with a quarter of the layers."""
    return drawn({"": gpipe(RANKS, 1)}, "F B")


def gpipe_micro_batches() -> str:
    """The same batch as one micro-batch, and cut into four and eight."""
    programs = {f"m={m} rank": gpipe(RANKS, m) for m in (4, 8)}
    return drawn(programs, "F B")


def accumulation() -> str:
    """Four micro-batches on one rank, and on two."""
    return drawn({"one rank": one_f_one_b(1, 4), "two ranks": one_f_one_b(2, 4)}, "F B")


def recomputation() -> str:
    """GPipe that keeps all activations, and that keeps the inputs of stages."""
    return drawn(
        {
            "all kept": gpipe(RANKS, 4),
            "inputs kept": with_recompute(gpipe(RANKS, 4), "always"),
        },
        "F B R",
    )


def schedules() -> str:
    """The same work in the order of six schedules."""
    names = ("gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "v_half")
    programs = {name: SCHEDULES[name](RANKS, MICROBATCHES) for name in names}
    return drawn(programs, "F B I W")


def two_streams() -> str:
    """Two devices with copies on the stream that computes, and on streams of their own."""
    lanes: list[str] = []
    bars: list[Bar] = []
    end_s = 0.0
    for name, own_streams in (("one stream", False), ("two streams", True)):
        copies = _copies(own_streams=own_streams)
        bars += [bar._replace(lane=bar.lane + len(lanes)) for bar in copies]
        lanes += [f"{name}, {part}" for part in ("compute 0", "copy", "compute 1")]
        end_s = max(end_s, *(bar.end_s for bar in copies))
    legend = {"forward": COLOUR["F"], "copy": COLOUR["copy"]}
    return draw(lanes, bars, end_s, legend=legend)


def _copies(*, own_streams: bool, num_microbatches: int = 5) -> list[Bar]:
    """Follow the rules of `LocalCarrier`: a copy waits for its tensor, and nothing else waits."""
    bars: list[Bar] = []
    compute_s, copy_s = 1.0, 0.6
    free = {"compute 0": 0.0, "copy": 0.0, "compute 1": 0.0}

    def run(lane: str, after_s: float, seconds: float, i: int, colour: str) -> float:
        begin_s = max(free[lane], after_s)
        free[lane] = begin_s + seconds
        bars.append(Bar(list(free).index(lane), begin_s, free[lane], colour, f"{lane} {i}", str(i)))
        return free[lane]

    for i in range(num_microbatches):
        made_s = run("compute 0", 0.0, compute_s, i, COLOUR["F"])
        begin_s = made_s if own_streams else max(made_s, free["compute 1"])
        there_s = run("copy", begin_s, copy_s, i, COLOUR["copy"])
        if not own_streams:  # both devices are busy with it
            free["compute 0"] = free["compute 1"] = there_s
        run("compute 1", there_s, compute_s, i, COLOUR["F"])
    return bars


PIPELINES: tuple[Callable[[], str], ...] = (
    model_by_hand,
    gpipe_micro_batches,
    accumulation,
    recomputation,
    schedules,
    two_streams,
    weight_versions,
)
