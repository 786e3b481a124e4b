"""The order of samples: a function of (seed, epoch, step), whatever the number of ranks.

Problem: samplers that deal samples to ranks (rank, rank + n, rank + 2n, ...) change the global
batch when n changes, so a run that is resumed on fewer machines sees other data. They also find
their position only by replaying the epoch.

Idea: the global batch of a step is fixed first, from a permutation that is evaluated where needed;
only then does each rank use its contiguous share. The state of a run is two numbers, and continuing
costs nothing.

    epoch 0: permutation keyed by (seed, 0) ->  | batch of step 0 | batch of step 1 | ... (dropped)
                                                 rank 0 .. rank n-1

A short batch at the end is dropped. Contiguous shares make "one process that runs the n shards in
rank order" the same computation as n ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

from braid.errors import CheckpointError, ConfigError
from braid.programs.sampling.permutation import Permutation

__all__ = ["OrderedSampler", "SampleOrder", "SamplerState", "share_of"]

T = TypeVar("T")


class SamplerState(NamedTuple):
    """Position of a run: the epoch and the step, both counted from 0, of the next batch."""

    epoch: int = 0
    step: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOrder:
    """Order of a data set's samples: which samples are in the global batch of each step.

    Attributes:
        num_samples: Number of samples of the data set.
        batch_size: Number of samples of a global batch.
        seed: Number that chooses the order.
        shuffles: Whether the order is random; otherwise the order of the data set.
    """

    num_samples: int
    batch_size: int
    seed: int = 0
    shuffles: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= self.num_samples:
            msg = (
                f"batch_size must be 1 to {self.num_samples} (all samples), got "
                f"{self.batch_size}: choose a smaller batch or more data"
            )
            raise ConfigError(msg)

    @property
    def steps_per_epoch(self) -> int:
        """Number of whole global batches in one pass over the data."""
        return self.num_samples // self.batch_size

    def batch(self, at: SamplerState) -> list[int]:
        """Return the indices of the samples in the global batch of a step, in order.

        Raises:
            ConfigError: The epoch has no such step.
        """
        if at.epoch < 0 or not 0 <= at.step < self.steps_per_epoch:
            msg = (
                f"there is no batch at epoch {at.epoch}, step {at.step}: pass an epoch of at least "
                f"0 and a step from 0 to {self.steps_per_epoch - 1}"
            )
            raise ConfigError(msg)
        start = at.step * self.batch_size
        return self.samples(at.epoch, range(start, start + self.batch_size))

    def samples(self, epoch: int, places: range) -> list[int]:
        """Return the indices of the samples at these positions in the order of an epoch."""
        if not self.shuffles:
            return list(places)
        permutation = _permutation(self.num_samples, self.seed, epoch)
        return [permutation[i] for i in places]

    def after(self, at: SamplerState) -> SamplerState:
        """Return the state of the step after `at`, in the next epoch if necessary."""
        if at.step + 1 < self.steps_per_epoch:
            return SamplerState(at.epoch, at.step + 1)
        return SamplerState(at.epoch + 1, 0)


class OrderedSampler:
    """Sampler that returns the batches of a `SampleOrder` and can be saved in a checkpoint.

    Args:
        order: Order of samples.
        rank: This rank.
        num_replicas: Number of ranks that share each batch.

    Raises:
        ConfigError: The batch cannot be shared equally.
    """

    def __init__(self, order: SampleOrder, *, rank: int = 0, num_replicas: int = 1) -> None:
        self.order = order
        self.state = SamplerState()
        self._rank = rank
        self._num_replicas = num_replicas
        share_of(range(order.batch_size), rank, num_replicas)

    def next_batch(self) -> list[int]:
        """Return the indices of this rank's share of the next global batch, and advance."""
        batch = self.order.batch(self.state)
        self.state = self.order.after(self.state)
        return share_of(batch, self._rank, self._num_replicas)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of `epoch`."""
        self.state = SamplerState(epoch, 0)

    def state_dict(self) -> dict[str, int]:
        """Return the position and the arguments of the order, as values that JSON can store."""
        order = self.order
        return {
            **self.state._asdict(),
            "num_samples": order.num_samples,
            "batch_size": order.batch_size,
            "seed": order.seed,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a saved state, on any number of ranks.

        Raises:
            CheckpointError: The state was saved with another order of samples; the message lists
                every difference.
        """
        content: object = state  # a file may hold anything
        if not isinstance(content, Mapping):
            msg = f"state.sampler of the checkpoint is {str(content)[:80]}, not a sampler's state"
            raise CheckpointError(msg)
        mine = self.state_dict()
        differing = [
            f"{name} {state.get(name, 'missing')} (here {mine[name]})"
            for name in ("num_samples", "batch_size", "seed")
            if state.get(name) != mine[name]
        ]
        if differing:
            msg = (
                f"the checkpoint has another order of samples: {', '.join(differing)}; use the "
                "same data, context, batch and seed"
            )
            raise CheckpointError(msg)
        at = SamplerState(state.get("epoch", -1), state.get("step", -1))
        whole = type(at.epoch) is type(at.step) is int
        if not whole or at.epoch < 0 or not 0 <= at.step < self.order.steps_per_epoch:
            msg = (
                f"the checkpoint's sampler state {dict(state)} has no valid epoch and step (from "
                f"0 to {self.order.steps_per_epoch - 1}): use another checkpoint, this one is "
                "damaged"
            )
            raise CheckpointError(msg)
        self.state = at

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of this rank for the rest of the epoch, as torch's samplers do."""
        epoch = self.state.epoch
        while self.state.epoch == epoch:
            yield from self.next_batch()

    def __len__(self) -> int:
        """Return the number of samples of this rank in an epoch."""
        return self.order.steps_per_epoch * self.order.batch_size // self._num_replicas

    def __repr__(self) -> str:
        return (
            f"OrderedSampler({self.order}, rank {self._rank} of {self._num_replicas}, at "
            f"{self.state})"
        )


def share_of(batch: Sequence[T], rank: int, num_replicas: int) -> list[T]:
    """Return the contiguous part of a global batch that belongs to `rank`.

    Raises:
        ConfigError: The batch is not divisible, or the rank is not in the group.
    """
    if not 0 <= rank < num_replicas:
        msg = f"rank must be from 0 to {num_replicas - 1}, got {rank}"
        raise ConfigError(msg)
    size, rest = divmod(len(batch), num_replicas)
    if rest or not size:
        low = max(1, size) * num_replicas
        msg = (
            f"a batch of {len(batch)} samples cannot be divided equally among {num_replicas} "
            f"ranks: choose a multiple of {num_replicas}, such as {low} or {low + num_replicas}"
        )
        raise ConfigError(msg)
    return list(batch[rank * size : (rank + 1) * size])


@lru_cache(maxsize=16)
def _permutation(n: int, seed: int, epoch: int) -> Permutation:
    return Permutation(n, (seed, epoch))
