"""The words of pipelines: forward and backward of a micro-batch on a stage, and the messages between stages.

A stage lives on the rank of its number. What it must keep to, beyond what all programs must: every
stage does F and B of every micro-batch once, F before B; what the stage before made is received
before F, and what the stage behind made before B.
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
        "send_f": Kind(SEND, "send what F made to the next stage"),
        "recv_f": Kind(RECEIVE, "receive what F of the stage before made"),
        "send_b": Kind(SEND, "send the gradient of what F was given to the stage before"),
        "recv_b": Kind(RECEIVE, "receive the gradient of what F made"),
    },
    unit_name="stage",
    index_name="micro-batch",
    posts="run",
)


def check_work(program: Program) -> list[Violation]:
    """F and B of every stage and micro-batch, once each, on the rank of the stage."""
    found = []
    header = program.header
    if (header.operation, header.num_units, header.root) != ("train", program.num_ranks, -1):
        text = (
            f"expected train with a unit for each of {program.num_ranks} ranks and no root, "
            f"found {header}"
        )
        found.append(Violation("header", -1, -1, text))
    for rank, actions in enumerate(program.ranks):
        done: set[tuple[str, int]] = set()
        for position, action in enumerate(actions):
            if action.unit != rank or not 0 <= action.index < header.num_indices:
                text = (
                    f"expected stage {rank} and a micro-batch below {header.num_indices}, "
                    f"found {PIPELINE.describe(action)}"
                )
                found.append(Violation("units", rank, position, text))
            if (action.kind, action.index) in done:
                text = f"{PIPELINE.describe(action)} a second time"
                found.append(Violation("work", rank, position, text))
            done.add((action.kind, action.index))
        missing = [
            f"{kind}{rank}.{index}"
            for kind in ("F", "B")
            for index in range(header.num_indices)
            if (kind, index) not in done
        ]
        if missing:
            text = f"ends without {', '.join(missing)}"
            found.append(Violation("work", rank, -1, text))
    return found


def check_data(program: Program, matching: Matching, _moments: Iterable[Moment]) -> list[Violation]:
    """Everything that is used has been made or received before, and what is received is what was meant."""
    found = []
    last = program.num_ranks - 1
    for rank, actions in enumerate(program.ranks):
        has: set[tuple[str, int]] = set()
        for position, action in enumerate(actions):
            lacking = [
                kind for kind in _needs(action, rank, last) if (kind, action.index) not in has
            ]
            has.add((action.kind, action.index))
            if lacking:
                text = (
                    f"{PIPELINE.describe(action)} comes before {lacking[0]} of micro-batch "
                    f"{action.index}"
                )
                found.append(Violation("data", rank, position, text))
            if PIPELINE.role(action) == RECEIVE:
                other = matching.partner[Place(rank, position)]
                sent = program.ranks[other.rank][other.position]
                if sent != _counterpart(action):
                    text = (
                        f"{PIPELINE.describe(action)} gets what rank {other.rank} sends with "
                        f"{PIPELINE.describe(sent)}"
                    )
                    found.append(Violation("data", rank, position, text))
    return found


def _counterpart(action: Action) -> Action:
    """The send that a receive is meant for: of the stage before for F, of the stage behind for B."""
    stage = action.unit - 1 if action.kind == "recv_f" else action.unit + 1
    return Action(action.kind.replace("recv", "send"), stage, action.index, action.unit)


def _needs(action: Action, stage: int, last: int) -> list[str]:
    """What must have been done with the same micro-batch before."""
    if action.kind == "F":
        return ["recv_f"] if stage else []
    if action.kind == "B":
        return ["F"] if stage == last else ["F", "recv_b"]
    return {"send_f": ["F"], "send_b": ["B"]}.get(action.kind, [])
