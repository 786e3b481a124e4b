"""The order of samples: a function of (seed, epoch, step) that does not know how many ranks there are.

Problem: samplers that deal samples to ranks (rank, rank + n, rank + 2n, ...) change the global
batch when n changes, so a run that is resumed on fewer machines sees other data; and they remember
where they were only by replaying the epoch.

Idea: the global batch of a step is fixed first, from a permutation that is evaluated where needed;
only then does each rank take its contiguous share. The state of a run is two numbers, and
continuing costs nothing.

        epoch 0: permutation keyed by (seed, 0) ->  | batch of step 0 | batch of step 1 | ...  (a
                                                     last short batch is dropped) rank 0 .. rank n-1

Contiguous shares make "one process that runs the n shards in rank order" the same computation as n
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

from braid.errors import CheckpointError, ConfigError
from braid.sampling.permutation import Permutation

__all__ = ["OrderedSampler", "SampleOrder", "SamplerState", "share_of"]

T = TypeVar("T")


class SamplerState(NamedTuple):
    """Where a run is: the next batch is that of `step` (counted from 0 in the epoch) of `epoch`."""

    epoch: int = 0
    step: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOrder:
    """Which samples make up the global batch of each step.

    Attributes:
        num_samples: Number of samples of the data set.
        batch_size: Samples of a global batch.
        seed: Chooses the order.
    """

    num_samples: int
    batch_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= self.num_samples:
            msg = (
                f"expected a batch of 1 to {self.num_samples} samples (all there are), found "
                f"{self.batch_size}: "
                "choose a smaller batch or more data"
            )
            raise ConfigError(msg)

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches in one pass over the data."""
        return self.num_samples // self.batch_size

    def batch(self, at: SamplerState) -> list[int]:
        """Indices of the global batch, in order.

        Raises:
            ConfigError: The epoch has no such step.
        """
        if at.epoch < 0 or not 0 <= at.step < self.steps_per_epoch:
            msg = f"expected a step in 0..{self.steps_per_epoch - 1} of an epoch >= 0, found {at}"
            raise ConfigError(msg)
        permutation = _permutation(self.num_samples, self.seed, at.epoch)
        start = at.step * self.batch_size
        return [permutation[i] for i in range(start, start + self.batch_size)]

    def after(self, at: SamplerState) -> SamplerState:
        """The state of the following step."""
        if at.step + 1 < self.steps_per_epoch:
            return SamplerState(at.epoch, at.step + 1)
        return SamplerState(at.epoch + 1, 0)


class OrderedSampler:
    """Walks through a `SampleOrder`; its state goes into the checkpoint.

    Args:
        order: The order.
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
        """Indices of this rank's share of the next global batch; moves on."""
        batch = self.order.batch(self.state)
        self.state = self.order.after(self.state)
        return share_of(batch, self._rank, self._num_replicas)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of `epoch`."""
        self.state = SamplerState(epoch, 0)

    def state_dict(self) -> dict[str, int]:
        """The state and what it refers to, as JSON knows it."""
        order = self.order
        return {
            **self.state._asdict(),
            "num_samples": order.num_samples,
            "batch_size": order.batch_size,
            "seed": order.seed,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where `state` was taken, on any number of ranks.

        Raises:
            CheckpointError: It is of another order of samples; lists every difference.
        """
        mine = self.state_dict()
        differing = [
            f"{name} {state.get(name, 'missing')} (here {mine[name]})"
            for name in ("num_samples", "batch_size", "seed")
            if state.get(name) != mine[name]
        ]
        if differing:
            msg = (
                "expected to continue with the same order of samples, found in the checkpoint "
                f"{', '.join(differing)}: use the same data, context, batch and seed"
            )
            raise CheckpointError(msg)
        at = SamplerState(state.get("epoch", -1), state.get("step", -1))
        if at.epoch < 0 or not 0 <= at.step < self.order.steps_per_epoch:
            msg = (
                "expected a step of an epoch in the checkpoint's sampler state, found "
                f"{dict(state)}"
            )
            raise CheckpointError(msg)
        self.state = at

    def __iter__(self) -> Iterator[int]:
        """Indices of this rank for the rest of the epoch, as torch's samplers give them."""
        epoch = self.state.epoch
        while self.state.epoch == epoch:
            yield from self.next_batch()

    def __len__(self) -> int:
        """Number of samples of this rank in an epoch."""
        return self.order.steps_per_epoch * self.order.batch_size // self._num_replicas

    def __repr__(self) -> str:
        return (
            f"OrderedSampler({self.order}, rank {self._rank} of {self._num_replicas}, at "
            f"{self.state})"
        )


def share_of(batch: Sequence[T], rank: int, num_replicas: int) -> list[T]:
    """The contiguous part of a global batch that belongs to `rank`.

    Raises:
        ConfigError: The batch is not divisible, or there is no such rank.
    """
    if not 0 <= rank < num_replicas:
        msg = f"expected a rank in 0..{num_replicas - 1}, found {rank}"
        raise ConfigError(msg)
    size, rest = divmod(len(batch), num_replicas)
    if rest or not size:
        low = max(1, size) * num_replicas
        msg = (
            f"expected a batch that {num_replicas} ranks can share equally, found {len(batch)} "
            "samples: "
            f"choose a multiple of {num_replicas}, such as {low} or {low + num_replicas}"
        )
        raise ConfigError(msg)
    return list(batch[rank * size : (rank + 1) * size])


@lru_cache(maxsize=16)
def _permutation(n: int, seed: int, epoch: int) -> Permutation:
    return Permutation(n, (seed, epoch))
