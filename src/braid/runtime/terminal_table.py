"""Tables on the terminal: text columns on the left, figures on the right."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

__all__ = ["new_table"]


def new_table(title: str | None, left: Sequence[str], right: Sequence[str]) -> Table:
    """Return an empty table.

    Args:
        title: Line above it, if any.
        left: Headings of text columns.
        right: Headings of columns of figures, after the text columns.
    """
    grid = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in left:
        grid.add_column(name, no_wrap=True)
    for name in right:
        grid.add_column(name, justify="right", no_wrap=True)
    return grid
