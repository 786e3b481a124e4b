"""Time to solution where ranks fail: checkpoints, lost work and recovery.

    |== work ==|save|== work ==|save|== wo X recover |== work ==|save| ...

Failures come at any time, on average every M = (mean time of one rank) / ranks. With an interval t
of work between saves of C seconds, and R seconds to recover,

    seconds = M * exp(R / M) * (exp((t + C) / M) - 1) * work / t

and t = sqrt(2 C M) - C is close to the best.

Source: J. Daly, A higher order estimate of the optimum checkpoint interval, FGCS 22 (2006).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from braid.errors import ConfigError

__all__ = ["Failures", "time_to_solution"]

HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """Rate of failures of ranks, and the time that a failure costs.

    Attributes:
        rank_mean_hours: Mean hours between failures of one rank; 0 for never.
        checkpoint_s: Seconds for which a checkpoint holds up the training.
        recovery_s: Seconds from a failure to the next step.
    """

    rank_mean_hours: float = 0.0
    checkpoint_s: float = 60.0
    recovery_s: float = 300.0

    def __post_init__(self) -> None:
        figures = (self.rank_mean_hours, self.checkpoint_s, self.recovery_s)
        if not all(0 <= figure < math.inf for figure in figures) or not self.checkpoint_s:
            msg = f"times of failures, checkpoints and recovery must be positive, got {self}"
            raise ConfigError(msg)


class Solution(NamedTuple):
    """Time to finish a training on ranks that fail.

    Attributes:
        seconds: Expected seconds until all steps are done.
        interval_s: Seconds of work between checkpoints.
        failures: Expected number of failures.
    """

    seconds: float
    interval_s: float
    failures: float


def time_to_solution(
    work_s: float, num_ranks: int, failures: Failures, *, interval_s: float | None = None
) -> Solution:
    """Return the expected time for `work_s` seconds of steps on ranks that fail.

    Args:
        work_s: Seconds of all steps.
        num_ranks: Number of ranks.
        failures: Rate of failures.
        interval_s: Seconds of work between checkpoints; the best when None.

    Raises:
        ConfigError: Ranks fail so often that nothing would be done.

    >>> round(time_to_solution(3600.0, 1, Failures(rank_mean_hours=1e9)).seconds)
    3600
    """
    if not failures.rank_mean_hours:
        return Solution(work_s, math.inf, 0.0)
    mean_s = HOUR_S * failures.rank_mean_hours / num_ranks
    save_s = failures.checkpoint_s
    if interval_s is None:
        interval_s = max(math.sqrt(2 * save_s * mean_s) - save_s, save_s)
    exponent = (interval_s + save_s) / mean_s
    if exponent + failures.recovery_s / mean_s > math.log(1e6):
        msg = (
            f"{num_ranks} ranks fail every {mean_s:.3g} s, which leaves no time for work: save "
            f"faster than in {save_s:g} s, or recover faster than in {failures.recovery_s:g} s"
        )
        raise ConfigError(msg)
    lost = math.exp(failures.recovery_s / mean_s) * math.expm1(exponent)
    seconds = mean_s * lost * work_s / interval_s
    return Solution(seconds, interval_s, seconds / mean_s)
