"""Vocabulary of pipelines: the work of stages on micro-batches, and messages between stages.

A model is cut into stages, and a rank holds one or several of them. A backward runs as a whole (B),
or in two parts: the gradient of the stage's input (I), which the previous stage waits for, and the
gradient of its weights (W), which no other stage needs.

    F    forward of a micro-batch                       needs the output of the previous stage
    B    whole backward                                 needs F, and the gradient of the next stage
    I    backward to the input of the stage             needs the same as B
    W    backward to the weights of the stage           needs I
    R    forward once more, to have what backward needs needs F; before the gradient comes
    STEP optimizer step of the stage                    needs B or W of all micro-batches

Without R an F keeps all activations for backward; with R it keeps only the input of the stage.
Messages name the stage that sends or receives: `send_f2.0>3` sends the output of stage 2, and
`recv_f3.0<2` receives it for stage 3. Stages that follow each other on one rank send nothing.
Programs train or infer; programs that infer contain only forwards.
"""

from __future__ import annotations

from collections.abc import Iterable

from braid.programs.schedule.matching import Matching, Moment, Place
from braid.programs.schedule.program import LOCAL, RECEIVE, SEND, Action, Kind, Program, Vocabulary
from braid.programs.schedule.validate import Rules, Violation

__all__ = [
    "INFER",
    "PIPELINE",
    "PIPELINE_RULES",
    "TRAIN",
    "WORK",
    "check_data",
    "check_work",
    "stage_ranks",
    "work_ranks",
]

TRAIN, INFER = "train", "infer"
WORK = ("F", "B", "I", "W")

PIPELINE = Vocabulary(
    name="pipeline",
    kinds={
        "F": Kind(LOCAL, "forward of a micro-batch"),
        "B": Kind(LOCAL, "backward of a micro-batch"),
        "I": Kind(LOCAL, "backward of a micro-batch to the input of the stage"),
        "W": Kind(LOCAL, "backward of a micro-batch to the weights of the stage"),
        "R": Kind(LOCAL, "forward of a micro-batch once more, since F has kept only the input"),
        "STEP": Kind(LOCAL, "optimizer step of a stage, after all of its backwards"),
        "send_f": Kind(SEND, "send the output of F to the next stage"),
        "recv_f": Kind(RECEIVE, "receive the output of F of the previous stage"),
        "send_b": Kind(SEND, "send the gradient of the input of F to the previous stage"),
        "recv_b": Kind(RECEIVE, "receive the gradient of the output of F"),
    },
    unit_name="stage",
    index_name="micro-batch",
    posts="run",
)


def stage_ranks(program: Program) -> dict[int, int]:
    """Return the rank of each stage: the first rank with work of the stage."""
    ranks: dict[int, int] = {}
    for rank, actions in enumerate(program.ranks):
        for action in actions:
            if action.kind in WORK:
                ranks.setdefault(action.unit, rank)
    return ranks


def work_ranks(program: Program) -> dict[tuple[int, int], int]:
    """Return the first rank with work of each (stage, micro-batch)."""
    ranks: dict[tuple[int, int], int] = {}
    for rank, actions in enumerate(program.ranks):
        for action in actions:
            if action.kind in WORK:
                ranks.setdefault((action.unit, action.index), rank)
    return ranks


def check_work(program: Program) -> list[Violation]:
    """Check that all work of each stage is done once for every micro-batch, on one rank."""
    header = program.header
    if header.operation not in {TRAIN, INFER} or header.root != -1:
        text = f"the header must name {TRAIN} or {INFER} and no root, got {header}"
        return [Violation("header", -1, -1, text)]
    home = stage_ranks(program)
    violations = []
    by_rank: list[set[tuple[str, int, int]]] = []
    for rank, actions in enumerate(program.ranks):
        ended: set[tuple[str, int, int]] = set()
        by_rank.append(ended)
        for position, action in enumerate(actions):
            violations += [
                Violation(rule, rank, position, f"{PIPELINE.describe(action)} {problem}")
                for rule, problem in _problems(program, home, ended, rank, action)
            ]
            ended.add((action.kind, action.unit, action.index))
    for stage in range(header.num_units):
        if stage not in home:
            violations.append(Violation("work", -1, -1, f"no rank does stage {stage}"))
            continue
        missing = _missing(program, stage, by_rank[home[stage]])
        if missing:
            text = f"ends without {', '.join(missing)}"
            violations.append(Violation("work", home[stage], -1, text))
    return violations


