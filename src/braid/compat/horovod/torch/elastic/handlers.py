"""Handlers that save, restore and broadcast the state of one kind of object."""

from __future__ import annotations

import copy
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from braid.compat.horovod.torch.differentiable import allgather
from braid.compat.horovod.torch.elastic.sampler import ElasticSampler
from braid.compat.horovod.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

__all__ = [
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "handler_for",
]

T = TypeVar("T")


class StateHandler(Generic[T]):
    """Saves, restores and synchronizes an object with `state_dict`; base of other handlers.

    Args:
        value: The object.

    Attributes:
        value: The object.
    """

    def __init__(self, value: T) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        """Copy the object's state in memory, for `restore`."""
        self._saved = copy.deepcopy(self._state_dict())

    def restore(self) -> None:
        """Restore the state of the last `save`."""
        self._load(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Replace the object's state by rank 0's state; a collective."""
        self._load(broadcast_object(self._state_dict()))

    def set_value(self, value: T) -> None:
        """Replace the handled object."""
        self.value = value
        self.save()

    def _state_dict(self) -> Any:
        return self.value.state_dict()  # type: ignore[attr-defined]  # `handler_for` checks it

    def _load(self, state: Any) -> None:
        self.value.load_state_dict(state)  # type: ignore[attr-defined]


class ModelStateHandler(StateHandler[nn.Module]):
    """Saves, restores and synchronizes the state of a model."""

    def sync(self) -> None:
        """Replace parameters and buffers by rank 0's values, in place; a collective."""
        broadcast_parameters(self._state_dict(), 0)


class OptimizerStateHandler(StateHandler[torch.optim.Optimizer]):
    """Handler of an optimizer, which may be a `DistributedOptimizer`."""

    def sync(self) -> None:
        """Replace the optimizer's state and options by rank 0's; a collective."""
        broadcast_optimizer_state(self.value, 0)


class SamplerStateHandler(StateHandler[ElasticSampler]):
    """Handler of a sampler: samples that any rank has processed count as processed on all ranks."""

    def sync(self) -> None:
        """Take the epoch of rank 0 and the processed samples of all ranks; a collective."""
        epoch = int(broadcast_object(self.value.epoch))
        state = self._state_dict()
        processed = state["processed_indices"] if state["epoch"] == epoch else ()
        gathered = allgather(torch.tensor(sorted(processed), dtype=torch.int64))
        self._load({"epoch": epoch, "processed_indices": set(gathered.tolist())})


def handler_for(value: Any) -> StateHandler[Any] | None:
    """Return a handler for an object; None for plain values."""
    if isinstance(value, nn.Module):
        return ModelStateHandler(value)
    if isinstance(value, torch.optim.Optimizer):
        return OptimizerStateHandler(value)
    if isinstance(value, ElasticSampler):
        return SamplerStateHandler(value)
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return StateHandler(value)
    return None
