"""Comparison of all algorithms for an operation on one cluster, by size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from braid.errors import ConfigError
from braid.programs.cost.rounds import Estimate, simulate_rounds
from braid.programs.schedule.collective import ALGORITHMS, algorithm
from braid.programs.topology import Cluster

__all__ = ["Comparison", "compare"]

SAME = 1e-9  # relative difference of sums of floats in another order
LARGEST_NAIVE = 4096  # ranks: its rounds grow with the ranks, each with one message


class Comparison(NamedTuple):
    """Estimated times of several algorithms of a collective, for some buffer sizes.

    Attributes:
        sizes: Bytes of the largest full buffer of a rank.
        estimates: One estimate per size, by name of the algorithm.
        left_out: Reason why an algorithm was not estimated for this number of ranks, by name.
    """

    sizes: tuple[int, ...]
    estimates: dict[str, list[Estimate]]
    left_out: dict[str, str]

    def best(self, index: int) -> str:
        """Return the fastest algorithm for size number `index`."""
        return min(self.estimates, key=lambda name: self.estimates[name][index].seconds)

    def is_best(self, name: str, index: int) -> bool:
        """Return whether no algorithm is faster than `name` for size number `index`; ties count."""
        if name not in self.estimates:
            return False
        least = self.estimates[self.best(index)][index].seconds
        return self.estimates[name][index].seconds <= least * (1 + SAME)


def compare(
    operation: str,
    num_ranks: int,
    sizes: Sequence[int],
    cluster: Cluster,
    sum_s_per_byte: float = 0.0,
) -> Comparison:
    """Estimate the times of all algorithms for `operation`.

    Args:
        operation: Name of the operation, such as all_reduce.
        num_ranks: World size, at most the number of ranks of the cluster.
        sizes: Bytes of the largest full buffer of a rank.
        cluster: Network; the algorithm `hierarchical` takes the units of the first level as hosts.
        sum_s_per_byte: Seconds to add up one byte.

    Raises:
        ConfigError: No algorithm implements the operation, or the cluster has fewer ranks.
    """
    names = [name for name, known in ALGORITHMS if known == operation]
    if not names:
        known = sorted({op for _, op in ALGORITHMS})
        msg = f"unknown operation {operation!r}: choose one of {', '.join(known)}"
        raise ConfigError(msg)
    cluster.check_size(num_ranks)
    estimates, left_out = {}, {}
    for name in names:
        if name in {"naive", "pairwise"} and num_ranks > LARGEST_NAIVE:
            left_out[name] = (
                f"has one round per rank, too many to compute above {LARGEST_NAIVE} ranks"
            )
            continue
        if name == "hierarchical" and cluster.levels[0].size >= num_ranks:
            left_out[name] = f"is a ring where one {cluster.levels[0].name} holds all ranks"
            continue
        try:
            rounds = algorithm(name, operation, num_ranks, row=cluster.levels[0].size)
        except ConfigError as exc:
            left_out[name] = str(exc)
            continue
        estimates[name] = [simulate_rounds(rounds, n, cluster, sum_s_per_byte) for n in sizes]
    return Comparison(tuple(sizes), estimates, left_out)
