"""Reads logged numbers, and averages them over ranks.

A line that is not JSON, such as the incomplete last line of a killed run, is skipped. If a step has
several lines, because a program logs twice or repeats steps after a resume, later values replace
earlier ones of the same name.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import msgspec

__all__ = ["MetricRows", "MetricsReader", "average_rows", "read_metrics"]

_DECODER = msgspec.json.Decoder(dict[str, object])


class MetricRows(NamedTuple):
    """Contents of one file of metrics: numbers that a rank has logged by step.

    Attributes:
        rows: Numbers of each step, in the order of steps; values that are not finite are NaN.
        about: Values of lines before the first step, such as model and data.
    """

    rows: tuple[Mapping[str, float], ...]
    about: Mapping[str, object]


class MetricsReader:
    """Reader of a file of numbers that may still grow; every complete line is read once.

    Args:
        path: Path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._by_step: dict[float, dict[str, float]] = {}
        self._rows: list[dict[str, float]] = []  # the same, in the order of steps
        self._about: dict[str, object] = {}

    def refresh(self) -> bool:
        """Read the lines that have been appended since the last call; return whether there are any.

        Raises:
            OSError: The file cannot be read.
        """
        has_lines = False
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                has_lines = True
                self._add(line)
                if line.endswith(b"\n"):
                    self._offset += len(line)
        return has_lines

    def rows(self, *, after: float = -math.inf) -> MetricRows | None:
        """Return the numbers read so far, for steps after `after`; None if no line has a step."""
        if not self._rows:
            return None
        first = bisect_right(self._rows, after, key=itemgetter("step"))
        return MetricRows(tuple(self._rows[first:]), self._about)

    def _add(self, line: bytes) -> None:
        try:
            row = _DECODER.decode(line)
        except (msgspec.MsgspecError, ValueError):  # not UTF-8, or thousands of digits
            return
        step = row.get("step")
        if isinstance(step, int) and not isinstance(step, bool):
            values = {
                key: math.nan if value is None else _as_float(value)
                for key, value in row.items()
                if value is None or isinstance(value, (int, float))
            }
            number = values["step"]
            if number in self._by_step:
                self._by_step[number].update(values)
            else:
                self._by_step[number] = values
                insort(self._rows, values, key=itemgetter("step"))
        elif not self._rows:
            self._about |= row


def read_metrics(path: Path) -> MetricRows | None:
    """Read a file of numbers; None if no line has an integer `step`.

    Raises:
        OSError: The file cannot be read.
    """
    reader = MetricsReader(path)
    reader.refresh()
    return reader.rows()


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def average_rows(files: Iterable[MetricRows]) -> tuple[Mapping[str, float], ...]:
    """Return the mean of each value over the files that have it, by step.

    NaN in one file makes the mean NaN: a non-finite loss on one rank is not hidden.
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
