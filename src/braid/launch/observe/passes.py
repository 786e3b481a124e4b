"""Finds the passes of a pipeline in a recording, and the program that its ranks have executed.

Each rank records its actions in the order in which it takes them: `F0`, `B0`, `recv_b1` with the
number of the micro-batch. So the recording has the program in it: a rank's actions until one comes
again are a pass, such as a training step, and messages follow from who computes which stage.

Ranks that have the same stages are replicas: the first of each kind make a pipeline, the second
ones the next. Passes are counted from the end, since event rings lose the beginning.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from braid.errors import ConfigError
from braid.launch.observe.intervals import Cover
from braid.launch.observe.timeline import RankTimeline
from braid.programs.schedule import Action, Program, validate
from braid.programs.schedule.files import schedule_named
from braid.programs.schedule.known import RULES
from braid.programs.schedule.pipeline import LOOPED, TRAINING, StageWork, pipeline_program
from braid.programs.schedule.pipeline.vocabulary import TRAIN

__all__ = ["WORK", "Pass", "Passes", "Timed", "passes", "schedule_name"]

ACTION = re.compile(r"(F|B|I|W|R|(?:send|recv)_[fb])(\d+)")
WORK = frozenset("FBIWR")
BACKWARD = frozenset("BI")


class Timed(NamedTuple):
    """An action of a rank with its times.

    Attributes:
        kind: Kind of the action.
        stage: Number of the stage.
        microbatch: Number of the micro-batch.
        start_ns: Begin.
        end_ns: End.
        wait_ns: Time during the action for which the rank was blocked by another rank.
    """

    kind: str
    stage: int
    microbatch: int
    start_ns: int
    end_ns: int
    wait_ns: int

    @property
    def is_work(self) -> bool:
        """Whether the action computes, rather than sends or receives."""
        return self.kind in WORK

    @property
    def own_ns(self) -> int:
        """Duration without waits."""
        return self.end_ns - self.start_ns - self.wait_ns


class Pass(NamedTuple):
    """One pass of a pipeline: the actions of each rank, in order."""

    actions: tuple[tuple[Timed, ...], ...]

    @property
    def start_ns(self) -> int:
        """Begin of the first action."""
        return min(of_rank[0].start_ns for of_rank in self.actions)

    @property
    def end_ns(self) -> int:
        """End of the last action."""
        return max(action.end_ns for of_rank in self.actions for action in of_rank)

    @property
    def dur_ns(self) -> int:
        """Duration of the pass."""
        return self.end_ns - self.start_ns


class Passes(NamedTuple):
    """All passes of one pipeline that execute the same program.

    Attributes:
        program: The program, with its messages.
        ranks: Rank in the run of each rank of the program.
        waits: Moments at which each of these ranks was blocked.
        passes: Passes in order of time.
    """

    program: Program
    ranks: tuple[int, ...]
    waits: tuple[Cover, ...]
    passes: tuple[Pass, ...]

    @property
    def seconds(self) -> dict[tuple[str, int], float]:
        """Median seconds of each kind of action of each stage, without waits."""
        spent: dict[tuple[str, int], list[int]] = defaultdict(list)
        for one in self.passes:
            for actions in one.actions:
                for action in actions:
                    spent[action.kind, action.stage].append(action.own_ns)
        return {place: median(times) / 1e9 for place, times in spent.items()}


def passes(timelines: Sequence[RankTimeline]) -> list[Passes]:
    """Return the training passes of each pipeline in a recording.

    Only passes of the program that was executed most often are returned. Incomplete passes, passes
    with a program that breaks a rule of pipelines, and pipelines without passes are omitted.
    """
    runs = {t.rank: list(_runs(t)) for t in timelines}
    by_rank = {timeline.rank: timeline for timeline in timelines}
    pipelines = []
    for ranks in _pipelines(runs):
        of_ranks = [runs[rank] for rank in ranks]
        count = min(map(len, of_ranks))
        programs: dict[tuple[tuple[Action, ...], ...], Program] = {}
        by_actions: dict[tuple[tuple[Action, ...], ...], list[Pass]] = defaultdict(list)
        for actions in zip(*(of_rank[len(of_rank) - count :] for of_rank in of_ranks), strict=True):
            if (program := _program(actions)) is not None and _overlap(actions):
                programs[program.ranks] = program
                by_actions[program.ranks].append(Pass(actions))
        valid = [key for key, program in programs.items() if not validate(program, RULES)]
        if valid:
            key = max(valid, key=lambda one: len(by_actions[one]))
            waits = tuple(by_rank[rank].waits for rank in ranks)
            pipelines.append(Passes(programs[key], ranks, waits, tuple(by_actions[key])))
    return pipelines


def schedule_name(program: Program) -> str:
    """Return the name of the schedule with the same order of work as a program; else empty."""
    orders = [_order(actions) for actions in program.ranks]
    chunks = program.header.num_units // program.num_ranks
    names = [f"{name}:{chunks}" for name in LOOPED] if chunks > 2 else TRAINING
    for name in names:
        try:
            known = schedule_named(name)(program.num_ranks, program.header.num_indices)
        except ConfigError:  # this schedule does not exist for these numbers
            continue
        if [_order(actions) for actions in known.ranks] == orders:
            return name
    return ""


def _order(actions: Sequence[tuple[object, ...]]) -> list[tuple[object, ...]]:
    return [action[:3] for action in actions if action[0] in WORK - {"R"}]


def _runs(timeline: RankTimeline) -> Iterator[tuple[Timed, ...]]:
    """Yield the actions of a rank, cut before each one that has been there since the last cut."""
    run: list[Timed] = []
    seen: set[tuple[str, int, int]] = set()
    actions = list(_actions(timeline))
    for action in actions[_first_whole(actions) if timeline.num_lost else 0 :]:
        if action[:3] in seen:
            yield tuple(run)
            run, seen = [], set()
        seen.add(action[:3])
        run.append(action)
    if run:
        yield tuple(run)


def _actions(timeline: RankTimeline) -> Iterator[Timed]:
    for i in timeline.intervals:
        if i.role in {"phase", "instant"} and not i.open and (match := ACTION.fullmatch(i.name)):
            waited = timeline.waits.within(i.start_ns, i.end_ns)
            yield Timed(match[1], int(match[2]), i.seq, i.start_ns, i.end_ns, waited)


def _first_whole(actions: Sequence[Timed]) -> int:
    """Return the position of the first complete pass; earlier actions may be overwritten.

    Passes begin with the first micro-batch in the first stage of the rank.
    """
    first = min((a.stage for a in actions if a.kind == "F"), default=0)
    begins = [i for i, a in enumerate(actions) if a.stage == first and not a.microbatch]
    for kind in ("recv_f", "F"):
        for i in begins:
            if actions[i].kind == kind:
                return i
    return len(actions)


def _pipelines(runs: Mapping[int, Sequence[Sequence[Timed]]]) -> list[tuple[int, ...]]:
    """Return the ranks of each pipeline, in the order of their first stages."""
    ranks_of: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in sorted(runs):
        stages = {action.stage for run in runs[rank] for action in run if action.kind == "F"}
        if stages:
            ranks_of[tuple(sorted(stages))].append(rank)
    kinds = sorted(ranks_of)
    stages_of_all = Counter(stage for kind in kinds for stage in kind)
    if sorted(stages_of_all.elements()) != list(range(len(stages_of_all))):
        return []  # stages are missing, or divided differently among replicas
    return list(zip(*(ranks_of[kind] for kind in kinds), strict=False))


def _program(actions: Sequence[Sequence[Timed]]) -> Program | None:
    """Return the program of a training pass; None for other passes."""
    work = [[StageWork(*action[:3]) for action in of_rank if action.is_work] for of_rank in actions]
    if not any(item.kind in BACKWARD for of_rank in work for item in of_rank):
        return None
    homes = {item.stage: rank for rank, of_rank in enumerate(work) for item in of_rank}
    if sorted(homes) != list(range(len(homes))):
        return None
    placement = [homes[stage] for stage in range(len(homes))]
    num_microbatches = 1 + max(item.microbatch for of_rank in work for item in of_rank)
    return pipeline_program("recorded", work, placement, num_microbatches, operation=TRAIN)


def _overlap(actions: Sequence[Sequence[Timed]]) -> bool:
    """Return whether the actions of all ranks are of one time, and so of one pass."""
    begin = max(of_rank[0].start_ns for of_rank in actions)
    return begin < min(max(action.end_ns for action in of_rank) for of_rank in actions)
