"""Compares the weights of a run under faults with the weights of the same run without faults.

Under `braid chaos`, each member logs a digest of its share of the weights after every tenth step
(`elasticity.weight_digest`). The digests of all members add up to the digest of the whole weights,
on any mesh. A step counts if all elements of the weights were logged in both runs: a rank may die
before its line is written.

Where a run promises the same bits, digests must be equal. Tensor parallel layers, and weights that
stages share, are added up in another order on another mesh: there the distance of the weights,
estimated from a random projection, must be small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

__all__ = ["Rows", "WeightComparison", "compared", "digests_of"]

MODULUS = 1 << 52
MOST_ROUNDING = 0.01  # relative distance of weights that are rounded in another order

Rows = Mapping[int, Iterable[Mapping[str, float]]]


class Digest(NamedTuple):
    """Digest of the whole weights after a step; see `weight_digest`."""

    num_elements: int
    bits: int
    projection: float
    squares: float
    is_exact: bool


class WeightComparison(NamedTuple):
    """Result of the comparison of two runs.

    Attributes:
        num_steps: Number of compared steps.
        last_step: The last one of them.
        first_unequal: First step after which weights differ; 0 if there is none.
        distance: Largest distance of the weights, relative to their norm.
        is_exact: Whether the bits must be equal.
        reason: Why no step was compared; empty if steps were.
    """

    num_steps: int = 0
    last_step: int = 0
    first_unequal: int = 0
    distance: float = 0.0
    is_exact: bool = True
    reason: str = ""

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
        if not self.first_unequal or not (self.is_exact or self.distance > MOST_ROUNDING):
            return ""
        return (
            f"after step {self.first_unequal} the weights are not as in the undisturbed run "
            f"(relative distance up to {self.distance:.1g}): a fault has changed the result, or "
            "the program depends on ranks, times or state outside of braid.elastic"
        )


def digests_of(rows: Rows) -> dict[int, Digest]:
    """Return the digest of the whole weights by step, where all members have logged theirs.

    Args:
        rows: Logged numbers of each rank.
    """
    sums: dict[int, Digest] = {}
    for of_rank in rows.values():
        for row in of_rank:
            if "weights_digest" in row:
                step = int(row["step"])
                before = sums.get(step, Digest(0, 0, 0.0, 0.0, is_exact=True))
                sums[step] = Digest(
                    before.num_elements + int(row["weights"]),
                    (before.bits + int(row["weights_digest"])) % MODULUS,
                    before.projection + row["weights_projection"],
                    before.squares + row["weights_squares"],
                    before.is_exact and bool(row["weights_exact"]),
                )
    most = max((digest.num_elements for digest in sums.values()), default=0)
    return {step: digest for step, digest in sums.items() if digest.num_elements == most}


def compared(struck: Mapping[int, Digest], undisturbed: Mapping[int, Digest]) -> WeightComparison:
    """Compare the digests of two runs by step; see `digests_of`."""
    steps = sorted(struck.keys() & undisturbed.keys())
    if not steps:
        return WeightComparison(reason="the two runs have no step in common")
    pairs = {step: (struck[step], undisturbed[step]) for step in steps}
    unequal = {step: _distance(*pair) for step, pair in pairs.items() if pair[0][:2] != pair[1][:2]}
    return WeightComparison(
        num_steps=len(steps),
        last_step=steps[-1],
        first_unequal=min(unequal, default=0),
        distance=max(unequal.values(), default=0.0),
        is_exact=all(a.is_exact and b.is_exact for a, b in pairs.values()),
    )


def _distance(a: Digest, b: Digest) -> float:
    """Estimate the distance of unequal weights, relative to the norm of the second ones."""
    distance = abs(a.projection - b.projection)
    is_known = a.num_elements == b.num_elements and math.isfinite(distance) and b.squares > 0
    return distance / math.sqrt(b.squares) if is_known else math.inf
