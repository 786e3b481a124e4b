"""Draws the pictures of docs/handbook: `python tests/handbook_pictures.py`.

Each picture is drawn by the code that the page is about, so it cannot say anything else; a test holds the files to
what this writes. A picture is a function without arguments that returns SVG; its file has the function's name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

HANDBOOK = Path(__file__).resolve().parent.parent / "docs" / "handbook"
WIDTH = 760  # pixels of a time axis

PICTURES: tuple[Callable[[], str], ...] = ()


def main() -> None:
    """Write all pictures."""
    for picture in PICTURES:
        (HANDBOOK / f"{picture.__name__}.svg").write_text(picture())


if __name__ == "__main__":
    main()
