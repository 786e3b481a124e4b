"""Everything that can be known to be wrong with a program before it runs.

The rules build on each other, so a later one is asked only when those before it hold:

    size           not more than can be looked at
    peers          a rank of the program, and not oneself
    units          of the vocabulary's own rules
    matching       every send has a receive, and every receive a send
    deadlock       everything can end, under rendezvous and under buffered semantics
    contributions  of the vocabulary's own rules: what is promised is there at the end

What deadlocks under rendezvous only is a program that needs memory for messages under way:
`semantics` says which is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from braid.errors import ConfigError
from braid.schedule.matching import Deadlock, Matching, Moment, Place, match, order
from braid.schedule.program import LOCAL, Program
from braid.schedule.violation import Violation

__all__ = ["Rules", "validate"]

MOST_PLACES = (
    1 << 20
)  # a program may come from anywhere; each of its blocks is looked at on every rank
SEMANTICS = ("rendezvous", "buffered")


class Rules(NamedTuple):
    """What a vocabulary asks of its programs beyond what all ask.

    Attributes:
        before: Looks at actions alone.
        after: Looks at a program that can be carried out, in the order in which everything can
            happen.
    """

    before: Callable[[Program], list[Violation]]
    after: Callable[[Program, Matching, list[Moment]], list[Violation]]


def validate(
    program: Program,
    rules: Mapping[str, Rules],
    *,
    semantics: tuple[str, ...] = SEMANTICS,
) -> list[Violation]:
    """What is wrong with `program`; empty when nothing is.

    Args:
        program: Any.
        rules: By name of the vocabulary.
        semantics: Under which it must not deadlock.

    Raises:
        ConfigError: There are no such semantics.
    """
    if not semantics or set(semantics) - set(SEMANTICS):
        msg = f"expected some of {', '.join(SEMANTICS)} for semantics, found {semantics}"
        raise ConfigError(msg)
    header = program.header
    if program.num_ranks * max(header.num_units, header.num_indices) > MOST_PLACES:
        text = (
            f"expected at most {MOST_PLACES} ranks x units and ranks x indices, found {header} "
            f"on {program.num_ranks} ranks"
        )
        return [Violation("size", -1, -1, text)]
    own = rules[program.vocabulary.name]
    found = _check_peers(program) + own.before(program)
    if found:
        return found
    matching = match(program)
    if matching.alone:
        return [_lonely(program, place) for place in matching.alone]
    moments: list[Moment] = []
    for name in semantics:
        moments, deadlock = order(program, matching, buffered=name == "buffered")
        if deadlock is not None:
            return [_deadlocked(program, deadlock, matching, name)]
    return own.after(program, matching, moments)


def _check_peers(program: Program) -> list[Violation]:
    found = []
    for rank, actions in enumerate(program.ranks):
        for position, action in enumerate(actions):
            if program.vocabulary.role(action) == LOCAL:
                continue
            if not 0 <= action.peer < program.num_ranks or action.peer == rank:
                text = (
                    f"expected a peer from 0 to {program.num_ranks - 1} other than itself, "
                    f"found {action.peer}"
                )
                found.append(Violation("peers", rank, position, text))
    return found


def _lonely(program: Program, place: Place) -> Violation:
    action = program.ranks[place.rank][place.position]
    other = "receive" if program.vocabulary.role(action) == "send" else "send"
    text = f"{program.vocabulary.describe(action)} has no {other} there"
    return Violation("matching", place.rank, place.position, text)


def _deadlocked(
    program: Program, deadlock: Deadlock, matching: Matching, semantics: str
) -> Violation:
    steps = []
    for place in deadlock.circle:
        action, other = program.ranks[place.rank][place.position], matching.partner[place]
        steps.append(
            f"rank {place.rank} waits in {program.vocabulary.describe(action)} for action "
            f"{other.position} there"
        )
    first = deadlock.circle[0]
    text = f"under {semantics} semantics nobody goes on: {'; '.join(steps)}"
    return Violation("deadlock", first.rank, first.position, text)
