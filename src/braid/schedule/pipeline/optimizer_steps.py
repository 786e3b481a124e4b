"""Adds optimizer steps to a program: each stage steps as soon as its last backward has ended.

Otherwise all stages step after the program, one after the other on each rank. A rank whose stages
end early, such as the last one of 1F1B, steps while others still run backward.
"""

from __future__ import annotations

from braid.schedule.program import Action, Program

__all__ = ["with_steps"]


def with_steps(program: Program) -> Program:
    """Return the program with a STEP after the last backward of each stage, and its message.

    Args:
        program: Program that trains.

    >>> from braid.schedule.pipeline import gpipe
    >>> [action.kind for action in with_steps(gpipe(2, 1)).ranks[1]]
    ['recv_f', 'F', 'B', 'send_b', 'STEP']
    """
    return program._replace(ranks=tuple(tuple(_with_steps(actions)) for actions in program.ranks))


def _with_steps(actions: tuple[Action, ...]) -> list[Action]:
    new = list(actions)
    last = {a.unit: place for place, a in enumerate(actions) if a.kind in {"B", "W"}}
    for unit, place in sorted(last.items(), key=lambda item: -item[1]):
        sends = place + 1 < len(actions) and actions[place + 1].kind == "send_b"
        step = Action("STEP", unit, actions[place].index)
        new.insert(place + 1 + sends, step)
    return new
