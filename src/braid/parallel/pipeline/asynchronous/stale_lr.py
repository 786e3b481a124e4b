"""Learning rates of stages whose gradients are old: rule T1 of PipeMare.

Problem: the largest rate at which training is stable falls with the age of gradients, as 1 / age. A
rate that suits the last stage, whose gradients are fresh, makes the first one diverge.

Idea: divide the rate of each stage by its age at first, when gradients change most from step to
step, and let it grow to the whole within K steps:

    rate of a stage in step k = rate / max(1, age) ** p,    p = 1 - min(k / K, 1)

    age 4, K = 100    1/4 in step 0    1/2 in step 50    1 from step 100 on

Stages whose gradients have age 0 or 1 keep the whole rate.

Source: B. Yang et al., PipeMare, MLSys 2021, section 3.1. There, ages are parts of a step of N
micro-batches; here they are steps, since each stage steps on its own.
"""

from __future__ import annotations

from braid.errors import ConfigError

__all__ = ["stale_lr_scale"]


def stale_lr_scale(age: int, step: int, anneal_steps: int) -> float:
    """Return the factor for the learning rate of a stage with old gradients.

    Args:
        age: Steps by which the stage's gradients are old, as in `AsynchronousPipeline.age`.
        step: Number of steps before this one.
        anneal_steps: Number of steps after which the rate is whole; 0 for the whole rate always.

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
