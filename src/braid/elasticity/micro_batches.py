"""The micro-batches of one rank, in the order of a data set that does not depend on ranks.

The user's DataLoader chooses how samples are read, and the order of samples which ones. This order
is the same for any number of ranks, so each sample comes once per epoch whatever happens to ranks.
Random numbers that a data set draws for a sample are seeded by the sample, not by the process. A
sampler other than torch's usual ones draws the order of each pass, with seeded random numbers.

    pass of 10 samples, steps of 2 micro-batches of 3      0 1 2 | 3 4 5    6 7 8 | 9
    gradient of the last step                              mean over its 4 samples
"""

from __future__ import annotations

import operator
import random
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache, partial
from itertools import islice
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from braid.comm import Group
from braid.elasticity.gradient_sums import num_rounds, shard_of
from braid.elasticity.suspects import NO_CHECKS, CheckedSteps
from braid.errors import ConfigError, MismatchError
from braid.programs.sampling import SampleOrder

__all__ = ["DataPosition", "MicroBatches", "require_same_data", "seed_all"]


class DataPosition(NamedTuple):
    """Position in the data: `sample` samples of the pass `epoch` come before the next step."""

    epoch: int = 0
    sample: int = 0


class MicroBatches:
    """Micro-batches into which the samples of each step are divided.

    Args:
        loader: Loader that reads samples. Its batch size is the size of a micro-batch. Its order is
            replaced if it has no sampler; only whether it shuffles is kept. A sampler must draw the
            same order on all ranks; see `DrawnOrder`. Without `drop_last`, the last step of a pass
            has the remaining samples; with it, samples too few for a step are dropped.
        seed: Seed of the order of samples.
        per_rank: Whether the number of micro-batches of a step changes with the number of ranks.
            `drop_last` then drops samples too few for a micro-batch, so that a pass ends at the
            same sample on any number of ranks.

    Attributes:
        loader: The loader.
        epoch: Last pass over the data in which the loader was used.

    Raises:
        ConfigError: The loader's order cannot be kept, or it has no samples.
    """

    def __init__(self, loader: DataLoader[Any], seed: int, *, per_rank: bool = False) -> None:
        if isinstance(loader.dataset, IterableDataset):
            msg = (
                "an IterableDataset cannot be indexed by sample number: use a data set with "
                "__getitem__ and __len__"
            )
            raise ConfigError(msg)
        is_usual = type(loader) is DataLoader
        if loader.batch_size is None or not is_usual:
            what = "batch_size=None or a batch_sampler" if is_usual else "another class"
            msg = (
                f"braid.elastic divides batches among ranks, so the loader may not have {what} (it "
                f"is a {type(loader).__name__}): make a DataLoader with batch_size, and shuffle or "
                "a sampler"
            )
            raise ConfigError(msg)
        self._order = _order_of(loader, seed)
        self.loader = loader
        self.epoch = -1
        self._size = loader.batch_size
        self._per_rank = per_rank
        self._samples = _SeededSamples(loader.dataset, seed)

    def sizes(self, at: DataPosition, num_shards: int) -> list[int]:
        """Return the numbers of samples of the micro-batches of a step; empty if no samples remain.

        Args:
            at: Position of the step.
            num_shards: Number of micro-batches in a step that has enough samples.
        """
        whole = num_shards * self._size
        remaining = self._order.num_samples - at.sample
        if self.loader.drop_last:
            remaining -= remaining % (self._size if self._per_rank else whole)
        count = min(whole, remaining)
        return [min(self._size, count - begin) for begin in range(0, count, self._size)]

    def next(self, at: DataPosition, num_shards: int) -> DataPosition:
        """Return the position of the following step; see `sizes`."""
        following = at._replace(sample=at.sample + sum(self.sizes(at, num_shards)))
        return following if self.sizes(following, num_shards) else DataPosition(at.epoch + 1)

    def facts(
        self, at: DataPosition, num_shards: int, before: Mapping[str, object]
    ) -> dict[str, object]:
        """Return the values, by name, that must be equal on all ranks to continue at `at`.

        Args:
            at: Position of the next step.
            num_shards: Number of micro-batches of the step.
            before: Values that this method returned for earlier steps.

        Raises:
            ConfigError: The step does not exist, or the steps before it had other samples.
        """
        order = self._order
        if not self.sizes(at, num_shards):
            msg = (
                f"the loader has {order.num_samples} samples, but a step of {num_shards} times "
                f"{self._size} begins at sample {at.sample}: keep one loader for a whole pass, "
                "and give it enough samples for a step or drop_last=False"
            )
            raise ConfigError(msg)
        unit = (self._size, "micro-batch") if self._per_rank else (self._size * num_shards, "step")
        facts: dict[str, object] = {
            "samples": order.num_samples,
            f"samples of a {unit[1]}": unit[0],
            "seed": order.seed,
        }
        if isinstance(order, DrawnOrder):
            facts[f"checksum of the order by {order.name}"] = order.checksum(at.epoch)
        else:
            facts["shuffled"] = order.shuffles
        if at.sample and before and before != facts:
            listed = ", ".join(
                f"{name} {before.get(name)} (here {value})"
                for name, value in facts.items()
                if value != before.get(name)
            )
            msg = (
                f"{at.sample} samples of this pass were trained in another order of samples: "
                f"{listed}. Go on with the same data, batch size, shards and seed"
            )
            raise ConfigError(msg)
        return facts

    def after(
        self,
        at: DataPosition,
        rank: int,
        num_ranks: int,
        num_shards: int,
        num_steps: int = 0,
        *,
        checks: CheckedSteps = NO_CHECKS,
        fills: bool = False,
    ) -> Iterator[Any]:
        """Yield the micro-batches of a rank from the step at `at` to the end of its pass.

        A rank without a micro-batch in the first round of a step gets the step's last micro-batch;
        its result is not used.

        Args:
            at: Position of the step.
            rank: The rank.
            num_ranks: Number of ranks.
            num_shards: See `sizes`.
            num_steps: Number of earlier steps, in all passes.
            checks: Steps in which each rank first gets the next rank's first micro-batch.
            fills: Whether a rank without a micro-batch gets the last one in every round, not just
                in the first.
        """
        loader = self.loader
        parts = {
            name: getattr(loader, name)
            for name in (
                "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn",
                "multiprocessing_context", "prefetch_factor",
            )
        }  # fmt: skip
        dealt = partial(self._indices, at, rank, num_ranks, num_shards, num_steps)
        indices = _Indices(partial(dealt, checks=checks, fills=fills))
        return iter(DataLoader(self._samples, batch_sampler=indices, **parts))

    def _indices(
        self,
        at: DataPosition,
        rank: int,
        num_ranks: int,
        num_shards: int,
        num_steps: int,
        *,
        checks: CheckedSteps,
        fills: bool,
    ) -> Iterator[list[tuple[int, ...]]]:
        epoch = at.epoch
        while at.epoch == epoch and (count := len(self.sizes(at, num_shards))):
            if checks.is_due(num_steps, num_ranks, count):
                yield self._part(at, num_shards, (rank + 1) % num_ranks)
                checks = checks.without_newcomers()
            for number in range(num_rounds(count, num_ranks)):
                shard = shard_of(number, rank, num_ranks, count)
                if shard is None and (fills or not number):
                    shard = count - 1
                if shard is not None:
                    yield self._part(at, num_shards, shard)
            at = self.next(at, num_shards)
            num_steps += 1

    def _part(self, at: DataPosition, num_shards: int, shard: int) -> list[tuple[int, ...]]:
        size = self.sizes(at, num_shards)[shard]
        begin = at.sample + shard * self._size
        places = range(begin, begin + size)
        samples = self._order.samples(at.epoch, places)
        if isinstance(self._order, DrawnOrder):  # which may draw a sample several times
            return [(at.epoch, i, place) for i, place in zip(samples, places, strict=True)]
        return [(at.epoch, i) for i in samples]


