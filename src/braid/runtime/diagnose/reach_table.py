"""Formats a table of connections between hosts or ranks.

Problem: a broken network causes a time-out of one participant, which cannot determine whether
itself, its peer or all hosts are affected.

Idea: one table with all results, and one or two words for each error number of the system. The
launcher prints it for hosts; ranks without a launcher print it for themselves.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence

__all__ = ["reach_table", "why_unreachable"]

CORNER = "from \\ to"
NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL)
REASONS = {
    errno.ECONNREFUSED: "refused",
    errno.ETIMEDOUT: "timed out",
    **dict.fromkeys(NO_ROUTE, "no route"),
}


def why_unreachable(code: int) -> str:
    """Describe the `errno` of a failed connection in one or two words."""
    return REASONS.get(code, os.strerror(code).lower())


def reach_table(names: Sequence[str], failed: Mapping[tuple[int, int], str]) -> str:
    """Return a table of connection attempts, from each participant (row) to each (column).

    Args:
        names: Names of the participants.
        failed: Reason of the failure for each pair (row, column) that failed.
    """
    cells = [
        [failed.get((i, j), "ok" if i != j else "-") for j in range(len(names))]
        for i in range(len(names))
    ]
    widths = [
        max(len(text) for text in (name, *(row[j] for row in cells)))
        for j, name in enumerate(names)
    ]
    first = max(map(len, (CORNER, *names)))
    lines = [
        f"  {name:<{first}}  "
        + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        for name, row in zip((CORNER, *names), (names, *cells), strict=True)
    ]
    return "\n".join(line.rstrip() for line in lines)
