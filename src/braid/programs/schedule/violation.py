"""Violation: a mistake in a program, as the validator reports it."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Violation"]


class Violation(NamedTuple):
    """One mistake in a program.

    Attributes:
        rule: Name of the rule: size, header, peers, units, matching, deadlock; contributions; work,
            data.
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
