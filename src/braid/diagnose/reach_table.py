"""Who can reach whom, as a table and in words: the launcher asks it for hosts, ranks without a launcher for themselves.

Problem: that a network is cut shows as a time-out of somebody, who cannot tell whether it is his,
the other's or everybody's.
Idea: all results stand in one table, and a system's numbers for what went wrong are a word each.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence

__all__ = ["reach_table", "why_unreachable"]

CORNER = "from \\ to"
NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL)
WORDS = {
    errno.ECONNREFUSED: "refused",
    errno.ETIMEDOUT: "timed out",
    **dict.fromkeys(NO_ROUTE, "no route"),
}


def why_unreachable(code: int) -> str:
    """An `errno` of an attempt to connect, in a word or two."""
    return WORDS.get(code, os.strerror(code).lower())


def reach_table(names: Sequence[str], failed: Mapping[tuple[int, int], str]) -> str:
    """The table of who (row) can reach whom (column).

    Args:
        names: Of the rows and columns.
        failed: (from, to) -> why not.
    """
    cells = [
        [failed.get((i, j), "ok" if i != j else "-") for j in range(len(names))]
        for i in range(len(names))
    ]
    widths = [
        max(len(word) for word in (name, *(row[j] for row in cells)))
        for j, name in enumerate(names)
    ]
    first = max(map(len, (CORNER, *names)))
    lines = [
        f"  {name:<{first}}  "
        + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        for name, row in zip((CORNER, *names), (names, *cells), strict=True)
    ]
    return "\n".join(line.rstrip() for line in lines)
