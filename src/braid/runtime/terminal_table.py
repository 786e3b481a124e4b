"""Tables on the terminal: texts on the left, figures on the right."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

__all__ = ["new_table"]


def new_table(title: str | None, left: Sequence[str], right: Sequence[str]) -> Table:
    """Make an empty table.

    Args:
        title: Line above it, if any.
        left: Headings of columns of text.
        right: Headings of columns of figures, which come after them.
    """
    grid = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in left:
        grid.add_column(name, no_wrap=True)
    for name in right:
        grid.add_column(name, justify="right", no_wrap=True)
    return grid
