"""What a check says: one line of what was found, and one of what to do when it is not as it should be."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

__all__ = ["Finding", "Verdict", "note", "ok", "problem"]

Verdict: TypeAlias = Literal["ok", "note", "problem"]


class Finding(NamedTuple):
    """Result of one check.

    Attributes:
        check: What was looked at.
        verdict: `ok`; `note` for what costs speed, comfort or words; `problem` for what makes braid
        unusable.
        found: What was found, on one line.
        advice: What to do about it, on one line; empty when all is well.
    """

    check: str
    verdict: Verdict
    found: str
    advice: str = ""


def ok(check: str, found: str) -> Finding:
    """All is well."""
    return Finding(check, "ok", found)


def note(check: str, found: str, advice: str) -> Finding:
    """Worth knowing."""
    return Finding(check, "note", found, advice)


def problem(check: str, found: str, advice: str) -> Finding:
    """In the way of any run."""
    return Finding(check, "problem", found, advice)
