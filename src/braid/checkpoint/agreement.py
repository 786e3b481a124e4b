"""Exchange of problem reports, so that all ranks raise the same error or none.

Problem: when rank 2's disk is full, rank 2 raises, and the other ranks wait in the next collective.
Idea: every phase of a save or load ends with an exchange of small reports; an error in any of them
makes every rank raise the same CheckpointError.
"""

from __future__ import annotations

import threading
import traceback
from typing import TypeVar

import msgspec

from braid.comm import Group
from braid.errors import CheckpointError

__all__ = ["RankReport", "exchange", "problem_of", "raise_problems"]


class RankReport(msgspec.Struct, frozen=True):
    """Report of a rank after a phase of a save or load; base class of all reports.

    Attributes:
        problem: Reason why this rank cannot continue; empty if it can.
    """

    problem: str = ""


R = TypeVar("R", bound=RankReport)

# msgspec (0.22) crashes if two threads make the first decoder of a type at the same time
_decoder_lock = threading.Lock()


def exchange(group: Group, report: R) -> list[R]:
    """Send this rank's report to all members; return all reports in the order of ranks.

    Cost: two all_gathers, of 8 bytes and of the longest report.
    """
    problem = report.problem.encode(
        errors="replace"
    ).decode()  # file names can have undecodable bytes
    data = msgspec.msgpack.encode(msgspec.structs.replace(report, problem=problem))
    reports = group.objects.all_gather(data)
    with _decoder_lock:
        decoder = msgspec.msgpack.Decoder(type(report))
    return [decoder.decode(one) for one in reports]


def problem_of(exc: Exception) -> str:
    """Return an exception's text, also if its `__str__` raises."""
    return "".join(traceback.format_exception_only(exc)).strip()


def raise_problems(action: str, problems: list[str], *, size: int) -> None:
    """Raise the same error on all ranks if any rank has a problem.

    Args:
        action: Beginning of the message: the action that failed.
        problems: Problem of each rank; empty for a rank without one.
        size: Number of ranks; with 1, the message does not name ranks.

    Raises:
        CheckpointError: A rank has a problem; the message groups ranks by problem.
    """
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(problems):
        if text:
            by_text.setdefault(text, []).append(rank)
    if not by_text:
        return
    parts = [
        text if size == 1 else f"rank {','.join(map(str, ranks))}: {text}"
        for text, ranks in by_text.items()
    ]
    raise CheckpointError(f"{action}: {'; '.join(parts)}. Earlier checkpoints are untouched")
