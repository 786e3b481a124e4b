"""Rules of the learning rate while a step has more or fewer samples than at first.

With `batch_per_rank` each rank keeps its number of samples, so a step has fewer when ranks are
lost. The optimizer then steps with the learning rate of the program times a factor, which the
program and its schedulers do not see.

    ranks now / at first     2/4
    linear                   lr / 2           SGD: half the samples, half the step
    sqrt                     lr / sqrt(2)     Adam: its steps do not grow with the gradient
    constant                 lr

Source: P. Goyal et al., "Accurate, large minibatch SGD", 2017, section 2.1 (linear); S. Malladi et
al., "On the SDEs and scaling rules for adaptive gradient algorithms", NeurIPS 2022 (sqrt).
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Literal

from braid.errors import ConfigError

__all__ = ["RateRule", "rate_factor", "require_rule"]

RateRule = Literal["linear", "sqrt", "constant"]
FACTORS: dict[str, Callable[[float], float]] = {
    "linear": float,
    "sqrt": sqrt,
    "constant": lambda _: 1.0,
}


def require_rule(rule: RateRule | None, shards: int | None) -> None:
    """Check the rule of a training, and that its step has no fixed number of micro-batches.

    Raises:
        ConfigError: The rule is unknown, or `shards` is given.
    """
    if rule is not None and rule not in FACTORS:
        msg = f"batch_per_rank must be one of {', '.join(FACTORS)}, or None, got {rule!r}"
        raise ConfigError(msg)
    if rule is not None and shards is not None:
        msg = (
            f"shards={shards} and batch_per_rank={rule!r}: shards fixes the samples of a step, and "
            "batch_per_rank the samples of a rank: pass only one of them"
        )
        raise ConfigError(msg)


def rate_factor(rule: RateRule | None, num_ranks: int, num_at_first: int) -> float:
    """Return the learning rate's factor when `num_at_first` ranks have become `num_ranks`.

    >>> rate_factor("linear", 2, 4), rate_factor("sqrt", 1, 4), rate_factor("constant", 2, 4)
    (0.5, 0.5, 1.0)
    """
    return 1.0 if rule is None else FACTORS[rule](num_ranks / num_at_first)
