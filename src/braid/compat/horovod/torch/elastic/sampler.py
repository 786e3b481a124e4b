"""Sampler that assigns each sample of an epoch to one rank, even if the number of ranks changes.

Problem: samplers assign samples by rank and number of ranks. If the members change during an epoch,
some samples are repeated and others are missed.

Idea: the sampler records the processed samples. The new members share the remaining ones. All ranks
process batches with the same numbers, so `record_batch` also knows the samples of the other ranks:
samples that a dead rank has processed are not repeated.

    8 samples, 2 ranks, batches of 1          rank 1 dies after the commit
    rank 0    0 | 2 | commit                  rank 0   4 | 5 | 6 | 7
    rank 1    1 | 3 | commit
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch

from braid.compat.horovod.basics import rank, size

__all__ = ["ElasticSampler"]


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Sampler over this rank's share of the samples that are not yet processed in this epoch.

    Each rank gets the same number of samples: if they do not divide evenly, the first samples are
    repeated at the end.

    Args:
        dataset: Data set; the same on all ranks.
        shuffle: Whether the order is random.
        seed: Seed of the order, the same on all ranks.

    Attributes:
        epoch: Number of the epoch.
        processed_indices: Samples that this rank has processed in the epoch, and all samples that
            any rank had processed at the last change of the members.
        remaining_indices: Samples that the current members share, in order.
        indices: Samples of this rank, in the order of the last iteration.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.remaining_indices: list[int] = []
        self.indices: list[int] = []
        self._processed_by_others: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch with all samples; all ranks call it at the end of the previous epoch."""
        self.epoch = epoch
        self.processed_indices = set()
        self._processed_by_others = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that each rank has processed its batch with this number.

        Args:
            batch_idx: Number of the batch in this iteration over the loader.
            batch_size: Number of samples in a batch of one rank.
        """
        start, end = batch_idx * batch_size, (batch_idx + 1) * batch_size
        self.record_indices(self.indices[start:end])
        everyone = self._order[start * self.num_replicas : end * self.num_replicas]
        self._processed_by_others.update(everyone)

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record that this rank has processed some samples."""
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the samples of a batch of this rank."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and the processed samples of all ranks as far as they are known."""
        processed = self.processed_indices | self._processed_by_others
        return {"epoch": self.epoch, "processed_indices": processed}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state, and divide the remaining samples among the current members."""
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self._processed_by_others = set()
        self.reset()

    def reset(self) -> None:
        """Divide the remaining samples among the current members."""
        self.num_replicas, self.rank = size(), rank()
        processed = self.processed_indices | self._processed_by_others
        remaining = [index for index in range(len(self.dataset)) if index not in processed]
        if self.shuffle:
            random.Random((self.seed << 32) + self.epoch).shuffle(remaining)
        self.remaining_indices = remaining
        self.num_samples = -(-len(remaining) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        self._order: list[int] = []

    def __iter__(self) -> Iterator[int]:
        """Yield the samples of this rank."""
        remaining = self.remaining_indices
        repeats = -(-self.total_size // max(1, len(remaining)))
        self._order = (remaining * repeats)[: self.total_size]
        self.indices = self._order[self.rank :: self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        """Return the number of samples of this rank."""
        return self.num_samples
