"""The result of a check: one line with a fact, and one line of advice if needed."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

__all__ = ["Finding", "Verdict", "note", "ok", "problem"]

Verdict: TypeAlias = Literal["ok", "note", "problem"]


class Finding(NamedTuple):
    """Result of one check.

    Attributes:
        check: Name of the check.
        verdict: `ok`; `note` if speed, comfort or error messages suffer; `problem` if braid cannot
            be used.
        fact: Observed fact, on one line.
        advice: Advice, on one line; empty for `ok`.
    """

    check: str
    verdict: Verdict
    fact: str
    advice: str = ""


def ok(check: str, fact: str) -> Finding:
    """Return a finding that needs no advice."""
    return Finding(check, "ok", fact)


def note(check: str, fact: str, advice: str) -> Finding:
    """Return a finding of which the user should know."""
    return Finding(check, "note", fact, advice)


def problem(check: str, fact: str, advice: str) -> Finding:
    """Return a finding that makes runs impossible."""
    return Finding(check, "problem", fact, advice)
