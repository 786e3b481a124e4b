"""Adds recomputation and optimizer steps to a program.

Recomputation: the mode names the micro-batches that keep their inputs only.

    always         all of them: a rank holds inputs, and the activations of one micro-batch
    except_last    all but the last: its backward follows its forward directly in GPipe
    never          none

R comes before the gradient of the next stage is received, so it fills what would be waiting.

Optimizer steps: each stage steps as soon as its last backward has ended. Otherwise all stages step
after the program. A rank with stages that end early, such as the last one of 1F1B, steps while
other ranks still run backward.

Source: C. Kim et al., torchgpipe (2020), section 2.3 (the last micro-batch is an exception).
"""

from __future__ import annotations

from braid.errors import ConfigError
from braid.programs.schedule.pipeline.vocabulary import PIPELINE
from braid.programs.schedule.program import RECEIVE, Action, Program

__all__ = ["RECOMPUTE_MODES", "with_recompute", "with_steps"]

RECOMPUTE_MODES = ("always", "except_last", "never")


def with_recompute(program: Program, mode: str) -> Program:
    """Return the program with an R (recompute) before backwards of the micro-batches in `mode`.

    Args:
        program: Training program without R.
        mode: `always`, `except_last` or `never`.

    Raises:
        ConfigError: The mode is unknown.

    >>> from braid.programs.schedule.pipeline import gpipe
    >>> with_recompute(gpipe(1, 2), "except_last").ranks[0][2:]  # doctest: +ELLIPSIS
    (Action(kind='R', unit=0, index=0, ...), Action(kind='B', unit=0, index=0, ...), ...
    """
    if mode not in RECOMPUTE_MODES:
        msg = f"recompute must be one of {', '.join(RECOMPUTE_MODES)}, got {mode!r}"
        raise ConfigError(msg)
    last = program.header.num_indices - (mode == "except_last")
    chosen = range(0 if mode == "never" else last)
    ranks = tuple(tuple(_with_recompute(actions, chosen)) for actions in program.ranks)
    return program._replace(ranks=ranks)


def _with_recompute(actions: tuple[Action, ...], chosen: range) -> list[Action]:
    new: list[Action] = []
    for action in actions:
        if action.kind in {"B", "I"} and action.index in chosen:
            place = len(new)
            while place and PIPELINE.role(new[place - 1]) == RECEIVE:
                place -= 1
            new.insert(place, action._replace(kind="R"))
        new.append(action)
    return new


def with_steps(program: Program) -> Program:
    """Return the program with an optimizer STEP after each stage's last backward and its send.

    Args:
        program: Program that trains.

    >>> from braid.programs.schedule.pipeline import gpipe
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
