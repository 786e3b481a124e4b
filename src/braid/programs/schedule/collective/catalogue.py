"""Catalogue of algorithms, by name and operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from braid.errors import ConfigError
from braid.programs.schedule.collective import bruck, exchange, grid, naive, pairwise, ring, tree
from braid.programs.schedule.collective.rounds import Rounds
from braid.programs.schedule.collective.vocabulary import ROOTED
from braid.programs.schedule.program import check_ranks

__all__ = ["ALGORITHMS", "algorithm"]

ALGORITHMS: Mapping[tuple[str, str], Callable[..., Rounds]] = {
    ("ring", "all_reduce"): ring.all_reduce,
    ("ring", "reduce_scatter"): ring.reduce_scatter,
    ("ring", "all_gather"): ring.all_gather,
    ("doubling", "all_reduce"): exchange.doubling,
    ("halving_doubling", "all_reduce"): exchange.halving_doubling,
    ("hypercube", "all_gather"): exchange.hypercube,
    ("tree", "all_reduce"): tree.all_reduce,
    ("tree", "broadcast"): tree.broadcast,
    ("tree", "reduce"): tree.reduce,
    ("tree", "gather"): tree.gather,
    ("tree", "scatter"): tree.scatter,
    ("pairwise", "all_to_all"): pairwise.all_to_all,
    ("pairwise", "reduce_scatter"): pairwise.reduce_scatter,
    ("pairwise", "all_gather"): pairwise.all_gather,
    ("bruck", "all_to_all"): bruck.all_to_all,
    ("bruck", "all_gather"): bruck.all_gather,
    ("torus", "all_reduce"): grid.torus,
    ("hierarchical", "all_reduce"): grid.all_reduce,
    ("naive", "all_reduce"): naive.all_reduce,
    ("naive", "broadcast"): naive.broadcast,
    ("naive", "reduce"): naive.reduce,
    ("naive", "gather"): naive.gather,
    ("naive", "scatter"): naive.scatter,
    ("naive", "all_gather"): naive.all_gather,
}


def algorithm(
    name: str, operation: str, num_ranks: int, *, root: int | None = None, row: int | None = None
) -> Rounds:
    """Return the rounds of a named algorithm for a number of ranks.

    Args:
        name: Name of the algorithm, such as ring.
        operation: Name of the operation, such as all_reduce.
        num_ranks: World size.
        root: Root rank, for operations that have one; 0 when None.
        row: Number of ranks of a host, for hierarchical.

    Raises:
        ConfigError: The operation has no algorithm of this name, or the algorithm does not support
            the number of ranks, root or row.
    """
    make = ALGORITHMS.get((name, operation))
    if make is None:
        names = sorted(n for n, op in ALGORITHMS if op == operation)
        operations = sorted(op for n, op in ALGORITHMS if n == name)
        msg = f"{name} is not an algorithm for {operation}"
        if operations:
            msg += f" (but for {', '.join(operations)})"
        msg += f": choose one of {', '.join(names)}" if names else ": unknown operation"
        raise ConfigError(msg)
    check_ranks(num_ranks)
    if root is not None and operation not in ROOTED:
        msg = f"{operation} has no root, got root {root}: leave root out"
        raise ConfigError(msg)
    if name == "hierarchical":
        if row is None:
            msg = "hierarchical needs the number of ranks of a host: pass it as row"
            raise ConfigError(msg)
        return make(num_ranks, row)
    if operation not in ROOTED:
        return make(num_ranks)
    if root is not None and not 0 <= root < num_ranks:
        msg = f"root must be 0 to {num_ranks - 1}, got {root}"
        raise ConfigError(msg)
    return make(num_ranks, root or 0)
