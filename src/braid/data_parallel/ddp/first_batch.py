"""Looks at the first batches for two mistakes that no error shows.

A program that forgets to slice its batch trains on every rank what one process would: it is right,
and gains nothing. A program with unequal slices weighs the samples of smaller slices more. Both are
legal, so each is one line of the log, once, on rank 0.

Idea: before the first averaging every rank knows its own gradients, and the number of rows of its
input. Both are exchanged once, after the first averaging. Gradients of different samples never have
the same bits in every parameter.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from braid.autograd.nested import tensors_in
from braid.comm import Group
from braid.params import Bucket
from braid.types import first_few

__all__ = ["FirstBatch", "problems_of"]

LOG = logging.getLogger(__name__)


class FirstBatch:
    """Knowledge of one rank about its first batch.

    Args:
        model: Name of the model in the messages.
        group: Ranks that train together.

    Attributes:
        is_known: Whether an input has been seen.
    """

    def __init__(self, model: str, group: Group) -> None:
        kinds = group.engine.device_types
        self._device = torch.device("cpu" if "cpu" in kinds else min(kinds))
        self._model = model
        self._group = group
        self._checksum = 0
        self._has_values = False
        self._rows = 0
        self.is_known = False

    def note_input(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note the number of rows of the first tensor of a forward's arguments."""
        self.is_known = True
        for tensor in tensors_in([*args, *kwargs.values()]):
            if tensor.dim():
                self._rows = tensor.shape[0]
                return

    def note_gradients(self, bucket: Bucket) -> None:
        """Note the gradients of a bucket that is about to be launched."""
        flat = bucket.buffer.tensor.detach()
        if not flat.numel():
            return
        wide = torch.complex128 if flat.is_complex() else torch.float64
        summed = [view.sum(dtype=wide).item() for view in bucket.buffer.views]
        self._has_values |= any(summed)
        digest = zlib.crc32(repr(summed).encode())
        self._checksum ^= zlib.crc32(bucket.index.to_bytes(4, "little"), digest)

    def report(self, *, is_weighted: bool) -> None:
        """Compare what ranks know, and log what is probably a mistake, on rank 0; a collective.

        Args:
            is_weighted: Whether ranks have set loss weights.

        Cost: one all_gather of 24 bytes.
        """
        if self._group.size == 1:
            return
        own = [self._checksum, int(self._has_values), self._rows]
        gathered = self._group.all_gather(torch.tensor(own, device=self._device))
        if self._group.rank != 0:
            return
        rows = gathered.view(self._group.size, -1).tolist()
        for text in problems_of(
            self._model,
            self._group.ranks,
            checksums=[checksum for checksum, has_values, _ in rows if has_values],
            num_rows=[number for _, _, number in rows],
            is_weighted=is_weighted,
        ):
            LOG.warning("braid: %s", text)


def problems_of(
    model: str,
    ranks: Sequence[int],
    *,
    checksums: Sequence[int],
    num_rows: Sequence[int],
    is_weighted: bool,
) -> list[str]:
    """Return what is probably a mistake in the first batches.

    Args:
        model: Name of the model.
        ranks: Ranks that train together.
        checksums: Checksums of the gradients of ranks that have any other than zero.
        num_rows: Number of rows of the input, by rank; 0 if unknown.
        is_weighted: Whether ranks have set loss weights.
    """
    if len(ranks) > 1 and len(checksums) == len(ranks) and len(set(checksums)) == 1:
        text = (
            f"the first gradients of {model} are equal bit by bit on all {len(ranks)} ranks, so "
            "every rank computes the same batch: give each its share, such as "
            "batch[group.rank :: group.size] or a DistributedSampler"
        )
        return [text]
    known = {rank: rows for rank, rows in zip(ranks, num_rows, strict=True) if rows}
    if is_weighted or len(set(known.values())) < 2:
        return []
    listed = first_few([f"{rows} on rank {rank}" for rank, rows in known.items()], 4)
    text = (
        f"the first batches of {model} have unequal numbers of rows ({listed}), and the average "
        "of gradients counts every rank alike: call set_loss_weight(num_rows) before each "
        "forward, or make the shares equal"
    )
    return [text]
