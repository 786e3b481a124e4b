"""Search for the limit of a batch and the time for which requests are collected. Pure.

Problem: the best size of batches depends on the network, on the model and on the load of the cores;
it is not known beforehand.

Idea: try settings during training, each for some steps, and score them in bytes per second. A step
ends when a name is repeated; parts of a step are not scored, since some send nothing. From the
settings tried so far, a Gaussian process predicts the scores of all others. The setting with the
largest expected improvement is tried next, and the best one is kept at the end. The grid contains
the initial settings, which are also tried.

Source: Jones, Schonlau & Welch, "Efficient Global Optimization of Expensive Black-Box Functions",
1998 (expected improvement); Rasmussen & Williams, "Gaussian Processes for Machine Learning", 2006,
algorithm 2.1.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from braid.errors import below, raise_all

__all__ = ["Autotuner", "Settings", "TuneOptions", "grid_around"]

LOG = logging.getLogger(__name__)

MIB = 1 << 20
THRESHOLDS = (0, 1 * MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB, 128 * MIB)
CYCLE_TIMES_S = (0.0, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025)
LENGTH = 0.3  # length scale of the kernel, as a fraction of the range
XI = 0.01  # smaller improvements are not worth a trial
MAX_NAMES = 10_000  # per step; names with a running number are never repeated

Array = npt.NDArray[np.float64]


class Settings(NamedTuple):
    """Settings of the fusion of collectives, one point of the search.

    Attributes:
        threshold_bytes: Largest number of bytes that are fused into one collective.
        cycle_time_s: Seconds for which requests are collected before they are fused.
    """

    threshold_bytes: int
    cycle_time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneOptions:
    """Options of the search for fusion settings.

    Attributes:
        threshold: Whether the limit of a batch is searched.
        cycle_time: Whether the time for which requests are collected is searched.
        warmup_samples: Number of first samples to discard.
        steps_per_sample: Number of training steps in a sample.
        max_samples: Number of samples to measure.
        noise: Noise of a score, relative to the scores' standard deviation.

    Raises:
        ConfigError: A number is out of range.
    """

    threshold: bool = True
    cycle_time: bool = True
    warmup_samples: int = 3
    steps_per_sample: int = 10
    max_samples: int = 20
    noise: float = 0.8

    def __post_init__(self) -> None:
        problems = below(0, warmup_samples=self.warmup_samples)
        problems += below(1, steps_per_sample=self.steps_per_sample, max_samples=self.max_samples)
        if not 0 < self.noise < math.inf:
            problems.append(f"noise must be above 0, got {self.noise}")
        raise_all(problems)


def grid_around(start: Settings, options: TuneOptions | None = None) -> list[Settings]:
    """Return all settings that can be tried; `start` is one of them.

    >>> start = Settings(5, 0.1)
    >>> Settings(128 << 20, 0.001) in grid_around(start), start in grid_around(start)
    (True, True)
    """
    options = options or TuneOptions()
    thresholds = sorted({*THRESHOLDS, start.threshold_bytes})
    times = sorted({*CYCLE_TIMES_S, start.cycle_time_s})
    if not options.threshold:
        thresholds = [start.threshold_bytes]
    if not options.cycle_time:
        times = [start.cycle_time_s]
    return [Settings(threshold, time_s) for threshold in thresholds for time_s in times]


class Autotuner:
    """Searches, on one rank, for the batch limit and cycle time with the most bytes per second.

    Args:
        start: Initial settings.
        options: Parameters of the search.

    Attributes:
        done: Whether the search is over.
        samples: Tried settings, with their bytes per second.
    """

    def __init__(self, start: Settings, options: TuneOptions | None = None) -> None:
        self._options = options or TuneOptions()
        self._grid = grid_around(start, self._options)
        self._points = _scaled(self._grid)
        self._now = start
        self._warming = self._options.warmup_samples
        self._names: set[str] = set()  # of this step
        self._begin_s: float | None = None  # of a sample
        self._steps = 0
        self._nbytes = 0
        self.done = False
        self.samples: list[tuple[Settings, float]] = []

    @property
    def best(self) -> Settings:
        """The tried settings with the best mean score."""
        scores: dict[Settings, list[float]] = {}
        for settings, score in self.samples:
            scores.setdefault(settings, []).append(score)
        if not scores:
            return self._now
        return max(scores, key=lambda settings: sum(scores[settings]) / len(scores[settings]))

    def note(self, names: Collection[str], nbytes: int, now_s: float) -> Settings | None:
        """Record the operations of one exchange.

        Args:
            names: Names of the operations that were carried out.
            nbytes: Number of bytes of these operations.
            now_s: Current time in seconds.

        Returns:
            Settings to continue with, if they change.
        """
        if self.done:
            return None
        same_step = self._names.isdisjoint(names) and len(self._names) < MAX_NAMES
        self._nbytes += nbytes
        if same_step:
            self._names.update(names)
            return None
        self._names = set(names)
        if self._begin_s is None:
            self._begin_s, self._steps, self._nbytes = now_s, 0, nbytes
            return None
        self._steps += 1
        if self._steps < self._options.steps_per_sample:
            return None
        score = (self._nbytes - nbytes) / max(now_s - self._begin_s, 1e-9)
        self._begin_s = None  # settings may change within the step that begins now
        if self._warming > 0:
            self._warming -= 1
            return None
        self.samples.append((self._now, score))
        self.done = len(self.samples) >= self._options.max_samples
        before, self._now = self._now, self.best if self.done else self._next()
        LOG.info("settings %s, after %d measured samples", self._now, len(self.samples))
        return None if self._now == before else self._now

    def _next(self) -> Settings:
        """Return the settings with the largest expected improvement."""
        tried = np.array([self._grid.index(settings) for settings, _ in self.samples])
        scores = np.array([score for _, score in self.samples])
        deviation = scores.std() or 1.0
        values = (scores - scores.mean()) / deviation
        mean, sigma = _posterior(self._points[tried], values, self._points, self._options.noise)
        gain = mean - values.max() - XI
        z = gain / sigma
        expected = gain * _cdf(z) + sigma * np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
        return self._grid[int(np.argmax(expected))]

    def __repr__(self) -> str:
        return (
            f"Autotuner({len(self.samples)} of {self._options.max_samples} samples, best "
            f"{self.best})"
        )


def _scaled(grid: list[Settings]) -> Array:
    """Return settings as points in the unit square, equally spaced by rank in each direction."""
    thresholds = sorted({settings.threshold_bytes for settings in grid})
    times = sorted({settings.cycle_time_s for settings in grid})
    return np.array(
        [
            (
                thresholds.index(settings.threshold_bytes) / max(1, len(thresholds) - 1),
                times.index(settings.cycle_time_s) / max(1, len(times) - 1),
            )
            for settings in grid
        ]
    )


def _posterior(tried: Array, values: Array, points: Array, noise: float) -> tuple[Array, Array]:
    """Return mean and deviation of a Gaussian process at `points`, given `values` at `tried`."""
    lower = np.linalg.cholesky(_kernel(tried, tried) + (noise**2 + 1e-9) * np.eye(len(tried)))
    across = _kernel(tried, points)
    half = np.linalg.solve(lower, across)
    mean = half.T @ np.linalg.solve(lower, values)
    variance = np.clip(1.0 - (half**2).sum(0), 1e-12, None)
    return mean, np.sqrt(variance)


def _kernel(a: Array, b: Array) -> Array:
    squared = ((a[:, None, :] - b[None, :, :]) ** 2).sum(-1)
    kernel: Array = np.exp(-0.5 * squared / LENGTH**2)
    return kernel


def _cdf(z: Array) -> Array:
    return np.array([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in z])
