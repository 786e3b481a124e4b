"""Actions after each epoch of `fit`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from braid.errors import ConfigError

__all__ = ["Callback", "EarlyStop"]


@runtime_checkable
class Callback(Protocol):
    """Interface of callbacks: an action that `fit` runs after each epoch.

    A callback with `state_dict` and `load_state_dict` is saved and resumed with the training.
    """

    def on_epoch_end(self, epoch: int, results: Mapping[str, float]) -> bool | None:
        """Return True to end the training.

        Args:
            epoch: Number of the epoch, from 0.
            results: Means over all samples: `loss`, and with validation data `validation_loss` and
                the metrics.
        """


class EarlyStop:
    """Ends the training when a result has not improved for `patience` epochs.

    Args:
        result: Name of the result, which is better when it is smaller.
        patience: Number of epochs without a better result.
        is_greater_better: Whether the result is better when it is greater, such as an accuracy.

    Raises:
        ConfigError: `patience` is less than 1.
    """

    def __init__(
        self,
        result: str = "validation_loss",
        patience: int = 3,
        *,
        is_greater_better: bool = False,
    ) -> None:
        if patience < 1:
            msg = f"patience must be at least 1 epoch, got {patience}"
            raise ConfigError(msg)
        self._result, self._patience = result, patience
        self._sign = -1.0 if is_greater_better else 1.0
        self._best, self._num_worse = float("inf"), 0

    def on_epoch_end(self, epoch: int, results: Mapping[str, float]) -> bool:
        """Return True after `patience` epochs without a better result; see `Callback`.

        Raises:
            ConfigError: `results` does not contain the name `result`.
        """
        del epoch
        if self._result not in results:
            msg = (
                f"EarlyStop watches {self._result!r}, but the results are {', '.join(results)}: "
                "name one of them"
            )
            raise ConfigError(msg)
        value = self._sign * results[self._result]
        self._num_worse = 0 if value < self._best else self._num_worse + 1
        self._best = min(value, self._best)
        return self._num_worse >= self._patience

    def state_dict(self) -> dict[str, Any]:
        """Return the best result, and the number of epochs without a better one."""
        return {"best": str(self._best), "num_worse": self._num_worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state that `state_dict` returned."""
        self._best, self._num_worse = float(state["best"]), state["num_worse"]
