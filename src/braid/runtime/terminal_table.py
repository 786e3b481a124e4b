"""Tables on the terminal: text columns on the left, figures on the right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table

__all__ = ["add_group", "new_table"]


def new_table(title: str | None, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    """Return an empty table.

    Args:
        title: Line above the table, if any.
        texts: Headings of text columns.
        numbers: Headings of columns of figures, after the text columns.
    """
    grid = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in texts:
        grid.add_column(name, no_wrap=True)
    for name in numbers:
        grid.add_column(name, justify="right", no_wrap=True)
    return grid


def add_group(grid: Table, label: str, rows: Iterable[Sequence[str]]) -> None:
    """Add rows with a common first cell, which only the first row shows.

    Args:
        grid: The table.
        label: First cell.
        rows: Remaining cells of each row.
    """
    for index, cells in enumerate(rows):
        grid.add_row("" if index else label, *cells)