def _problems(
    program: Program,
    home: dict[int, int],
    finished: set[tuple[str, int, int]],
    rank: int,
    action: Action,
) -> list[tuple[str, str]]:
    """Return the rules that an action breaks by itself, and how."""
    header = program.header
    problems = []
    if not (0 <= action.unit < header.num_units and 0 <= action.index < header.num_indices):
        below = f"a stage below {header.num_units} and a micro-batch below {header.num_indices}"
        problems.append(("units", f"is not of {below}"))
    elif home.get(action.unit, rank) != rank:
        problems.append(("units", f"is not on rank {home[action.unit]}, which has that stage"))
    if (action.kind, action.unit, action.index) in finished:
        problems.append(("work", "a second time"))
    if header.operation == INFER and action.kind not in {"F", "send_f", "recv_f"}:
        problems.append(("work", "is not part of a program that infers"))
    if action.kind == "R" and {(k, *action[1:3]) for k in ("recv_b", "B", "I")} & finished:
        problems.append(("work", "comes too late: its result is needed before"))
    if action.kind == "STEP":
        ends = {i for kind, stage, i in finished if kind in {"B", "W"} and stage == action.unit}
        if late := sorted(set(range(header.num_indices)) - ends):
            problems.append(("work", f"comes before the backward of micro-batch {late[0]}"))
    halves = {("I", *action[1:3]), ("W", *action[1:3])}
    whole = ("B", *action[1:3])
    if (action.kind == "B" and halves & finished) or (action.kind in "IW" and whole in finished):
        problems.append(("work", "beside the same backward in another form"))
    return problems


def _missing(program: Program, stage: int, finished: set[tuple[str, int, int]]) -> list[str]:
    missing = []
    for index in range(program.header.num_indices):
        if ("F", stage, index) not in finished:
            missing.append(f"F{stage}.{index}")
        if program.header.operation == INFER or ("B", stage, index) in finished:
            continue
        if ("I", stage, index) not in finished and ("W", stage, index) not in finished:
            missing.append(f"B{stage}.{index}")
            continue
        missing += [f"{k}{stage}.{index}" for k in "IW" if (k, stage, index) not in finished]
    return missing


def check_data(program: Program, matching: Matching, _moments: Iterable[Moment]) -> list[Violation]:
    """Check that each action's data is computed or received before it, from the right action."""
    violations = []
    home, last = work_ranks(program), program.header.num_units - 1
    for rank, actions in enumerate(program.ranks):
        has: set[tuple[str, int, int]] = set()
        for position, action in enumerate(actions):
            missing = [
                f"{names[0]} of stage {stage}"
                if stage != action.unit
                else f"{names[0]} of micro-batch {action.index}"
                for names, stage in _needs(action, home, rank, last)
                if not any((name, stage, action.index) in has for name in names)
            ]
            has.add((action.kind, action.unit, action.index))
            if missing:
                text = f"{PIPELINE.describe(action)} comes before {missing[0]}"
                violations.append(Violation("data", rank, position, text))
            if PIPELINE.role(action) == RECEIVE:
                other = matching.partner[Place(rank, position)]
                sent = program.ranks[other.rank][other.position]
                if sent != _counterpart(action, rank):
                    text = (
                        f"{PIPELINE.describe(action)} gets what rank {other.rank} sends with "
                        f"{PIPELINE.describe(sent)}"
                    )
                    violations.append(Violation("data", rank, position, text))
    return violations


def _counterpart(action: Action, rank: int) -> Action:
    """Return the send that a receive belongs to: previous stage for F, next stage for B."""
    stage = action.unit - 1 if action.kind == "recv_f" else action.unit + 1
    return Action(action.kind.replace("recv", "send"), stage, action.index, rank)


def _needs(
    action: Action, home: dict[tuple[int, int], int], rank: int, last: int
) -> list[tuple[tuple[str, ...], int]]:
    """Return what must precede with the same micro-batch: any of some kinds, of a stage."""
    stage, i, backward = action.unit, action.index, ("I", "B")
    if action.kind == "F":
        if stage == 0:
            return []
        return [(("F",), stage - 1)] if home.get((stage - 1, i)) == rank else [(("recv_f",), stage)]
    if action.kind in backward:
        if stage == last:
            return [(("F",), stage)]
        local = home.get((stage + 1, i)) == rank
        gradient = (backward, stage + 1) if local else (("recv_b",), stage)
        return [(("F",), stage), gradient]
    before: dict[str, list[tuple[tuple[str, ...], int]]] = {
        "W": [(("I",), stage)],
        "R": [(("F",), stage)],
        "send_f": [(("F",), stage)],
        "send_b": [(backward, stage)],
    }
    return before.get(action.kind, [])


# the engine does one action after the other: sends do not wait for their receives, receives do
PIPELINE_RULES = Rules(check_work, check_data, ("sequential",))
