"""Compares runs: their numbers side by side, their curves in one chart, and how they were started.

A run is worth a second one only if both can be held against each other. The first run is the base:
changes are relative to its numbers. What was different about the starts (command, commit, packages,
ranks) stands above the numbers, because it is the likely reason for their differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from braid._version import __version__
from braid.errors import ConfigError
from braid.launch.observe.curves import LOSSES, NOT_DRAWN, RATES, rates, step_durations
from braid.launch.observe.facts import by_step
from braid.launch.observe.figures import Chart, line_chart
from braid.launch.observe.glance import Figure
from braid.launch.observe.publish import write_page
from braid.launch.observe.report import Story, build_story, page_template, this_machine
from braid.launch.observe.run_directory import Run, read_run

__all__ = ["compare_runs", "print_comparison", "publish_comparison"]

ROLES = ("compute", "wait", "transfer", "neutral")
MAX_RUNS = len(ROLES)
MAX_CHARTS = 40


class FigureRow(NamedTuple):
    """Row of a comparison: one number in all runs.

    Attributes:
        name: Name of the number.
        texts: Number of each run with its unit; a dash where a run has none.
        changes: Change of each run against the first, such as `-12 %`; empty for the first run.
        verdicts: `good`, `bad` or an empty string, for each run.
    """

    name: str
    texts: tuple[str, ...]
    changes: tuple[str, ...]
    verdicts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """Contents of a page that compares runs.

    Attributes:
        names: Names of the runs' directories.
        stories: Reports of the runs.
        differences: Facts about the starts that differ, as name and one text for each run.
        figures: Numbers that at least one run has.
        charts: Titles and curves, one curve for each run.
    """

    names: tuple[str, ...]
    stories: tuple[Story, ...]
    differences: tuple[tuple[str, tuple[str, ...]], ...]
    figures: tuple[FigureRow, ...]
    charts: tuple[tuple[str, Chart], ...]


def compare_runs(runs: Sequence[Run]) -> RunComparison:
    """Compare runs with the first of them.

    Raises:
        ConfigError: There are fewer than two runs, or more than a chart has colours for.
    """
    if not 2 <= len(runs) <= MAX_RUNS:
        msg = f"a comparison takes 2 to {MAX_RUNS} runs, got {len(runs)}"
        raise ConfigError(msg)
    stories = tuple(build_story(run) for run in runs)
    names = _names([run.path for run in runs])
    return RunComparison(
        names=names,
        stories=stories,
        differences=_differences(runs),
        figures=_figures(stories),
        charts=_charts(runs, names),
    )


def publish_comparison(
    paths: Sequence[Path], out: Path | None = None
) -> tuple[RunComparison, Path]:
    """Write a page that compares runs; return the comparison and the path of the page.

    Args:
        paths: Directories of the runs; all others are compared with the first.
        out: Path of the page; `compare.html` in the last run's directory when None.

    Raises:
        ConfigError: A path is not the directory of a run, or the page cannot be written.
    """
    comparison = compare_runs([read_run(path) for path in paths])
    page = paths[-1] / "compare.html" if out is None else out
    html = page_template("compare.html.jinja").render(
        comparison=comparison, roles=ROLES, machine=this_machine(), version=__version__
    )
    try:
        write_page(html, page)
    except OSError as exc:
        msg = f"cannot write {page}: {exc.strerror}; choose another path with --out"
        raise ConfigError(msg) from exc
    return comparison, page


def print_comparison(comparison: RunComparison, console: Console, *, page: Path) -> None:
    """Print the differences between the starts of the runs, and the numbers of all runs."""
    for name, values in comparison.differences:
        console.print(Text(f"  {name}"), soft_wrap=True)
        for run, text in zip(comparison.names, values, strict=True):
            console.print(Text(f"    {run}: {text}"), soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for title in ("", *comparison.names):
        table.add_column(title, justify="right" if title else "left")
    styles = {"good": "green", "bad": "red"}
    for row in comparison.figures:
        cells = [
            Text.assemble(text, (f" {change}" if change else "", styles.get(verdict, "")))
            for text, change, verdict in zip(row.texts, row.changes, row.verdicts, strict=True)
        ]
        table.add_row(Text(row.name), *cells)
    console.print(table)
    console.print(Text(f"  report  {page}"), soft_wrap=True)


def _names(paths: Sequence[Path]) -> tuple[str, ...]:
    """Return the directories' names, or their paths if names are equal."""
    short = [path.resolve().name for path in paths]
    return tuple(short if len(set(short)) == len(short) else map(str, paths))


