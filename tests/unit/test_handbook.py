"""Pictures of the handbook are those that the code draws, and the table lists every page."""

from __future__ import annotations

import pytest

from handbook_pictures import HANDBOOK, PICTURES


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.__name__)
def test_a_picture_is_what_the_code_draws(picture):
    """`python tests/handbook_pictures.py` writes them anew."""
    assert (HANDBOOK / f"{picture.__name__}.svg").read_text() == picture()


def test_every_picture_is_drawn_by_the_code():
    files = {path.stem for path in HANDBOOK.glob("*.svg")}
    assert files == {picture.__name__ for picture in PICTURES}


def test_the_table_lists_every_page():
    table = (HANDBOOK / "README.md").read_text()
    pages = sorted(path.name for path in HANDBOOK.glob("[0-9]*.md"))
    assert [name for name in pages if f"({name})" not in table] == []