class DrawnOrder:
    """Order of samples that a sampler draws for each pass, with seeded random numbers.

    Args:
        sampler: The sampler. Its method `set_epoch` is called before each pass, if it has one. It
            may draw samples several times, or leave some out.
        seed: Seed; with it and the number of the pass, the generators of torch, numpy and `random`
            are seeded before the sampler draws, and its own `generator`, if it has one.

    Attributes:
        num_samples: Number of samples of a pass.
        name: Type of the sampler.

    Raises:
        ConfigError: The sampler divides samples among ranks, or has no length.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        self.name = type(sampler).__name__
        if getattr(sampler, "num_replicas", 1) > 1:
            msg = (
                f"{self.name} divides samples among ranks, which braid.elastic does itself: pass "
                "shuffle=True or another sampler to the DataLoader"
            )
            raise ConfigError(msg)
        if not hasattr(sampler, "__len__"):
            msg = f"{self.name} has no __len__(), the number of samples of a pass: add it"
            raise ConfigError(msg)
        self.num_samples = len(sampler)
        self.seed = seed
        self._sampler = sampler
        self._epoch, self._checksum, self._drawn = -1, 0, array("q")

    def samples(self, epoch: int, places: range) -> list[int]:
        """Return the indices of the samples at these positions in the order of an epoch."""
        drawn = self._draw(epoch)
        return [drawn[place] for place in places]

    def checksum(self, epoch: int) -> int:
        """Return a checksum of the order of an epoch."""
        self._draw(epoch)
        return self._checksum

    def _draw(self, epoch: int) -> Sequence[int]:
        if self._epoch == epoch:
            return self._drawn
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        seed_all(self.seed, epoch)
        generator = getattr(self._sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(hash((self.seed, epoch)) & 0xFFFFFFFF)
        try:
            drawn = array("q", map(operator.index, islice(self._sampler, self.num_samples + 1)))
        except TypeError as error:
            msg = f"{self.name} must yield numbers of samples: {error}"
            raise ConfigError(msg) from error
        if len(drawn) != self.num_samples:
            drawn_more = "more" if len(drawn) > self.num_samples else f"only {len(drawn)}"
            msg = (
                f"{self.name} has drawn {drawn_more} samples in pass {epoch}, but its len() was "
                f"{self.num_samples} at first: all passes must have this number"
            )
            raise ConfigError(msg)
        self._epoch, self._checksum, self._drawn = epoch, crc32(drawn), drawn
        return drawn


def _order_of(loader: DataLoader[Any], seed: int) -> SampleOrder | DrawnOrder:
    """Return the order of a loader's samples.

    Raises:
        ConfigError: There are no samples, or see `DrawnOrder`.
    """
    sampler: Any = loader.sampler
    order: SampleOrder | DrawnOrder
    is_usual = type(sampler) in {RandomSampler, SequentialSampler}
    if isinstance(sampler, RandomSampler):
        is_usual &= not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    num_samples = len(loader.dataset)  # type: ignore[arg-type]  # torch has no type for it
    if num_samples and not is_usual:
        order = DrawnOrder(sampler, seed)
        num_samples = order.num_samples
    if not num_samples:
        of_type = f"data set ({type(loader.dataset).__name__})" if is_usual else "sampler"
        msg = f"the loader's {of_type} is empty: pass one with samples"
        raise ConfigError(msg)
    if is_usual:
        shuffles = isinstance(sampler, RandomSampler)
        order = SampleOrder(num_samples=num_samples, batch_size=1, seed=seed, shuffles=shuffles)
    return order


def require_same_data(
    group: Group,
    facts: Sequence[Mapping[str, object]],
    newcomers: AbstractSet[int] = frozenset(),
) -> None:
    """Raise if members would train on different samples.

    Args:
        group: The members.
        facts: Values of each member, by name; values with the same name must be equal.
        newcomers: Members that have joined a running training. If only they differ, the other
            members do not raise.

    Raises:
        MismatchError: Values with the same name differ.
    """
    first: dict[str, tuple[int, object]] = {}
    number = group.context.health.number
    for rank in sorted(range(group.size), key=lambda rank: rank in newcomers):
        for name, value in facts[rank].items():
            other, expected = first.setdefault(name, (rank, value))
            if value == expected or (rank in newcomers and group.rank != rank):
                continue
            msg = (
                f"ranks train on different data: {name} is {value} on rank "
                f"{number(group.ranks[rank])} and {expected} on rank {number(group.ranks[other])}; "
                "as a new process is alone at first, sizes and orders may not depend on "
                "braid.world(), or on earlier passes"
            )
            raise MismatchError(msg)


class _Indices:
    """Indices of batches, computed when they are needed."""

    def __init__(self, make: Callable[[], Iterator[list[tuple[int, ...]]]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[list[tuple[int, ...]]]:
        return self._make()


class _SeededSamples(Dataset[Any]):
    """Samples by (epoch, index, ...), with random numbers seeded by these numbers."""

    def __init__(self, samples: Dataset[Any], seed: int) -> None:
        self._samples = samples
        self._seed = seed

    def __getitem__(self, at: tuple[int, ...]) -> Any:
        seed_all(self._seed, *at)
        return self._samples[at[1]]


def seed_all(*key: int) -> None:
    """Seed the generators of torch, numpy and `random` by a key."""
    seed = hash(key) & 0xFFFFFFFF  # of numbers only, so the same in all processes
    seed_torch = torch.manual_seed if _has_accelerator() else torch.default_generator.manual_seed
    seed_torch(seed)  # torch.manual_seed takes 100 us, for devices that do not exist
    np.random.seed(seed)
    random.seed(seed)


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()
