"""Chooses the curves of a report: loss, throughput, step time, memory, and every logged number."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from statistics import median

from braid.launch.observe.figures import Chart, line_chart
from braid.launch.observe.run_directory import Run
from braid.launch.observe.timeline import StepKey, StepTime
from braid.runtime.diagnose.block import rank_list
from braid.runtime.metrics import DIGESTS, MEASURED
from braid.runtime.text import duration_text

__all__ = ["charts", "rates", "step_durations"]

Steps = Mapping[StepKey, Mapping[int, StepTime]]

LOSSES = ("loss", "eval_loss", "val_loss")
RATES = {"samples": "samples per second", "tokens": "tokens per second"}
# drawn above in other forms, or logged by `braid train` in addition to the recording
NOT_DRAWN = frozenset(
    {*MEASURED, *DIGESTS, *LOSSES, *RATES, "tokens_per_s", "mfu", "compute", "wait", "transfer"}
)
MEBI = 1 / (1 << 20)
MAX_CHARTS = 60


def charts(run: Run, steps: Steps) -> tuple[tuple[str, Chart], ...]:
    """Return titles and curves; charts without data are missing.

    Args:
        run: The run.
        steps: Times of the steps that all ranks have recorded.
    """
    curves = partial(line_chart, run.metrics)
    drawn: list[tuple[str, Chart | None]] = [
        ("Loss", _loss(run)),
        (
            "Throughput",
            curves(
                {"tokens_per_s": ("tokens/s", "compute")},
                y_label="tokens per second",
                from_zero=True,
            ),
        ),
        *(("Throughput", _rate(run, name, label)) for name, label in RATES.items()),
        (
            "Model FLOP utilisation",
            curves({"mfu": ("MFU", "transfer")}, y_label="% of peak", scale=100.0, from_zero=True),
        ),
        ("Step time", _step_chart(run, steps)),
        ("Memory", _memory(run)),
    ]
    counts = Counter(key for row in run.metrics for key in row)
    least = min(2, len(run.metrics))  # one number in a long run does not make a curve
    names = [name for name in counts if counts[name] >= least and name not in NOT_DRAWN]
    drawn += [(name, _curve(run, name)) for name in names[:MAX_CHARTS]]
    return tuple((title, chart) for title, chart in drawn if chart is not None)


def step_durations(run: Run, steps: Steps) -> dict[float, float]:
    """Return the seconds of each step, on the rank on which it lasted longest.

    A ring keeps only the last recorded steps. If more rows were logged, the durations are the
    differences between the times of consecutive rows.
    """
    logged: dict[float, float] = {}
    for rows in run.rank_metrics.values():
        for before, row in pairwise(rows):
            begin_s, end_s = before.get("time_s", math.nan), row.get("time_s", math.nan)
            if end_s > begin_s:
                lasted_s = (end_s - begin_s) / (row["step"] - before["step"])
                logged[row["step"]] = max(logged.get(row["step"], 0.0), lasted_s)
    recorded = {
        float(key.seq): max(step.dur_ns for step in row.values()) / 1e9
        for key, row in steps.items()
        if key.repeat == 0
    }
    return logged if len(logged) > len(recorded) + 1 else recorded


def rates(run: Run, name: str) -> list[dict[str, float]]:
    """Return rows with `step` and `rate`: the sum of `name` over ranks, per second of the step."""
    totals: dict[float, float] = {}
    for rows in run.rank_metrics.values():
        for row in rows:
            if math.isfinite(row.get(name, math.nan)):
                totals[row["step"]] = totals.get(row["step"], 0.0) + row[name]
    lasted = step_durations(run, {})
    return [
        {"step": step, "rate": total / lasted[step]}
        for step, total in sorted(totals.items())
        if lasted.get(step)
    ]


def _loss(run: Run) -> Chart | None:
    if any("eval_loss" in row or "val_loss" in row for row in run.metrics):
        series = {
            "loss": ("training", "compute"),
            "eval_loss": ("held out", "wait"),
            "val_loss": ("validation", "wait"),
        }
        return line_chart(run.metrics, series, y_label="loss")
    return _curve(run, "loss")


def _curve(run: Run, name: str) -> Chart | None:
    """Return the average of all ranks, and rank 0's values where they differ."""
    logged = [rank for rank, rows in run.rank_metrics.items() if any(name in row for row in rows)]
    first = {row["step"]: row[name] for row in run.rank_metrics.get(0, ()) if name in row}
    rows = [
        {"step": row["step"], "all": row[name]}
        | ({"first": first[row["step"]]} if row["step"] in first else {})
        for row in run.metrics
        if name in row
    ]
    series = {}
    if len(logged) > 1 and any(row.get("first", row["all"]) != row["all"] for row in rows):
        series["first"] = ("rank 0", "neutral")
        series["all"] = (f"average of {rank_list(logged)}", "compute")
    else:
        series["all"] = (name, "compute")
    return line_chart(rows, series, y_label=name)


def _rate(run: Run, name: str, label: str) -> Chart | None:
    return line_chart(
        rates(run, name), {"rate": ("all ranks", "compute")}, y_label=label, from_zero=True
    )


def _memory(run: Run) -> Chart | None:
    """Return the memory of the rank with the most, in each step."""
    rows: dict[float, dict[str, float]] = {}
    for row in run.every_row():
        most = rows.setdefault(row["step"], {"step": row["step"]})
        for key in ("rss_bytes", "cuda_bytes"):
            if key in row:
                most[key] = max(most.get(key, 0.0), row[key])
    series = {
        "rss_bytes": ("process, largest rank", "compute"),
        "cuda_bytes": ("GPU, largest rank", "transfer"),
    }
    by_step = [rows[step] for step in sorted(rows)]
    return line_chart(by_step, series, y_label="MiB", scale=MEBI, from_zero=True)


def _step_chart(run: Run, steps: Steps) -> Chart | None:
    """Return a chart of each step's duration and own work.

    A first step that is much longer than the rest is mentioned in a note instead.
    """
    logged = step_durations(run, steps)
    if len(logged) > len(steps) + 1:
        rows: list[dict[str, float]] = [
            {"step": step, "longest": seconds * 1e9} for step, seconds in sorted(logged.items())
        ]
    else:
        rows = _recorded_rows(steps)
    if len(rows) < 2:
        return None
    first = rows[0]["longest"]
    warmed_up = len(rows) > 3 and first > 3 * median(row["longest"] for row in rows)
    series = {"longest": ("step", "neutral")}
    if any(row["most"] != row["least"] for row in rows if "most" in row):
        series["most"] = ("most own work of a rank", "wait")
        series["least"] = ("least own work of a rank", "compute")
    chart = line_chart(
        rows[1:] if warmed_up else rows,
        series,
        y_label="milliseconds",
        scale=1e-6,
        from_zero=True,
    )
    if chart is None or not warmed_up:
        return chart
    note = f"without the first, {duration_text(first)}"
    return chart._replace(note="; ".join(part for part in (note, chart.note) if part))


def _recorded_rows(steps: Steps) -> list[dict[str, float]]:
    # if numbers of steps repeat (two loops in one program), steps are counted instead
    numbered: bool = all(key.repeat == 0 for key in steps)
    return [
        {
            "step": float(key.seq if numbered else index),
            "longest": max(s.dur_ns for s in row.values()),
            "most": max(s.busy_ns for s in row.values()),
            "least": min(s.busy_ns for s in row.values()),
        }
        for index, (key, row) in enumerate(steps.items())
    ]
