"""Vocabulary of pipelines: forward and backward of a micro-batch, and messages between stages.

A stage lives on the rank of its number. Its rules, beyond those of all programs: every stage does F
and B of every micro-batch once, F before B. The output of the previous stage is received before F,
and the gradient of the next stage before B.
"""

from __future__ import annotations

from collections.abc import Iterable

from braid.schedule.matching import Matching, Moment, Place
from braid.schedule.program import LOCAL, RECEIVE, SEND, Action, Kind, Program, Vocabulary
from braid.schedule.violation import Violation

__all__ = ["PIPELINE", "check_data", "check_work"]

PIPELINE = Vocabulary(
    name="pipeline",
    kinds={
        "F": Kind(LOCAL, "forward of a micro-batch"),
        "B": Kind(LOCAL, "backward of a micro-batch"),
        "send_f": Kind(SEND, "send the output of F to the next stage"),
        "recv_f": Kind(RECEIVE, "receive the output of F of the previous stage"),
        "send_b": Kind(SEND, "send the gradient of the input of F to the previous stage"),
        "recv_b": Kind(RECEIVE, "receive the gradient of the output of F"),
    },
    unit_name="stage",
    index_name="micro-batch",
    posts="run",
)


def check_work(program: Program) -> list[Violation]:
    """Check that each rank does F and B of its stage once for every micro-batch."""
    violations = []
    header = program.header
    if (header.operation, header.num_units, header.root) != ("train", program.num_ranks, -1):
        text = (
            f"the header must say train, {program.num_ranks} units (one per rank) and no root, "
            f"got {header}"
        )
        violations.append(Violation("header", -1, -1, text))
    for rank, actions in enumerate(program.ranks):
        done: set[tuple[str, int]] = set()
        for position, action in enumerate(actions):
            if action.unit != rank or not 0 <= action.index < header.num_indices:
                text = (
                    f"{PIPELINE.describe(action)} is not of stage {rank} and a micro-batch "
                    f"below {header.num_indices}"
                )
                violations.append(Violation("units", rank, position, text))
            if (action.kind, action.index) in done:
                text = f"{PIPELINE.describe(action)} a second time"
                violations.append(Violation("work", rank, position, text))
            done.add((action.kind, action.index))
        missing = [
            f"{kind}{rank}.{index}"
            for kind in ("F", "B")
            for index in range(header.num_indices)
            if (kind, index) not in done
        ]
        if missing:
            text = f"ends without {', '.join(missing)}"
            violations.append(Violation("work", rank, -1, text))
    return violations


def check_data(program: Program, matching: Matching, _moments: Iterable[Moment]) -> list[Violation]:
    """Check that data is made or received before it is used, and is the right data."""
    violations = []
    last = program.num_ranks - 1
    for rank, actions in enumerate(program.ranks):
        has: set[tuple[str, int]] = set()
        for position, action in enumerate(actions):
            missing_kinds = [
                kind for kind in _needs(action, rank, last) if (kind, action.index) not in has
            ]
            has.add((action.kind, action.index))
            if missing_kinds:
                text = (
                    f"{PIPELINE.describe(action)} comes before {missing_kinds[0]} of micro-batch "
                    f"{action.index}"
                )
                violations.append(Violation("data", rank, position, text))
            if PIPELINE.role(action) == RECEIVE:
                other = matching.partner[Place(rank, position)]
                sent = program.ranks[other.rank][other.position]
                if sent != _counterpart(action):
                    text = (
                        f"{PIPELINE.describe(action)} gets what rank {other.rank} sends with "
                        f"{PIPELINE.describe(sent)}"
                    )
                    violations.append(Violation("data", rank, position, text))
    return violations


def _counterpart(action: Action) -> Action:
    """Return the send that a receive belongs to: previous stage for F, next stage for B."""
    stage = action.unit - 1 if action.kind == "recv_f" else action.unit + 1
    return Action(action.kind.replace("recv", "send"), stage, action.index, action.unit)


def _needs(action: Action, stage: int, last: int) -> list[str]:
    """Return the kinds of actions that must precede with the same micro-batch."""
    if action.kind == "F":
        return ["recv_f"] if stage else []
    if action.kind == "B":
        return ["F"] if stage == last else ["F", "recv_b"]
    return {"send_f": ["F"], "send_b": ["B"]}.get(action.kind, [])