def _differences(runs: Sequence[Run]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    records = [run.record for run in runs]
    facts: dict[str, list[str]] = {
        "command": [run.command_line for run in runs],
        "commit": [record.git or "unknown" for record in records],
        "ranks": [str(record.num_ranks) for record in records],
        "threads": [record.threads or "unknown" for record in records],
        "braid": [record.braid for record in records],
    }
    packages = dict.fromkeys(name for record in records for name in record.packages)
    for name in packages:
        facts[name] = [record.packages.get(name, "unknown") for record in records]
    return tuple((name, tuple(texts)) for name, texts in facts.items() if len(set(texts)) > 1)


def _figures(stories: Sequence[Story]) -> tuple[FigureRow, ...]:
    by_run = [{figure.name: figure for figure in story.glance} for story in stories]
    names = dict.fromkeys(name for figures in by_run for name in figures)
    rows = []
    for name in names:
        figures = [run.get(name) for run in by_run]
        changes = [_change(figures[0], figure) for figure in figures[1:]]
        rows.append(
            FigureRow(
                name,
                tuple(figure.text if figure else "-" for figure in figures),
                ("", *(text for text, _ in changes)),
                ("", *(verdict for _, verdict in changes)),
            )
        )
    return tuple(rows)


def _change(base: Figure | None, figure: Figure | None) -> tuple[str, str]:
    """Return the relative change, and whether it is good or bad."""
    if base is None or figure is None or not base.value or not math.isfinite(base.value):
        return "", ""
    change = (figure.value - base.value) / abs(base.value)
    if abs(change) < 0.0005:
        return "=", ""
    text = f"{change:+.1%}" if abs(change) < 0.1 else f"{change:+.0%}"
    if base.less_is_better is None:
        return text, ""
    return text, "good" if (change < 0) == base.less_is_better else "bad"


def _charts(runs: Sequence[Run], names: Sequence[str]) -> tuple[tuple[str, Chart], ...]:
    keys = dict.fromkeys(key for run in runs for row in run.metrics for key in row)
    drawn = [(key, _overlay(runs, names, _logged(key), key)) for key in LOSSES if key in keys]
    drawn += [
        (label, _overlay(runs, names, _rate(key), label, from_zero=True))
        for key, label in RATES.items()
        if key in keys
    ]
    drawn.append(("step time", _overlay(runs, names, _step_times, "milliseconds", from_zero=True)))
    others = [key for key in keys if key not in NOT_DRAWN]
    drawn += [(key, _overlay(runs, names, _logged(key), key)) for key in others[:MAX_CHARTS]]
    return tuple((title, chart) for title, chart in drawn if chart is not None)


def _overlay(
    runs: Sequence[Run],
    names: Sequence[str],
    curve: Callable[[Run], dict[float, float]],
    y_label: str,
    *,
    from_zero: bool = False,
) -> Chart | None:
    rows: dict[float, dict[str, float]] = {}
    for index, run in enumerate(runs):
        for step, value in curve(run).items():
            rows.setdefault(step, {"step": step})[str(index)] = value
    series = {str(index): (name, ROLES[index]) for index, name in enumerate(names)}
    by_step = [rows[step] for step in sorted(rows)]
    return line_chart(by_step, series, y_label=y_label, from_zero=from_zero)


def _logged(key: str) -> Callable[[Run], dict[float, float]]:
    return lambda run: {row["step"]: row[key] for row in run.metrics if key in row}


def _rate(key: str) -> Callable[[Run], dict[float, float]]:
    return lambda run: {row["step"]: row["rate"] for row in rates(run, key)}


def _step_times(run: Run) -> dict[float, float]:
    """Return milliseconds by step, without the first one, which would flatten the chart."""
    lasted = step_durations(run, by_step(run.timelines))
    return {step: lasted[step] * 1e3 for step in sorted(lasted)[1:]}
