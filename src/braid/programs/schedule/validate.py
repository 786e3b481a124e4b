"""Validator: checks everything that can be known to be wrong with a program before it runs.

The rules build on each other, so a later rule is checked only when those before it hold:

    size           not more than can be checked
    peers          another rank of the program
    units          of the vocabulary's own rules
    matching       every send has a receive, and every receive a send
    deadlock       everything can end, under the semantics of what executes it: by default under
                   rendezvous and under buffered ones
    contributions  of the vocabulary's own rules: the promised result is there at the end

A program that deadlocks only under rendezvous needs memory for messages in flight: `semantics`
selects the checked semantics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from braid.errors import ConfigError
from braid.programs.schedule.matching import Deadlock, Matching, Moment, Place, match, order
from braid.programs.schedule.program import LOCAL, Program

__all__ = ["Rules", "Violation", "validate"]

MOST_PLACES = 1 << 20  # a program may come from anywhere; each block is checked on every rank
SEMANTICS = ("rendezvous", "buffered", "sequential")


class Violation(NamedTuple):
    """One mistake in a program, with its rank and action.

    Attributes:
        rule: Name of the broken rule: size, header, peers, units, matching, deadlock,
            contributions, work or data.
        rank: Rank of the action; -1 for the program as a whole.
        position: Position of the action in its rank's list; -1 for the end of the list.
        text: Description of the mistake.
    """

    rule: str
    rank: int
    position: int
    text: str

    def __str__(self) -> str:
        """Format it, as in `matching: rank 1, action 3: send of block 0 ... has no receive`."""
        if self.rank < 0:
            return f"{self.rule}: {self.text}"
        where = f"action {self.position}" if self.position >= 0 else "at the end"
        return f"{self.rule}: rank {self.rank}, {where}: {self.text}"


class Rules(NamedTuple):
    """Rules of the programs with one set of actions, beside the rules of all programs.

    Attributes:
        before: Function that checks actions before messages are matched.
        after: Function that checks an executable program, given a possible order of its moments.
        semantics: Message semantics of the engine that executes such programs: they must not
            deadlock under any of these, such as `rendezvous`.
    """

    before: Callable[[Program], list[Violation]]
    after: Callable[[Program, Matching, list[Moment]], list[Violation]]
    semantics: tuple[str, ...] = ("rendezvous", "buffered")


def validate(
    program: Program,
    rules: Mapping[str, Rules],
    *,
    semantics: tuple[str, ...] | None = None,
) -> list[Violation]:
    """Return all violations of rules in a program; an empty list if it is valid.

    Args:
        program: Any program.
        rules: Rules by name of the vocabulary.
        semantics: Message semantics under which the program must not deadlock: `rendezvous`,
            `buffered` or `sequential`; `Rules.semantics` when None.

    Raises:
        ConfigError: The name of a semantics is unknown.
    """
    checks = rules[program.vocabulary.name]
    semantics = checks.semantics if semantics is None else semantics
    if not semantics or set(semantics) - set(SEMANTICS):
        msg = f"semantics must be some of {', '.join(SEMANTICS)}, got {semantics}"
        raise ConfigError(msg)
    header = program.header
    if program.num_ranks * max(header.num_units, header.num_indices) > MOST_PLACES:
        text = (
            f"a program may have at most {MOST_PLACES} ranks x units and ranks x indices, got "
            f"{header} on {program.num_ranks} ranks"
        )
        return [Violation("size", -1, -1, text)]
    violations = _check_peers(program) + checks.before(program)
    if violations:
        return violations
    matching = match(program)
    if matching.alone:
        return [_lonely(program, place) for place in matching.alone]
    moments: list[Moment] = []
    for name in semantics:
        moments, deadlock = order(
            program, matching, buffered=name != "rendezvous", sequential=name == "sequential"
        )
        if deadlock is not None:
            return [_deadlocked(program, deadlock, matching, name)]
    return checks.after(program, matching, moments)


def _check_peers(program: Program) -> list[Violation]:
    violations = []
    for rank, actions in enumerate(program.ranks):
        for position, action in enumerate(actions):
            if program.vocabulary.role(action) == LOCAL:
                continue
            if not 0 <= action.peer < program.num_ranks or action.peer == rank:
                text = (
                    f"the peer must be another rank from 0 to {program.num_ranks - 1}, got "
                    f"{action.peer}"
                )
                violations.append(Violation("peers", rank, position, text))
    return violations


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
    text = f"under {semantics} semantics no rank can continue: {'; '.join(steps)}"
    return Violation("deadlock", first.rank, first.position, text)
