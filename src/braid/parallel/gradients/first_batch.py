"""Checks of the first batches for two mistakes that raise no error.

A program that forgets to slice its batch computes on every rank the same as one process: the result
is right, but the ranks gain nothing. A program with unequal slices gives the samples of smaller
slices a higher weight. Both are legal, so each is logged once, on rank 0.

Idea: before the first averaging every rank knows its gradients and the number of rows of its input.
Ranks exchange both after the first averaging. Gradients of different samples hardly ever have the
same sum in every parameter; if they do, the bits of the inputs are compared too. The log contains
the measured values. Nothing is logged if the comparison is meaningless: gradients of zero or NaN,
inputs without tensors, models with time as dim 0.
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
from braid.runtime.tensor_buffers import checksum
from braid.runtime.torch_internals import sparse_values
from braid.types import first_few

__all__ = ["FirstBatch", "same_batch", "unequal_rows"]

LOG = logging.getLogger(__name__)
WEIGH = "call set_loss_weight(num_rows) before each forward, or use batches of one size"


class FirstBatch:
    """Observations of one rank about its first batch, to find probable mistakes.

    Args:
        module: Model that is trained.
        group: Ranks that train together.
        advice: Advice for batches of different sizes.

    Attributes:
        is_known: Whether an input has been seen.
    """

    def __init__(self, module: nn.Module, group: Group, advice: str = WEIGH) -> None:
        kinds = group.engine.device_types
        self._device = torch.device("cpu" if "cpu" in kinds else min(kinds))
        self._model = type(module).__name__
        # recurrent layers and attention of torch have this attribute
        self._has_rows_first = all(getattr(m, "batch_first", True) for m in module.modules())
        self._group, self._advice = group, advice
        self._sums = 0  # checksum
        self._has_values = False
        self._is_finite = True
        self._inputs: list[torch.Tensor] = []
        self.is_known = False

    def note_input(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record the tensors among a forward's arguments."""
        self.is_known = True
        self._inputs = list(tensors_in([*args, *kwargs.values()]))

    def note_gradients(self, number: int, grads: Sequence[torch.Tensor]) -> None:
        """Record the gradients of bucket `number`, which is about to be sent."""
        summed = [_sum_of(grad.detach()) for grad in grads if grad.numel()]
        self._has_values |= any(summed)
        self._is_finite &= all(map(cmath.isfinite, summed))
        digest = zlib.crc32(repr(summed).encode())
        self._sums ^= zlib.crc32(number.to_bytes(4, "little"), digest)

    def report(self, *, is_weighted: bool) -> None:
        """Compare ranks, and log probable mistakes on rank 0; a collective.

        Args:
            is_weighted: Whether ranks have set loss weights.

        Cost: one all_gather of 24 bytes; if all ranks have the same sums of gradients, one more of
        8 bytes, and a pass over the inputs.
        """
        if self._group.size == 1:
            return
        is_telling = self._has_values and self._is_finite
        row = [self._sums, int(is_telling), _num_rows(self._inputs) * self._has_rows_first]
        rows = self._gathered(row)
        text = None
        if all(telling and sums == rows[0][0] for sums, telling, _ in rows):
            text = same_batch(self._model, [digest for (digest,) in self._gathered([self._digest])])
        if text is None and not is_weighted:
            numbers = [number for _, _, number in rows]
            text = unequal_rows(self._model, self._group.ranks, numbers, self._advice)
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

    def _gathered(self, numbers: list[int]) -> list[list[int]]:
        gathered = self._group.all_gather(torch.tensor(numbers, device=self._device))
        rows: list[list[int]] = gathered.view(self._group.size, -1).tolist()
        return rows


def same_batch(model: str, digests: Sequence[int]) -> str | None:
    """Return a warning if the first inputs of all ranks are the same, else None.

    Args:
        model: Name of the model.
        digests: Checksums of the inputs, by rank; 0 if unknown.
    """
    if not digests[0] or len(set(digests)) > 1:
        return None
    return (
        f"the first inputs of {model} are equal bit by bit on all {len(digests)} ranks, and so "
        "are the sums of the first gradients: every rank seems to compute the same batch. Give "
        "each rank a different part, such as batch[group.rank :: group.size] or a "
        "DistributedSampler"
    )


def unequal_rows(
    model: str, ranks: Sequence[int], num_rows: Sequence[int], advice: str = WEIGH
) -> str | None:
    """Return a warning if the first inputs have unequal numbers of rows, else None.

    Args:
        model: Name of the model.
        ranks: Ranks that train together.
        num_rows: Extent of dim 0 of the inputs, by rank; 0 if unknown.
        advice: Advice at the end of the message.
    """
    known = {rank: rows for rank, rows in zip(ranks, num_rows, strict=True) if rows}
    if len(set(known.values())) < 2:
        return None
    listed = first_few([f"{rows} on rank {rank}" for rank, rows in known.items()], 4)
    return (
        f"dim 0 of the first inputs of {model} differs among ranks ({listed}). If dim 0 is the "
        f"batch, samples of small batches weigh more in the averaged gradients: {advice}"
    )


def _sum_of(grad: torch.Tensor) -> complex:
    """Return the sum of a gradient's numbers, in double precision."""
    values = sparse_values(grad) if grad.is_sparse else grad
    return values.sum(dtype=torch.complex128 if grad.is_complex() else torch.float64).item()


def _num_rows(inputs: Sequence[torch.Tensor]) -> int:
    """Return the common extent of dim 0 of all inputs; 0 if they differ."""
    extents = {x.shape[0] for x in inputs if x.dim()}
    return extents.pop() if len(extents) == 1 else 0
