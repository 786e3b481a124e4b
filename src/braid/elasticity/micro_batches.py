"""The micro-batches of one rank, in the order of a data set that does not depend on ranks.

The user's DataLoader says how samples are read; which ones, the order of samples says. It is the
same for any number of ranks, so each sample comes once per epoch whatever happens to ranks. Random
numbers that a data set draws for a sample are seeded by the sample, not by the process.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from braid.comm import Group
from braid.elasticity.gradient_sums import num_rounds, shard_of
from braid.errors import ConfigError, MismatchError
from braid.programs.sampling import SampleOrder, SamplerState

__all__ = ["MicroBatches", "require_same_data", "seed_all"]

LOG = logging.getLogger(__name__)


class MicroBatches:
    """Micro-batches of a data set.

    Args:
        loader: Says how samples are read. Its batch size is that of a micro-batch; its order counts
            only as far as it is shuffled or not.
        num_shards: Number of micro-batches of a step.
        seed: Number that chooses the order.
        verify: Number of steps after which each rank has the first micro-batch of the next one
            before its own; 0 for never.

    Attributes:
        order: Order of samples; its batches are those of whole steps.

    Raises:
        ConfigError: The loader's order cannot be kept, or it has too few samples.
    """

    def __init__(
        self, loader: DataLoader[Any], num_shards: int, seed: int, *, verify: int = 0
    ) -> None:
        if isinstance(loader.dataset, IterableDataset):
            msg = "an IterableDataset has no samples by number: use a data set with __getitem__"
            raise ConfigError(msg)
        sampler = loader.sampler
        is_usual = type(loader) is DataLoader
        is_usual &= type(sampler) in {RandomSampler, SequentialSampler}
        if isinstance(sampler, RandomSampler):
            is_usual &= not sampler.replacement and sampler.num_samples == len(sampler.data_source)
        if loader.batch_size is None or not is_usual:
            msg = (
                f"braid.elastic cannot keep the order of a {type(loader).__name__} with "
                f"{type(sampler).__name__}: give a DataLoader batch_size and shuffle only, as the "
                "order may not depend on ranks"
            )
            raise ConfigError(msg)
        self.order = SampleOrder(
            num_samples=len(loader.dataset),  # type: ignore[arg-type]  # torch has no type for it
            batch_size=loader.batch_size * num_shards,
            seed=seed,
            shuffles=isinstance(sampler, RandomSampler),
        )
        self._loader = loader
        self._num_shards = num_shards
        self._size = loader.batch_size
        self._verify = verify
        self._samples = _SeededSamples(loader.dataset, seed)

    def warn_of_rest(self, group: Group) -> None:
        """Warn of samples that are too few for another step, on rank 0."""
        order = self.order
        left = order.num_samples - order.steps_per_epoch * order.batch_size
        if left and not group.rank:
            LOG.warning(
                "braid: %d of %d samples are left out in each pass, as a step has %d: %d "
                "micro-batches of %d",
                left,
                order.num_samples,
                order.batch_size,
                self._num_shards,
                self._size,
            )

    def facts(self, at: SamplerState, before: Mapping[str, object]) -> dict[str, object]:
        """Return by name what all ranks must share to go on at `at`.

        Args:
            at: The next step.
            before: Facts of the steps before.

        Raises:
            ConfigError: The step does not exist, or the steps before it had other samples.
        """
        order = self.order
        if at.step >= order.steps_per_epoch:
            msg = (
                f"the loader has {order.steps_per_epoch} steps in an epoch, and step "
                f"{at.step + 1} is next: use one loader until an epoch ends"
            )
            raise ConfigError(msg)
        facts: dict[str, object] = {
            "samples": order.num_samples,
            "samples of a step": order.batch_size,
            "shuffled": order.shuffles,
            "seed": order.seed,
        }
        if at.step and before and before != facts:
            listed = ", ".join(f"{name} {before[name]} (here {facts[name]})" for name in facts)
            msg = (
                f"{at.step} steps of this pass were trained with another order of samples: "
                f"{listed}. Go on with the same data, batch size, shards and seed"
            )
            raise ConfigError(msg)
        return facts

    def after(
        self,
        at: SamplerState,
        rank: int,
        num_ranks: int,
        num_steps: int = 0,
        *,
        fills: bool = False,
    ) -> Iterator[Any]:
        """Yield the micro-batches of a rank from step `at` to the end of its epoch.

        Args:
            at: Epoch and step in it.
            rank: The rank.
            num_ranks: Number of ranks.
            num_steps: Number of steps before, in all epochs.
            fills: Whether a rank without a micro-batch in a round gets the last one of the step.
        """
        loader = self._loader
        parts = {
            name: getattr(loader, name)
            for name in (
                "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn",
                "multiprocessing_context", "prefetch_factor",
            )
        }  # fmt: skip
        indices = _Indices(partial(self._indices, at, rank, num_ranks, num_steps, fills))
        return iter(DataLoader(self._samples, batch_sampler=indices, **parts))

    def _indices(
        self, at: SamplerState, rank: int, num_ranks: int, num_steps: int, fills: bool
    ) -> Iterator[list[tuple[int, int]]]:
        for step in range(at.step, self.order.steps_per_epoch):
            batch = self.order.batch(SamplerState(at.epoch, step))
            is_checked = self._verify and (num_steps + step - at.step) % self._verify == 0
            if is_checked and num_ranks > 1:
                yield self._part(batch, (rank + 1) % num_ranks, at.epoch)
            for number in range(num_rounds(self._num_shards, num_ranks)):
                shard = shard_of(number, rank, num_ranks, self._num_shards)
                if shard is None and fills:
                    shard = self._num_shards - 1
                if shard is not None:
                    yield self._part(batch, shard, at.epoch)

    def _part(self, batch: list[int], shard: int, epoch: int) -> list[tuple[int, int]]:
        return [(epoch, index) for index in batch[shard * self._size : (shard + 1) * self._size]]


def require_same_data(group: Group, facts: Sequence[Mapping[str, object]]) -> None:
    """Refuse members that would train on different samples.

    Args:
        group: The members.
        facts: Values of each member, by name, that must be equal where two have them.

    Raises:
        MismatchError: Some differ.
    """
    first: dict[str, tuple[int, object]] = {}
    for rank, own in zip(group.ranks, facts, strict=True):
        for name, value in own.items():
            other, expected = first.setdefault(name, (rank, value))
            if value != expected:
                msg = (
                    f"ranks train on different data: {name} is {value} on rank {rank} and "
                    f"{expected} on rank {other}; as a new process is alone at first, sizes may "
                    "not depend on braid.world()"
                )
                raise MismatchError(msg)


class _Indices:
    """Indices of batches, computed when they are needed."""

    def __init__(self, make: Callable[[], Iterator[list[tuple[int, int]]]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self._make()


class _SeededSamples(Dataset[Any]):
    """Samples by (epoch, index), with random numbers of their own."""

    def __init__(self, samples: Dataset[Any], seed: int) -> None:
        self._samples = samples
        self._seed = seed

    def __getitem__(self, at: tuple[int, int]) -> Any:
        seed_all(self._seed, *at)
        return self._samples[at[1]]


def seed_all(*key: int) -> None:
    """Seed the generators of torch, numpy and `random` by a key."""
    seed = hash(key) & 0xFFFFFFFF  # of numbers only, so the same in all processes
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
