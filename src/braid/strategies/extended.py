"""The rarer names of a strategy: `strategy.extended`, as in `tf.distribute.StrategyExtended`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from braid.errors import ConfigError
from braid.parallel.data_parallel.devices import DeviceLike, as_device
from braid.strategies.values import of_replica, per_replica

if TYPE_CHECKING:
    from braid.strategies.strategy import Strategy

__all__ = ["StrategyExtended"]


class StrategyExtended:
    """Attributes and methods of a strategy that libraries use, as `strategy.extended`.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[torch.device, ...]:
        """Devices on which the replicas of this process compute."""
        return tuple(self._strategy.devices)

    @property
    def parameter_devices(self) -> tuple[torch.device, ...]:
        """Devices of the parameters of this process."""
        return tuple(self._strategy.devices)

    def reduce_to(
        self, op: str, value: Any, destinations: DeviceLike | torch.Tensor
    ) -> torch.Tensor:
        """Combine replicas' values with `op` (sum or mean) on a device, or on a tensor's device."""
        if isinstance(destinations, torch.Tensor):
            destinations = destinations.device
        total: torch.Tensor = self._strategy.reduce(op, value)
        return total.to(as_device(destinations))

    def batch_reduce_to(
        self, op: str, pairs: Sequence[tuple[Any, DeviceLike | torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Call `reduce_to` for each pair of a value and its device or tensor, and return a list."""
        return [self.reduce_to(op, value, destination) for value, destination in pairs]

    def update(
        self,
        var: torch.Tensor,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function with each replica's copy of a parameter, in the order of replicas.

        Args:
            var: Parameter of a module made in the scope.
            fn: Function of the copy and of the arguments. It must do the same to all copies.
            args: Arguments; a `PerReplica` in them is replaced by the value of the copy's replica.
            kwargs: Keyword arguments, with the same rule.

        Raises:
            ConfigError: The parameter was made outside of the scope.
        """
        copies = self._strategy.copies_of(var)
        named = kwargs or {}
        return per_replica(
            [fn(x, *of_replica(args, i), **of_replica(named, i)) for i, x in enumerate(copies)]
        )

    def variable_created_in_scope(self, v: torch.Tensor) -> bool:
        """Return whether a parameter is in a module made in the scope."""
        try:
            self._strategy.copies_of(v)
        except ConfigError:
            return False
        return True

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: torch.Tensor) -> Iterator[None]:
        """Do nothing: each replica already has all its parameters on one device.

        Raises:
            ConfigError: The parameter was made outside of the scope.
        """
        self._strategy.copies_of(colocate_with_variable)
        yield
