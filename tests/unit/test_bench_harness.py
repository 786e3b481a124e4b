"""What the frame of all benchmarks does with rounds and rows."""

from __future__ import annotations

from braid.cli.bench.harness.rounds import median_ratio
from braid.runtime.terminal_table import add_group, new_table


def test_a_ratio_is_taken_within_each_round():
    assert median_ratio([1.0, 10.0, 100.0], [2.0, 10.0, 400.0]) == 0.5  # of the medians: 1.0


def test_only_the_first_row_of_a_group_shows_its_label():
    grid = new_table(None, ("group", "name"), ("figure",))
    for label in ("one", "other"):
        add_group(grid, label, [("a", "1"), ("b",)])
    assert [list(column.cells) for column in grid.columns] == [
        ["one", "", "other", ""],
        ["a", "b", "a", "b"],
        ["1", "", "1", ""],
    ]
