"""Data sets that split batches among replicas.

A global batch is split along dim 0. Shares differ by one sample at most, and gradients are weighted
by the number of samples. Where each process reads different batches, processes exchange the number
of their samples in every step. If the data of one process end earlier, an error names the process;
without the exchange the others would hang.

Source: TensorFlow's `tf.distribute.DistributedDataset` and `InputContext`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from braid.comm.autograd.nested import map_tensors, tensors_in
from braid.errors import ConfigError
from braid.strategies.replicas import LocalReplicas
from braid.strategies.values import PerReplica

__all__ = ["DistributedDataset", "InputContext", "from_function", "num_samples", "on_device"]


class InputContext(NamedTuple):
    """Part of the data that a process reads.

    Attributes:
        num_input_pipelines: Number of processes that read data.
        input_pipeline_id: Number of this process among them.
        num_replicas_in_sync: Number of replicas of all processes.
    """

    num_input_pipelines: int
    input_pipeline_id: int
    num_replicas_in_sync: int

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return each replica's number of samples in a batch of `global_batch_size` samples.

        Raises:
            ConfigError: The batch size is not divisible by the number of replicas.
        """
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest or not size:
            msg = (
                f"a batch of {global_batch_size} cannot be divided equally among "
                f"{self.num_replicas_in_sync} replicas: choose a multiple of their number"
            )
            raise ConfigError(msg)
        return size


class DistributedDataset:
    """Iterable of batches as `PerReplica` values; can be iterated again if its source can.

    Args:
        replicas: Replicas of this process.
        source: Batches: tensors, or tuples, lists and mappings of them.
        is_global: Whether a batch of `source` is split among all replicas; otherwise each batch
            goes to one replica of this process.
    """

    def __init__(self, replicas: LocalReplicas, source: Iterable[Any], *, is_global: bool) -> None:
        self._replicas = replicas
        self._source = source
        self._is_global = is_global

    def __len__(self) -> int:
        count = len(self._source)  # type: ignore[arg-type]
        return count if self._is_global else count // len(self._replicas.devices)

    def __iter__(self) -> Iterator[Any]:
        """Yield a batch for each step.

        Raises:
            ConfigError: A batch has no dim 0, or the data of one process end earlier than the rest.
        """
        batches = iter(self._source)
        here, across = len(self._replicas.devices), self._replicas.across
        number = 0
        while True:
            parts = self._next(batches)
            counts = [num_samples(part) for part in parts]
            if across is not None:
                mine = torch.tensor(counts or [0] * here)
                counts = across.all_gather(mine).tolist()
                ended = [rank for rank in range(across.size) if not counts[rank * here]]
                if ended and len(ended) < across.size:
                    msg = (
                        f"the data of worker {', '.join(map(str, ended))} ended after {number} "
                        "batches, but other workers have more: give all workers the same number "
                        "of batches"
                    )
                    raise ConfigError(msg)
            if not parts:
                return
            yield self._placed(parts, counts)
            number += 1

    def _next(self, batches: Iterator[Any]) -> list[Any]:
        """Return the next batch of each replica here; none at the end."""
        here, across = len(self._replicas.devices), self._replicas.across
        if not self._is_global:
            parts = [batch for _, batch in zip(range(here), batches, strict=False)]
            return parts if len(parts) == here else []
        batch = next(batches, None)
        if batch is None:
            return []
        size, first = self._replicas.size, 0 if across is None else across.rank
        total = num_samples(batch)
        if total < size:
            msg = (
                f"a batch of {total} samples is too small for {size} replicas: pass "
                "drop_last=True to the DataLoader"
            )
            raise ConfigError(msg)
        bounds = [total * i // size for i in range(size + 1)]
        places = [slice(bounds[i], bounds[i + 1]) for i in range(first, first + here)]
        return [map_tensors(batch, itemgetter(place)) for place in places]

    def _placed(self, parts: list[Any], counts: list[int]) -> Any:
        """Return the batch on the devices of the replicas: tuples stay tuples."""
        moved = [
            map_tensors(part, partial(on_device, device))
            for part, device in zip(parts, self._replicas.devices, strict=True)
        ]
        if isinstance(moved[0], (tuple, list)):
            return tuple(PerReplica(values, counts) for values in zip(*moved, strict=True))
        if isinstance(moved[0], dict):
            return {key: PerReplica([part[key] for part in moved], counts) for key in moved[0]}
        return PerReplica(moved, counts)


def from_function(
    replicas: LocalReplicas, dataset_fn: Callable[[InputContext], Iterable[Any]]
) -> DistributedDataset:
    """Return the data set of this process; see `Strategy.distribute_datasets_from_function`."""
    across = replicas.across
    place = (1, 0) if across is None else (across.size, across.rank)
    source = dataset_fn(InputContext(*place, replicas.size))
    return DistributedDataset(replicas, source, is_global=False)


def _leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of tuples, lists and mappings, but for None."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (tuple, list)):
        for part in tree:
            yield from _leaves(part)
    elif tree is not None:
        yield tree


def on_device(device: torch.device, x: torch.Tensor) -> torch.Tensor:
    """Return a tensor on a device; the copy runs in the background if possible."""
    return x.to(device, non_blocking=device.type != "cpu")


def num_samples(batch: Any) -> int:
    """Return the length of dim 0 of a batch's tensors.

    Raises:
        ConfigError: The batch has no tensors, or their lengths differ.
    """
    strange = next((leaf for leaf in _leaves(batch) if not isinstance(leaf, torch.Tensor)), None)
    if strange is not None:
        msg = (
            f"a batch must consist of tensors, got {type(strange).__name__}: convert it, such as "
            "with torch.as_tensor"
        )
        raise ConfigError(msg)
    lengths = {x.shape[0] if x.dim() else None for x in tensors_in(batch)}
    if len(lengths) != 1 or None in lengths:
        msg = (
            "all tensors of a batch must have the same length in dim 0, got "
            f"{sorted(map(str, lengths)) or 'no tensors'}"
        )
        raise ConfigError(msg)
    return int(lengths.pop() or 0)
