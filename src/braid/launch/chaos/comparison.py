"""Compares the weights of a run under faults with the weights of the same run without faults.

Under `braid chaos`, each member logs a digest of its share of the weights after every tenth step
(`elasticity.weight_digest`). The digests of all members add up to the digest of the whole weights,
on any mesh. A step counts if all elements of the weights were logged by members of one epoch: a
rank may die before its line is written. If a step was done again, the last time counts.

Digests must be equal where a run promises the same bits: on CPUs, if gradients were always added up
in the same order. Another mesh has another order if tensor parallel layers are divided
differently, or stages share weights differently. Then the distance of the weights, estimated
from a random projection, is reported, and only a large one is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

__all__ = ["Digest", "Rows", "StepOfRun", "WeightComparison", "compared", "digests_of"]

MODULUS = 1 << 52
MOST_ROUNDING = 0.3  # relative distance; Adam makes steps even of gradients that are only rounding

Rows = Mapping[int, Iterable[Mapping[str, float]]]


class StepOfRun(NamedTuple):
    """Time in a run: number of the training in the program, and of finished steps."""

    training: int
    step: int


class Digest(NamedTuple):
    """Digest of the whole weights; see `weight_digest`. `orders` are all that were logged."""

    num_elements: int = 0
    bits: int = 0
    projection: float = 0.0
    squares: float = 0.0
    orders: frozenset[int] = frozenset()


class WeightComparison(NamedTuple):
    """Result of the comparison of two runs.

    Attributes:
        num_steps: Number of compared steps.
        last_step: The last one of them.
        first_unequal: First step after which weights differ; 0 if there is none.
        distance: Distance of the weights, relative to their norm: the root mean square over steps.
        is_exact: Whether the bits must be equal.
        reason: Why steps were not compared; empty if all were.
        is_wrong: Whether the reason is a problem.
    """

    num_steps: int = 0
    last_step: int = 0
    first_unequal: int = 0
    distance: float = 0.0
    is_exact: bool = True
    reason: str = ""
    is_wrong: bool = False

    @property
    def text(self) -> str:
        """The result as a figure."""
        if self.reason:
            return f"not compared: {self.reason}"
        steps = f"{self.num_steps} compared steps, the last one {self.last_step}"
        if not self.first_unequal:
            return f"bit by bit as in the undisturbed run, in all {steps}"
        differ = f"from step {self.first_unequal} on (relative distance {self.distance:.1g})"
        if self.problem:
            return f"other weights than in the undisturbed run {differ}, in {steps}"
        return f"as in the undisturbed run up to rounding {differ}, in {steps}"

    @property
    def problem(self) -> str:
        """Why the weights are wrong; empty if they are right, or were not compared."""
        if self.is_wrong:
            return f"the weights were not compared: {self.reason}"
        if not self.first_unequal or not (self.is_exact or self.distance > MOST_ROUNDING):
            return ""
        return (
            f"after step {self.first_unequal} the weights are not as in the undisturbed run "
            f"(relative distance {self.distance:.1g}): a fault has changed the result, or the "
            "program depends on ranks, times or state outside of braid.elastic"
        )


def digests_of(rows: Rows) -> dict[StepOfRun, Digest]:
    """Return the digest of the whole weights by step, where all members have logged theirs.

    Args:
        rows: Logged numbers of each rank.
    """
    sums: dict[tuple[StepOfRun, int], Digest] = {}  # the second one is the epoch of members
    for row in (row for of_rank in rows.values() for row in of_rank if "weights_digest" in row):
        moment = StepOfRun(int(row["weights_training"]), int(row["step"]))
        before = sums.get((moment, int(row["weights_epoch"])), Digest())
        sums[moment, int(row["weights_epoch"])] = Digest(
            before.num_elements + int(row["weights"]),
            (before.bits + int(row["weights_digest"])) % MODULUS,
            before.projection + row["weights_projection"],
            before.squares + row["weights_squares"],
            before.orders | {int(row["weights_order"])},
        )
    most: dict[int, int] = {}  # elements by training
    for (moment, _), digest in sums.items():
        most[moment.training] = max(digest.num_elements, most.get(moment.training, 0))
    whole = (key for key, digest in sums.items() if digest.num_elements == most[key[0].training])
    return {moment: sums[moment, epoch] for moment, epoch in sorted(whole)}


def compared(
    struck: Mapping[StepOfRun, Digest], undisturbed: Mapping[StepOfRun, Digest]
) -> WeightComparison:
    """Compare the digests of two runs; see `digests_of`."""
    moments = sorted(struck.keys() & undisturbed.keys())
    if not moments:
        return WeightComparison(reason="the two runs have no step in common", is_wrong=True)
    pairs = {moment: (struck[moment], undisturbed[moment]) for moment in moments}
    unequal = {at: _distance(*pair) for at, pair in pairs.items() if pair[0][:2] != pair[1][:2]}
    orders = frozenset[int]().union(*(one.orders for pair in pairs.values() for one in pair))
    squares = [distance**2 for distance in unequal.values()]
    return WeightComparison(
        num_steps=len(moments),
        last_step=moments[-1].step,
        first_unequal=min(unequal).step if unequal else 0,
        distance=math.sqrt(sum(squares) / len(squares)) if squares else 0.0,
        is_exact=len(orders) == 1 and min(orders) >= 0,
    )


def _distance(a: Digest, b: Digest) -> float:
    """Estimate the distance of unequal weights, relative to the norm of the second ones."""
    distance = abs(a.projection - b.projection)
    is_known = a.num_elements == b.num_elements and math.isfinite(distance) and b.squares > 0
    return distance / math.sqrt(b.squares) if is_known else math.inf
