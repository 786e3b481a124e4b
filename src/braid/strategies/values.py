"""Values of several replicas: one for each, as `Strategy.run` takes and returns them.

    PerReplica    one value for each replica of this process, such as the shares of a batch
    SyncOnRead    values that replicas change by themselves, combined when they are read: metrics

Source: TensorFlow's `tf.distribute.DistributedValues`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from braid.errors import ConfigError
from braid.strategies.contexts import get_replica_context

__all__ = ["PerReplica", "SyncOnRead", "map_leaves", "of_replica", "per_replica", "shares_in"]

AGGREGATIONS = ("sum", "mean", "only_first_replica")


class PerReplica:
    """One value for each replica of this process.

    Args:
        values: Values in the order of replicas.
        samples: Number of samples of each replica, over all processes, if known; gradients are
            weighted by these numbers.
    """

    def __init__(self, values: Sequence[Any], samples: Sequence[int] | None = None) -> None:
        self.values = tuple(values)
        self.samples = None if samples is None else tuple(samples)

    def __repr__(self) -> str:
        inside = ", ".join(f"{i}: {value!r}" for i, value in enumerate(self.values))
        return f"{type(self).__name__}({inside})"


class SyncOnRead:
    """A number or tensor that each replica changes by itself, such as a metric.

    In a replica, `value` is the replica's tensor, to be read and changed in place. Outside of
    replicas, `read()` combines the tensors of this process's replicas, and `Strategy.reduce` the
    tensors of all replicas.

    Args:
        initial: First value of each replica.
        devices: Device of each replica of this process.
        aggregation: `sum`, `mean` or `only_first_replica`.

    Raises:
        ConfigError: The aggregation is unknown.
    """

    def __init__(
        self,
        initial: torch.Tensor | float,
        devices: Sequence[torch.device],
        aggregation: str = "sum",
    ) -> None:
        if aggregation not in AGGREGATIONS:
            msg = f"aggregation must be one of {', '.join(AGGREGATIONS)}, got {aggregation!r}"
            raise ConfigError(msg)
        self.aggregation = aggregation
        first = torch.as_tensor(initial).detach()
        self.values = tuple(first.to(device, copy=True) for device in devices)

    @property
    def value(self) -> torch.Tensor:
        """The tensor of the current replica.

        Raises:
            ConfigError: The caller is not in a replica.
        """
        replica = get_replica_context()
        if replica is None:
            msg = "value exists only inside a replica: call read() outside of strategy.run"
            raise ConfigError(msg)
        return self.values[replica.strategy.local_index(replica)]

    def read(self) -> torch.Tensor:
        """Return the combined value of this process's replicas, as a new tensor."""
        first = self.values[0].clone()
        if self.aggregation == "only_first_replica":
            return first
        for other in self.values[1:]:
            first += other.to(first.device)
        return first / len(self.values) if self.aggregation == "mean" else first


def of_replica(tree: Any, index: int) -> Any:
    """Return `tree` with each `PerReplica` in it replaced by its value for one replica."""
    return map_leaves(tree, lambda x: x.values[index] if isinstance(x, PerReplica) else x)


def per_replica(values: Sequence[Any]) -> Any:
    """Return results of replicas in one structure with `PerReplica` leaves.

    Structures of equal kind (tuples, lists, mappings) are joined; a single replica's result stays
    as it is.
    """
    first = values[0]
    if len(values) == 1:
        return first
    kind = type(first)
    if any(type(value) is not kind for value in values):
        return PerReplica(values)
    if isinstance(first, Mapping) and all(value.keys() == first.keys() for value in values):
        return {key: per_replica([value[key] for value in values]) for key in first}
    if isinstance(first, (tuple, list)) and len({len(value) for value in values}) == 1:
        joined = [per_replica(parts) for parts in zip(*values, strict=True)]
        return kind(*joined) if hasattr(first, "_fields") else kind(joined)
    return None if first is None else PerReplica(values)


def map_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of nested tuples, lists and mappings with `change` applied to each leaf."""
    if isinstance(tree, Mapping):
        return {key: map_leaves(value, change) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        parts = [map_leaves(value, change) for value in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return change(tree)


def shares_in(tree: Any, size: int) -> list[float] | None:
    """Return each replica's part of the samples in `tree`; None if it is not known, or equal.

    Args:
        tree: Tuples, lists and mappings with `PerReplica` values.
        size: Number of replicas.
    """
    samples = next((x.samples for x in _values_in(tree) if x.samples), None)
    if samples is None or len(set(samples)) == 1:
        return None
    assert len(samples) == size, "a data set knows all replicas"
    return [count / max(1, sum(samples)) for count in samples]


def _values_in(tree: Any) -> Iterator[PerReplica]:
    """Yield each `PerReplica` in tuples, lists and mappings."""
    if isinstance(tree, PerReplica):
        yield tree
    elif isinstance(tree, Mapping):
        yield from _values_in(list(tree.values()))
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            yield from _values_in(part)
