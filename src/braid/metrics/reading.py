"""Reads logged numbers, and averages them over ranks.

A line that is not JSON, such as the torn last line of a killed run, is skipped. Where a step has
several lines, as a program logs twice or repeats steps after a resume, later values replace
earlier ones of the same name.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

__all__ = ["MetricRows", "average_rows", "read_metrics"]

_DECODER = msgspec.json.Decoder(dict[str, object])


class MetricRows(NamedTuple):
    """Contents of one file.

    Attributes:
        rows: Numbers of each step, in the order of steps; values that are not finite are NaN.
        about: Values of lines before the first step, such as model and data.
    """

    rows: tuple[Mapping[str, float], ...]
    about: Mapping[str, object]


def read_metrics(path: Path) -> MetricRows | None:
    """Read a file of numbers; None if no line has an integer `step`.

    Raises:
        OSError: The file cannot be read.
    """
    by_step: dict[float, dict[str, float]] = defaultdict(dict)
    about: dict[str, object] = {}
    with path.open("rb") as file:
        for line in file:
            try:
                row = _DECODER.decode(line)
            except (msgspec.MsgspecError, ValueError):  # not UTF-8, or thousands of digits
                continue
            step = row.get("step")
            if isinstance(step, int) and not isinstance(step, bool):
                by_step[step].update(
                    {
                        key: math.nan if value is None else _as_float(value)
                        for key, value in row.items()
                        if value is None or isinstance(value, (int, float))
                    }
                )
            elif not by_step:
                about |= row
    if not by_step:
        return None
    return MetricRows(tuple(by_step[step] for step in sorted(by_step)), about)


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def average_rows(files: Iterable[MetricRows]) -> tuple[Mapping[str, float], ...]:
    """Return the mean of each value over the files that have it, by step.

    NaN in one file makes the mean NaN: a loss that is not finite on one rank is not hidden.
    """
    sums: dict[float, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for file in files:
        for row in file.rows:
            for key, value in row.items():
                sums[row["step"]][key].append(value)
    return tuple(
        {key: math.fsum(values) / len(values) for key, values in sums[step].items()}
        for step in sorted(sums)
    )
