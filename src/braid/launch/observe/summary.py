"""Prints a summary of the report: outcome, one bar per rank, three sentences and two paths."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from braid.launch.observe.report import RankRow, Story
from braid.launch.observe.servers import servers_text
from braid.launch.observe.weight_versions import versions_text
from braid.runtime.text import percent_text

__all__ = ["print_summary"]

BAR_WIDTH = 24  # with the numbers beside it, a line fits into 80 columns
MAX_BARS = 16
STYLES = {"compute": ("#", "blue"), "wait": ("=", "yellow"), "transfer": (".", "magenta")}


def print_summary(story: Story, console: Console, *, report: Path, trace: Path | None) -> None:
    """Print the summary of a report.

    Args:
        story: Contents of the report.
        console: Console to print to.
        report: Path of the page.
        trace: Path of the trace; None if no rank has recorded events.
    """
    console.print(Text(story.outcome), soft_wrap=True)
    for notice in story.notices:
        console.print(Text(f"braid: {notice}", style="yellow"), soft_wrap=True)
    rows = story.rank_rows
    if rows:
        console.print(_legend())
        for row in rows[:MAX_BARS]:
            console.print(_bar(row), soft_wrap=True)
        if len(rows) > MAX_BARS:
            console.print(Text(f"  and {len(rows) - MAX_BARS} more ranks in the report"))
    facts = Table.grid(padding=(0, 1))
    for fact in story.facts:
        facts.add_row(" *", Text(fact))
    for line in (*versions_text(story.versions), *servers_text(story.servers)):
        facts.add_row(" *", Text(line))
    if facts.row_count:
        console.print(facts)
    if not rows:
        console.print(Text("  no events recorded: the program did not call braid.init()"))
    paths = Text(f"  report  {report}")
    if trace is not None:
        paths.append(f"\n  trace   {trace}   open https://ui.perfetto.dev and drag the file there")
    console.print(paths, soft_wrap=True)


def _legend() -> Text:
    text = Text("  where the time went  ")
    for name, (sign, style) in STYLES.items():
        text.append(f" {sign} {name} ", style)
    return text


def _bar(row: RankRow) -> Text:
    """Return a line such as `rank 0  ####====..  compute 60 %  wait 30 %  transfer 10 %`."""
    text = Text(f"  rank {row.rank:<3} ")
    edge, drawn = 0.0, 0
    for name, (sign, style) in STYLES.items():
        edge += getattr(row.shares, name)
        upto = round(edge * BAR_WIDTH)
        text.append(sign * (upto - drawn), style)
        drawn = upto
    text.append(" " * (BAR_WIDTH - drawn))
    for name in STYLES:
        text.append(f"  {name} {percent_text(getattr(row.shares, name))}")
    return text
