"""The picture of the page on programming interfaces, counted in the programs themselves."""

from __future__ import annotations

import difflib
from pathlib import Path

from braid.programs.schedule.bars import COLOURS
from handbook_servers import GREY, _svg, _text

PROGRAMS = Path(__file__).resolve().parent.parent / "examples" / "four_ways"
WAYS = {
    "by_hand": "synchronization by hand",
    "placed": "task and location",
    "optimizer": "wrapped optimizer",
    "wrapper": "wrapped model",
    "scope": "Python scope",
    "call": "a call",
}
LINE = 12  # pixels


def lines_of_interfaces() -> str:
    """Lines of each program that the program of one process has, and those that it has not."""
    alone = _lines("alone")
    left, high, parts = 180, 30, []
    for row, (way, label) in enumerate(WAYS.items()):
        lines = _lines(way)
        blocks = difflib.SequenceMatcher(None, alone, lines, autojunk=False).get_matching_blocks()
        same = sum(block.size for block in blocks)
        y, x = 24 + row * high, left
        parts.append(_text(4, y + 15, label))
        for count, colour in ((same, GREY), (len(lines) - same, COLOURS[0])):
            fill = "black" if colour == GREY else "white"
            parts += [
                f'<rect x="{x}" y="{y}" width="{count * LINE}" height="22" fill="{colour}"/>',
                _text(x + 6, y + 15, str(count), fill=fill),
            ]
            x += count * LINE
    parts.append(_text(left, 14, "lines as in one process, and other lines"))
    return _svg(left + 44 * LINE, 24 + len(WAYS) * high, parts)


def _lines(way: str) -> list[str]:
    """Return the lines of code after the docstring; imports do not count."""
    text = (PROGRAMS / f"{way}.py").read_text().split('"""', 2)[2]
    return [
        line.strip()
        for line in text.splitlines()
        if line.strip() and not line.startswith(("from ", "import ", "#"))
    ]


INTERFACES = (lines_of_interfaces,)
