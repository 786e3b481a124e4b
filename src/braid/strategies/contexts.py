"""Contexts: code runs in a strategy's scope (for all replicas), or in one replica.

    with strategy.scope():          cross-replica context: models and optimizers are made here
        strategy.run(step)          step runs in the replica context of each replica
            context.merge_call(f)   f runs once, in the cross-replica context again

Source of the names: TensorFlow's `tf.distribute`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from braid.comm import Group
from braid.comm.autograd import all_gather, all_reduce
from braid.errors import ConfigError

if TYPE_CHECKING:
    from braid.strategies.strategy import Strategy

__all__ = [
    "ReplicaContext",
    "entered",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]


class _Place(threading.local):
    """The strategy and the replica of this thread."""

    strategy: Strategy | None = None
    replica: ReplicaContext | None = None


_PLACE = _Place()


class ReplicaContext:
    """Context of one replica inside `strategy.run`.

    Args:
        strategy: Strategy that runs it.
        group: Group of all replicas; the replica is its rank.
        share: Part of the samples that the replica has; 1 / number of replicas if it is not known.
        merge: Calls a function once for all replicas of this process.
    """

    def __init__(
        self,
        strategy: Strategy,
        group: Group,
        share: float,
        merge: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
    ) -> None:
        self.strategy = strategy
        self.group = group
        self.share = share
        self._merge = merge

    @property
    def replica_id_in_sync_group(self) -> int:
        """Number of this replica, over all processes."""
        return self.group.rank

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas, over all processes."""
        return self.group.size

    def all_reduce(self, op: str, value: torch.Tensor) -> torch.Tensor:
        """Return the sum or the mean of all replicas' tensors. Differentiable.

        Args:
            op: `sum` or `mean`.
            value: Tensor of the same shape and dtype in each replica; it is not changed.

        Raises:
            ConfigError: `op` is neither `sum` nor `mean`.
            MismatchError: Replicas have different shapes or dtypes, or call another collective.

        Cost: one all-reduce.
        """
        _check_is_replica("all_reduce")
        return all_reduce(self.group, value, {"sum": "sum", "mean": "avg"}[checked_op(op)])

    def all_gather(self, value: torch.Tensor, axis: int = 0) -> torch.Tensor:
        """Return the tensors of all replicas, concatenated along a dim. Differentiable.

        Args:
            value: Tensor of this replica; the size of dim `axis` may differ between replicas.
            axis: Dim along which the tensors are concatenated.

        Raises:
            MismatchError: Dtypes differ between replicas, or sizes of a dim other than `axis`.

        Cost: one all-gather, and one of the sizes.
        """
        _check_is_replica("all_gather")
        sizes = self.group.all_gather(torch.tensor([value.shape[axis]])).tolist()
        return all_gather(self.group, value, dim=axis, sizes=sizes)

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `merge_fn(strategy, *args)` once for all replicas of this process.

        The function gets each argument as a `PerReplica` with the values of all replicas. All
        replicas must call `merge_call`. If the function returns a `PerReplica`, each replica gets
        its value. `kwargs` are keyword arguments of the function, by name.

        Raises:
            ConfigError: A function that `merge_call` runs calls `merge_call` again.
        """
        _check_is_replica("merge_call")
        return self._merge(merge_fn, args, kwargs or {})


def _check_is_replica(name: str) -> None:
    if in_cross_replica_context():
        msg = (
            f"{name} was called inside merge_call or a scope, where no replica runs: call it in "
            "the function passed to strategy.run"
        )
        raise ConfigError(msg)


def checked_op(op: str) -> str:
    """Return `sum` or `mean` for this name, or for an enum member of TensorFlow with the name.

    Raises:
        ConfigError: The name is neither `sum` nor `mean`.
    """
    name = str(getattr(op, "name", op)).lower()
    if name not in {"sum", "mean"}:
        msg = f"op must be sum or mean to combine values of replicas, got {op!r}"
        raise ConfigError(msg)
    return name


def has_strategy() -> bool:
    """Return whether a strategy's scope or one of its replicas is active."""
    return _PLACE.strategy is not None


def get_strategy() -> Strategy:
    """Return the strategy of the scope or the replica in which this statement runs.

    Raises:
        ConfigError: This statement is not in a strategy's scope or replica.
    """
    if _PLACE.strategy is None:
        msg = "no strategy is active here: call this in strategy.scope() or in strategy.run"
        raise ConfigError(msg)
    return _PLACE.strategy


def get_replica_context() -> ReplicaContext | None:
    """Return the replica in which this statement runs; None outside of replicas."""
    return _PLACE.replica


def in_cross_replica_context() -> bool:
    """Return whether this statement is in a strategy's scope, but not in a replica."""
    return _PLACE.strategy is not None and _PLACE.replica is None


@contextmanager
def entered(strategy: Strategy, replica: ReplicaContext | None = None) -> Iterator[None]:
    """Run the block in the scope of a strategy, or in one of its replicas.

    Raises:
        ConfigError: Another strategy's scope is entered already.
    """
    before = _PLACE.strategy, _PLACE.replica
    if _PLACE.strategy not in {None, strategy}:
        msg = (
            f"the scope of {type(strategy).__name__} was entered inside the scope of "
            f"{type(_PLACE.strategy).__name__}: leave one scope before you enter another"
        )
        raise ConfigError(msg)
    _PLACE.strategy, _PLACE.replica = strategy, replica
    try:
        yield
    finally:
        _PLACE.strategy, _PLACE.replica = before
