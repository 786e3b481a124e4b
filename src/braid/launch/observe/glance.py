"""The few numbers that a person looks at first: loss, step times, throughput, memory, waits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from braid.launch.observe.curves import LOSSES, RATES, Steps, rates, step_durations
from braid.launch.observe.run_directory import Run
from braid.launch.observe.timeline import RankTimeline, shares
from braid.runtime.text import bytes_text, count_text, duration_text, percent_text

__all__ = ["Figure", "glance"]


class Figure(NamedTuple):
    """One number of the overview of a run.

    Attributes:
        name: Name, such as `median step`.
        value: The number, in the unit of `text`.
        text: The number for a reader, with its unit.
        less_is_better: Whether a smaller number is better; None if neither direction is better.
    """

    name: str
    value: float
    text: str
    less_is_better: bool | None


def glance(run: Run, timelines: Sequence[RankTimeline], steps: Steps) -> tuple[Figure, ...]:
    """Return the numbers of a run that are known, in the order of their importance.

    Args:
        run: The run.
        timelines: Recordings of its ranks.
        steps: Times of the steps that all ranks have recorded.
    """
    figures = [
        *_losses(run),
        *_throughput(run),
        *_step_times(run, steps),
        *_memory(run),
        *_division(timelines),
    ]
    if run.record.outcome is not None:
        elapsed_ns = run.record.outcome.elapsed_s * 1e9
        figures.append(Figure("duration", elapsed_ns, duration_text(elapsed_ns), True))
    return tuple(figure for figure in figures if math.isfinite(figure.value))


def _losses(run: Run) -> Iterator[Figure]:
    for name in LOSSES:
        curve = [row[name] for row in run.metrics if math.isfinite(row.get(name, math.nan))]
        if curve:
            yield Figure(f"{name}, last", curve[-1], f"{curve[-1]:.5g}", True)
            yield Figure(f"{name}, lowest", min(curve), f"{min(curve):.5g}", True)


def _throughput(run: Run) -> Iterator[Figure]:
    per_s = {label: [row["rate"] for row in rates(run, name)] for name, label in RATES.items()}
    reported = [row["tokens_per_s"] for row in run.metrics if "tokens_per_s" in row]
    for label, values in {**per_s, RATES["tokens"]: per_s[RATES["tokens"]] or reported}.items():
        if values:
            usual = median(values)
            yield Figure(f"{label}, median", usual, count_text(usual), False)


def _step_times(run: Run, steps: Steps) -> Iterator[Figure]:
    lasted = [seconds * 1e9 for _, seconds in sorted(step_durations(run, steps).items())]
    if len(lasted) > 1:
        for name, value in (
            ("first step", lasted[0]),
            ("median step", median(lasted[1:])),
            ("slowest later step", max(lasted[1:])),
        ):
            yield Figure(name, value, duration_text(value), True)
    if lasted:
        yield Figure("steps", float(len(lasted)), f"{len(lasted):,}", None)


def _memory(run: Run) -> Iterator[Figure]:
    for key, name in (
        ("peak_rss_bytes", "largest memory of a process"),
        ("cuda_peak_bytes", "largest memory on a GPU"),
    ):
        most = max((row[key] for row in run.every_row() if key in row), default=math.nan)
        yield Figure(name, most, bytes_text(most), True)


def _division(timelines: Sequence[RankTimeline]) -> Iterator[Figure]:
    divided = [shares(timeline) for timeline in timelines if timeline.intervals]
    if len(divided) > 1:
        for name in ("wait", "transfer"):
            most = max(getattr(share, name) for share in divided)
            yield Figure(f"{name}, largest share", most, percent_text(most), True)
