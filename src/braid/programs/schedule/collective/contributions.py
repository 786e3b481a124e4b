"""Rules of collectives: every contribution arrives exactly once, in the right place.

The program is executed with sets instead of numbers: a block holds the set of ranks that its sum
contains. These mistakes are reported with their action: adding a contribution
twice, adding numbers of another block, sending a block that holds nothing, ending with too little.
"""

from __future__ import annotations

from collections.abc import Iterable

from braid.programs.schedule.collective.vocabulary import (
    Held,
    header_problems,
    held_at_end,
    held_at_start,
)
from braid.programs.schedule.matching import Matching, Moment, Place, match, order
from braid.programs.schedule.program import RECEIVE, SEND, Action, Program
from braid.programs.schedule.validate import Violation

__all__ = ["check_contributions", "check_slots", "held_by_round"]

MOST_REPORTED = 20


def check_slots(program: Program) -> list[Violation]:
    """Check the header of a collective, and that actions refer to existing blocks and rounds."""
    header = program.header
    arguments = (header.operation, program.num_ranks, header.num_units, header.root)
    violations = [Violation("header", -1, -1, text) for text in header_problems(*arguments)]
    for rank, actions in enumerate(program.ranks):
        for position, action in enumerate(actions):
            units = [
                action.unit,
                *([action.edge] if program.vocabulary.kinds[action.kind].has_edge else []),
            ]
            wrong = [unit for unit in units if not 0 <= unit < header.num_units]
            if wrong:
                text = (
                    f"block {wrong[0]} does not exist: blocks are numbered from 0 to "
                    f"{header.num_units - 1}"
                )
                violations.append(Violation("units", rank, position, text))
            if not 0 <= action.index < header.num_indices:
                text = (
                    f"round {action.index} does not exist: rounds are numbered from 0 to "
                    f"{header.num_indices - 1}"
                )
                violations.append(Violation("units", rank, position, text))
    return violations


def check_contributions(
    program: Program, matching: Matching, moments: Iterable[Moment]
) -> list[Violation]:
    """Execute a collective symbolically; check each addition, and each rank's final blocks.

    Args:
        program: Program without unmatched messages and deadlocks.
        matching: Matching of the program.
        moments: All moments of the program, in an order in which they can happen.
    """
    return _Ledger(program, matching).check(moments)


def held_by_round(program: Program) -> list[list[dict[int, Held]]]:
    """Return the contents of every rank's blocks before each round, and at the end.

    Args:
        program: Valid program.
    """
    matching = match(program)
    moments, _ = order(program, matching, buffered=False)
    ledger = _Ledger(program, matching)
    before: dict[tuple[int, int], dict[int, Held]] = {}
    for moment in moments:
        for position in moment.positions:
            place = moment.rank, program.ranks[moment.rank][position].index
            before.setdefault(place, dict(ledger.holds[moment.rank]))
        ledger.apply(moment)
    panels = [ledger.holds]
    for number in reversed(range(program.header.num_indices)):
        # the contents of a rank without actions in a round are those of the next one
        panels.append([before.get((rank, number), held) for rank, held in enumerate(panels[-1])])
    return panels[::-1]


class _Ledger:
    """Contributions that every block holds."""

    def __init__(self, program: Program, matching: Matching) -> None:
        self._program = program
        self._partner = matching.partner
        header = program.header
        arguments = (header.operation, program.num_ranks, header.num_units, header.root)
        self.holds = [dict(blocks) for blocks in held_at_start(*arguments)]
        self._required = held_at_end(*arguments)
        self._read: dict[Place, Held | None] = {}  # contents that sends and copies have read
        self._violations: list[Violation] = []

    def check(self, moments: Iterable[Moment]) -> list[Violation]:
        for moment in moments:
            self.apply(moment)
        violations = self._violations or _missing(self.holds, self._required)
        return violations[:MOST_REPORTED]

    def apply(self, moment: Moment) -> None:
        rank, positions, ended = moment
        for position in positions:
            place, action = Place(rank, position), self._program.ranks[rank][position]
            role = self._program.vocabulary.role(action)
            if not ended and role != RECEIVE:
                self._on_read(place, action, action.unit if role == SEND else action.edge)
            elif ended and role != SEND:
                source = self._partner[place] if role == RECEIVE else place
                self._on_write(place, action, self._read[source])

    def _on_read(self, place: Place, action: Action, block: int) -> None:
        held = self._read[place] = self.holds[place.rank].get(block)
        if held is None:
            self._wrong(place, action, "it holds nothing yet")

    def _on_write(self, place: Place, action: Action, read: Held | None) -> None:
        blocks = self.holds[place.rank]
        there = blocks.get(action.unit)
        if read is None:  # reported where it was read
            return
        if action.kind != "reduce":
            blocks[action.unit] = read
        elif there is None:
            self._wrong(place, action, "there is nothing yet to add to")
        elif there.block != read.block:
            self._wrong(place, action, f"adds block {read.block} to block {there.block}")
        elif twice := there.ranks & read.ranks:
            self._wrong(place, action, f"counts the contribution of rank {_ranks(twice)} twice")
        else:
            blocks[action.unit] = Held(there.block, there.ranks | read.ranks)

    def _wrong(self, place: Place, action: Action, problem: str) -> None:
        text = f"{self._program.vocabulary.describe(action)}: {problem}"
        self._violations.append(Violation("contributions", *place, text))


def _missing(holds: list[dict[int, Held]], required: list[dict[int, Held]]) -> list[Violation]:
    violations: list[Violation] = []
    for rank, blocks in enumerate(required):
        for unit, held in blocks.items():
            has = holds[rank].get(unit)
            if has == held:
                continue
            if len(violations) == MOST_REPORTED:
                return violations
            if has is None or has.block != held.block:
                text = f"block {unit} ends without block {held.block} of rank {_ranks(held.ranks)}"
            else:
                text = (
                    f"block {unit} ends without the contribution of rank "
                    f"{_ranks(held.ranks & ~has.ranks)}"
                )
            violations.append(Violation("contributions", rank, -1, text))
    return violations


def _ranks(mask: int) -> str:
    return ", ".join(str(rank) for rank in range(mask.bit_length()) if mask >> rank & 1)
