"""Pictures of the handbook are those that the code draws, and the table lists every page."""

from __future__ import annotations

import os
import re
from itertools import combinations
from xml.etree import ElementTree as ET

import pytest

from handbook_pictures import HANDBOOK, PICTURES


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.__name__)
def test_a_picture_is_what_the_code_draws(picture):
    """`python tests/handbook_pictures.py` writes them anew."""
    assert (HANDBOOK / f"{picture.__name__}.svg").read_text() == picture()


def test_every_picture_is_drawn_by_the_code():
    files = {path.stem for path in HANDBOOK.glob("*.svg")}
    assert files == {picture.__name__ for picture in PICTURES}


def _boxes(root):
    """Yield the words and the place of each text: left, top, right, bottom; letters are 6 pixels wide."""
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        if not text.text:
            continue
        size = float(text.get("font-size") or root.get("font-size"))
        wide, x, y = len(text.text) * size / 2, float(text.get("x")), float(text.get("y"))
        left = x - {"end": wide, "middle": wide / 2}.get(text.get("text-anchor"), 0.0)
        yield text.text, (left, y - 0.75 * size, left + wide, y)


DRAWN = sorted([*HANDBOOK.glob("*.svg"), *HANDBOOK.parent.glob("collectives/*.svg")])


@pytest.mark.parametrize("file", DRAWN, ids=lambda file: file.stem)
def test_a_picture_fits_on_a_page_and_no_text_is_over_another(file):
    root = ET.fromstring(file.read_text())
    assert float(root.get("width")) <= 800
    inner = root.findall("{http://www.w3.org/2000/svg}svg")  # one below the other
    for part in inner or [root]:
        for (text, one), (other_text, other) in combinations(_boxes(part), 2):
            across = min(one[2], other[2]) - max(one[0], other[0])
            down = min(one[3], other[3]) - max(one[1], other[1])
            assert across <= 1 or down <= 1, f"{text!r} over {other_text!r}"


def test_the_table_lists_every_page():
    table = (HANDBOOK / "README.md").read_text()
    pages = sorted(path.name for path in HANDBOOK.glob("[0-9]*.md"))
    assert [name for name in pages if f"({name})" not in table] == []


def _table():
    """Yield the name of each page in the first table, and its file."""
    table = (HANDBOOK / "README.md").read_text().partition("## For readers of a book")[0]
    for page, file in re.findall(
        r"^\|[^|]+\| \[[^]]+\]\((\d[^)]+)\) \| \[[^]]+\]\(([^)]+)\)", table, re.M
    ):
        yield page, (HANDBOOK / file).resolve()


@pytest.mark.parametrize(("page", "file"), [*_table()])
def test_the_file_of_a_page_is_short_or_quoted(page, file):
    """Quotes are verbatim: see `test_quoted_lines_are_those_of_the_file`."""
    text = (HANDBOOK / page).read_text()
    title = f'```python title="{file.relative_to(HANDBOOK.parents[1])}"\n'
    assert len(file.read_text().splitlines()) <= 150 or title in text
    assert f"({os.path.relpath(file, HANDBOOK)})" in text.partition("## Where it is")[2]
