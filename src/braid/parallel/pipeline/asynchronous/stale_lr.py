"""Learning rates of stages with old gradients: rule T1 of PipeMare.

Problem: the largest rate for stable training decreases with the age of gradients, as 1 / age. A
rate that suits the last stage, which has fresh gradients, makes the first stage diverge.

Idea: divide the rate of each stage by its age at first, when gradients change most between steps,
and let it grow to the full rate within K steps:

    rate of a stage in step k = rate / max(1, age) ** p,    p = 1 - min(k / K, 1)

    age 4, K = 100    1/4 in step 0    1/2 in step 50    1 from step 100 on

Stages with gradients of age 0 or 1 keep the full rate.

Source: B. Yang et al., PipeMare, MLSys 2021, section 3.1. There, ages are fractions of a step of N
micro-batches; here they are steps, because each stage steps separately.
"""

from __future__ import annotations

from braid.errors import ConfigError

__all__ = ["stale_lr_scale"]


def stale_lr_scale(age: int, step: int, anneal_steps: int) -> float:
    """Return the factor for the learning rate of a stage with old gradients.

    Args:
        age: Age of the stage's gradients in steps, as in `AsynchronousPipeline.age`.
        step: Number of steps before this one.
        anneal_steps: Number of steps after which the rate is full; 0 for the full rate always.

    Raises:
        ConfigError: A number is negative.

    >>> [stale_lr_scale(4, step, 100) for step in (0, 50, 100)]
    [0.25, 0.5, 1.0]
    """
    if min(age, step, anneal_steps) < 0:
        msg = f"age, step and anneal_steps must be at least 0, got {age}, {step} and {anneal_steps}"
        raise ConfigError(msg)
    power = 1 - min(step / anneal_steps, 1) if anneal_steps else 0
    return float(1 / max(1, age) ** power)
