"""Divides the time of a pipeline's ranks, as measured and as the simulator predicts it.

                 warm-up            steady                 cool-down
    rank 0       F F F F . . .      B F B F B F . B        . B B B .
                                    ^ first backward       ^ last forward has ended

    work         forwards, backwards, recomputation
    transfers    exposed: in sends and receives, without waiting for another rank
    idle         the rest of a pass, from its first action on any rank to its last one on any rank

The bubble is the idle share of a pass: overhead / (1 + overhead), where the formulas of schedules
give overhead over the work. The prediction is a simulation of the program with the median times of
the rank's own actions, so it contains only waits that the order of the work requires.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from braid.launch.observe.figures import Box, Lane, Picture, boxes_of, time_ticks
from braid.launch.observe.intervals import Cover
from braid.launch.observe.passes import Pass, Passes, Timed, passes, schedule_name
from braid.launch.observe.timeline import RankTimeline
from braid.programs.schedule import Action, Costs, simulate
from braid.programs.schedule.simulate import Route, Timeline
from braid.runtime.text import duration_text

__all__ = ["PipelineView", "pipeline_views"]

ROLES = {"F": "forward", "B": "backward", "I": "backward", "W": "weights", "R": "recompute"}
MAX_VIEWS = 4  # number of replicas that are shown
LEAST_LABEL = 3.5  # width in percent that a label such as F12 needs


class TimeDivision(NamedTuple):
    """Division of a rank's time in a pass of a pipeline, in nanoseconds.

    Attributes:
        work_ns: Time of forwards, backwards and recomputation.
        transfer_ns: Time in sends and receives, without waiting for another rank.
        warmup_ns: Idle time before the first backward.
        steady_ns: Idle time between the first backward and the end of the last forward.
        cooldown_ns: Idle time after the last forward.
    """

    work_ns: float
    transfer_ns: float
    warmup_ns: float
    steady_ns: float
    cooldown_ns: float

    @property
    def bubble(self) -> float:
        """Idle share of the pass."""
        idle_ns = self.warmup_ns + self.steady_ns + self.cooldown_ns
        total_ns = idle_ns + self.work_ns + self.transfer_ns
        return idle_ns / total_ns if total_ns else 0.0


class StageRow(NamedTuple):
    """Time of one rank: medians over the passes, and the prediction."""

    rank: int
    measured: TimeDivision
    predicted: TimeDivision


class PipelineView(NamedTuple):
    """One pipeline of a run.

    Attributes:
        title: Schedule, ranks and micro-batches.
        num_passes: Number of passes that the medians are taken over.
        measured_ns: Median duration of a pass.
        predicted_ns: Duration of the simulated pass.
        rows: Division of time, by rank.
        pictures: The median pass, and the simulated one on the same axis.
        kinds: Kinds of work in the pipeline, as roles (CSS classes that determine colours).
    """

    title: str
    num_passes: int
    measured_ns: float
    predicted_ns: float
    rows: tuple[StageRow, ...]
    pictures: tuple[Picture, ...]
    kinds: tuple[str, ...]


class _Span(NamedTuple):
    """A piece of work or a transfer."""

    kind: str
    microbatch: int
    start_ns: float
    end_ns: float


class _RankPass(NamedTuple):
    """Work and transfers of one rank in a pass."""

    work: tuple[_Span, ...]
    transfers: tuple[tuple[int, int], ...]
    waits: tuple[tuple[int, int], ...]


def pipeline_views(timelines: Sequence[RankTimeline]) -> tuple[PipelineView, ...]:
    """Return the pipelines of a recording; none if it has no complete pass."""
    return tuple(_view(one) for one in passes(timelines)[:MAX_VIEWS])


def _view(recording: Passes) -> PipelineView:
    program = recording.program
    timeline, sends_ns = _simulated(recording)
    predicted = [_predicted_rank(timeline, rank, sends_ns) for rank in range(program.num_ranks)]
    predicted_ns = timeline.seconds * 1e9
    divisions = [_divided(one, recording.waits) for one in recording.passes]
    rows = tuple(
        StageRow(
            recording.ranks[rank],
            TimeDivision(
                *(median(column) for column in zip(*(d[rank] for d in divisions), strict=True))
            ),
            _division(predicted[rank], 0, round(predicted_ns)),
        )
        for rank in range(program.num_ranks)
    )
    typical = sorted(recording.passes, key=lambda one: one.dur_ns)[len(recording.passes) // 2]
    span = max(typical.dur_ns, round(predicted_ns), 1)
    measured = [
        _measured_rank(actions, waits)
        for actions, waits in zip(typical.actions, recording.waits, strict=True)
    ]
    pictures = (
        _picture(
            f"Measured: the median pass, {duration_text(typical.dur_ns)}",
            recording.ranks,
            measured,
            (typical.start_ns, span),
        ),
        _picture(
            f"Predicted by the simulator, {duration_text(predicted_ns)}",
            recording.ranks,
            predicted,
            (0, span),
        ),
    )
    name = schedule_name(program) or "a schedule without a name"
    ranks = ", ".join(map(str, recording.ranks))
    kinds = {ROLES[s.kind] for rank in measured for s in rank.work}
    return PipelineView(
        f"{name}, {program.header.num_indices} micro-batches, ranks {ranks}",
        len(recording.passes),
        median(one.dur_ns for one in recording.passes),
        predicted_ns,
        rows,
        pictures,
        tuple(role for role in dict.fromkeys(ROLES.values()) if role in kinds),
    )


class _Instant:
    """A network that takes no time: transfers cost their rank time instead."""

    bytes_per_s = ()
    burst_bytes = ()

    def route(self, _source: int, _target: int, _nbytes: float) -> Route:
        """Return a route that takes no time."""
        return Route(0.0, ())


def _simulated(measured: Passes) -> tuple[Timeline, dict[tuple[str, int], float]]:
    """Simulate the program; return also the seconds of the send after each kind of work."""
    seconds = measured.seconds
    sends = {
        (kind, stage): seconds.get((send, stage), 0.0)
        for kind, send in (("F", "send_f"), ("B", "send_b"), ("I", "send_b"))
        for stage in range(measured.program.header.num_units)
    }

    def seconds_of(_rank: int, action: Action) -> float:
        place = action.kind, action.unit
        return seconds.get(place, 0.0) + sends.get(place, 0.0)

    costs = Costs(lambda *_: 0.0, seconds_of)
    return simulate(measured.program, costs, _Instant(), buffered=True), sends


def _predicted_rank(
    timeline: Timeline, rank: int, sends: dict[tuple[str, int], float]
) -> _RankPass:
    work, transfers = [], []
    for interval in timeline.intervals:
        action = interval.action
        if interval.rank != rank or interval.is_message:
            continue
        start_ns, end_ns = interval.start_s * 1e9, interval.end_s * 1e9
        sent_ns = sends.get((action.kind, action.unit), 0.0) * 1e9
        if action.kind in ROLES:
            work.append(_Span(action.kind, action.index, start_ns, end_ns - sent_ns))
            transfers.append((round(end_ns - sent_ns), round(end_ns)))
        else:
            transfers.append((round(start_ns), round(end_ns)))
    return _RankPass(tuple(work), tuple(transfers), ())


def _measured_rank(actions: Sequence[Timed], waits: Cover) -> _RankPass:
    work = tuple(_Span(a.kind, a.microbatch, a.start_ns, a.end_ns) for a in actions if a.is_work)
    messages = Cover((a.start_ns, a.end_ns) for a in actions if not a.is_work)
    inside = waits.clipped(actions[0].start_ns, max(a.end_ns for a in actions))
    return _RankPass(work, messages.minus(waits).pieces, tuple(inside))


def _divided(one: Pass, waits: Sequence[Cover]) -> list[TimeDivision]:
    return [
        _division(_measured_rank(actions, rank_waits), one.start_ns, one.end_ns)
        for actions, rank_waits in zip(one.actions, waits, strict=True)
    ]


def _division(rank: _RankPass, start_ns: int, end_ns: int) -> TimeDivision:
    work = Cover((round(s.start_ns), round(s.end_ns)) for s in rank.work).minus(Cover(rank.waits))
    transfers = Cover(rank.transfers).minus(work)
    busy = Cover((*work.pieces, *transfers.pieces))
    backwards = [round(s.start_ns) for s in rank.work if s.kind in "BI"]
    forwards = [round(s.end_ns) for s in rank.work if s.kind == "F"]
    first_backward = min(backwards, default=end_ns)
    last_forward = max(first_backward, max(forwards, default=start_ns))

    def idle(begin: int, end: int) -> float:
        return max(0, end - begin) - busy.within(begin, end)

    return TimeDivision(
        work.within(start_ns, end_ns),
        transfers.within(start_ns, end_ns),
        idle(start_ns, first_backward),
        idle(first_backward, last_forward),
        idle(last_forward, end_ns),
    )


def _picture(
    title: str, numbers: Sequence[int], ranks: Iterable[_RankPass], window: tuple[int, int]
) -> Picture:
    start_ns, span = window
    lanes = []
    for number, rank in zip(numbers, ranks, strict=True):
        work = [
            (s.start_ns, s.end_ns, ROLES[s.kind], _title(s), f"{s.kind}{s.microbatch}")
            for s in rank.work
        ]
        states = [
            (begin, end, role, f"{role}, {duration_text(end - begin)}", "")
            for role, pieces in (("transfer", rank.transfers), ("wait", rank.waits))
            for begin, end in pieces
            if end > begin
        ]
        shown: list[tuple[Box, ...]] = [
            boxes_of(rows, start_ns, span, least_label=LEAST_LABEL) for rows in (work, states)
        ]
        lanes.append(Lane(number, shown[0], shown[1], ()))
    return Picture(title, tuple(lanes), time_ticks(span))


def _title(span: _Span) -> str:
    role, lasted = ROLES[span.kind], duration_text(span.end_ns - span.start_ns)
    return f"{span.kind}{span.microbatch}: {role} of micro-batch {span.microbatch}, {lasted}"
