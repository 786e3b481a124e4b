"""Looks at the first batches for two mistakes that no error shows.

A program that forgets to slice its batch trains on every rank what one process would: it is right,
and gains nothing. A program with unequal slices weighs the samples of smaller slices more. Both are
legal, so each is one line of the log, once, on rank 0.

Idea: before the first averaging every rank knows its own gradients, and the number of rows of its
input. Both are exchanged once, after the first averaging. Gradients of different samples hardly
ever have the same sum in every parameter; where they have it, the bits of the inputs are compared,
too. A line says what was measured, and nothing is said where it means nothing: gradients of zero or
NaN, inputs without tensors, models whose dim 0 is time.
"""

from __future__ import annotations

import cmath
import logging
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from braid.comm import Group
from braid.comm.autograd.nested import tensors_in
from braid.parallel.gradients import Bucket
from braid.parallel.gradients.hashing import checksum
from braid.types import first_few

__all__ = ["FirstBatch", "same_batch", "unequal_rows"]

LOG = logging.getLogger(__name__)


class FirstBatch:
    """Knowledge of one rank about its first batch.

    Args:
        module: Model that is trained.
        group: Ranks that train together.

    Attributes:
        is_known: Whether an input has been seen.
    """

    def __init__(self, module: nn.Module, group: Group) -> None:
        kinds = group.engine.device_types
        self._device = torch.device("cpu" if "cpu" in kinds else min(kinds))
        self._model = type(module).__name__
        # recurrent layers and attention of torch have this attribute
        self._has_rows_first = all(getattr(m, "batch_first", True) for m in module.modules())
        self._group = group
        self._sums = 0  # checksum
        self._has_values = False
        self._is_finite = True
        self._inputs: list[torch.Tensor] = []
        self.is_known = False

    def note_input(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note the tensors among a forward's arguments."""
        self.is_known = True
        self._inputs = list(tensors_in([*args, *kwargs.values()]))

    def note_gradients(self, bucket: Bucket) -> None:
        """Note the gradients of a bucket that is about to be launched."""
        flat = bucket.buffer.tensor.detach()
        if not flat.numel():
            return
        wide = torch.complex128 if flat.is_complex() else torch.float64
        summed = [view.sum(dtype=wide).item() for view in bucket.buffer.views]
        self._has_values |= any(summed)
        self._is_finite &= all(map(cmath.isfinite, summed))
        digest = zlib.crc32(repr(summed).encode())
        self._sums ^= zlib.crc32(bucket.index.to_bytes(4, "little"), digest)

    def report(self, *, is_weighted: bool) -> None:
        """Compare what ranks know, and log what is probably a mistake, on rank 0; a collective.

        Args:
            is_weighted: Whether ranks have set loss weights.

        Cost: one all_gather of 24 bytes; one of 8 bytes more, and a pass over the inputs, if all
        ranks have the same sums of gradients.
        """
        if self._group.size == 1:
            return
        is_telling = self._has_values and self._is_finite
        own = [self._sums, int(is_telling), _num_rows(self._inputs) * self._has_rows_first]
        rows = self._gathered(own)
        text = None
        if all(telling and sums == rows[0][0] for sums, telling, _ in rows):
            text = same_batch(self._model, [digest for (digest,) in self._gathered([self._digest])])
        if text is None and not is_weighted:
            text = unequal_rows(self._model, self._group.ranks, [number for _, _, number in rows])
        self._inputs = []
        if text is not None and self._group.rank == 0:
            LOG.warning("braid: %s", text)

    @property
    def _digest(self) -> int:
        """Checksum of the inputs; 0 if it is unknown."""
        if any(x.layout is not torch.strided or x.is_meta for x in self._inputs):
            return 0
        parts = [(tuple(x.shape), str(x.dtype), checksum(x)) for x in self._inputs]
        return zlib.crc32(repr(parts).encode()) if parts else 0

    def _gathered(self, own: list[int]) -> list[list[int]]:
        gathered = self._group.all_gather(torch.tensor(own, device=self._device))
        rows: list[list[int]] = gathered.view(self._group.size, -1).tolist()
        return rows


def same_batch(model: str, digests: Sequence[int]) -> str | None:
    """Return a line about ranks whose first inputs are the same, and their gradients, too.

    Args:
        model: Name of the model.
        digests: Checksums of the inputs, by rank; 0 if unknown.
    """
    if not digests[0] or len(set(digests)) > 1:
        return None
    return (
        f"the first inputs of {model} are equal bit by bit on all {len(digests)} ranks, and the "
        "sums of the first gradients, too: every rank computes the same batch, and nothing is "
        "gained. Give each its share, such as batch[group.rank :: group.size] or a "
        "DistributedSampler"
    )


def unequal_rows(model: str, ranks: Sequence[int], num_rows: Sequence[int]) -> str | None:
    """Return a line about first inputs with unequal numbers of rows.

    Args:
        model: Name of the model.
        ranks: Ranks that train together.
        num_rows: Extent of dim 0 of the inputs, by rank; 0 if unknown.
    """
    known = {rank: rows for rank, rows in zip(ranks, num_rows, strict=True) if rows}
    if len(set(known.values())) < 2:
        return None
    listed = first_few([f"{rows} on rank {rank}" for rank, rows in known.items()], 4)
    return (
        f"dim 0 of the first inputs of {model} differs among ranks ({listed}). If it is the batch, "
        "samples of smaller shares count more, as the average of gradients counts every rank "
        "alike: call set_loss_weight(num_rows) before each forward, or make the shares equal"
    )


def _num_rows(inputs: Sequence[torch.Tensor]) -> int:
    """Return the extent of dim 0 that all inputs have; 0 if they differ in it."""
    extents = {x.shape[0] for x in inputs if x.dim()}
    return extents.pop() if len(extents) == 1 else 0
