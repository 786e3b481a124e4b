"""Comparison of batches over ranks that work on one batch together.

Problem: the stages of a pipeline and the shards of a layer need the same batch on all ranks. A
sampler that divides the data over all ranks, or another seed for shuffling on each rank, gives them
different batches. Inputs of one batch then meet targets, or terms of sums, of another one, and
training only gives bad results.

Idea: ranks compare a sketch of each value, in the first two calls and in every `EVERY`-th: the
logarithm of the norm, and a projection relative to the norm. So rounding errors of values that
ranks have computed do not count as differences.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from braid.comm import Group
from braid.comm.autograd.nested import tensors_in
from braid.errors import MismatchError
from braid.types import ranks_text, text_digest

__all__ = ["TOLERANCE", "SameBatches", "sketch_of"]

EVERY = 50  # calls; a comparison takes a pass over the batch and a small message
NUM_COLUMNS = 509  # a prime, so that other orders of rows give another number
TOLERANCE = 0.02  # bfloat16 rounds by 0.004, and numbers of different batches are about 1 apart
INFINITE = 1000.0  # instead of a logarithm
ADVICE = (
    "Give the ranks of one replica the same batches: pass the number of replicas and the number of "
    "this rank's replica to the sampler, instead of the world size and the rank, and shuffle with "
    "the same seed (a HybridParallel has both in `samples`)"
)


class SameBatches:
    """Comparison of values over ranks; call its methods on all ranks, with the same due calls."""

    def __init__(self) -> None:
        self._number = 0

    def is_due(self) -> bool:
        """Count a call, and return whether its values should be compared."""
        self._number += 1
        return self._number <= 2 or not self._number % EVERY

    def differing(self, group: Group, *values: Any, root: int = 0) -> list[list[int]]:
        """Return for each value the global ranks with another one than member `root`; a collective.

        Cost: a pass over the tensors, and one all_gather of 24 bytes per value.
        """
        mine = [[_form_of(value), *sketch_of(tensors_in(value))] for value in values]
        rows = torch.tensor(mine, dtype=torch.float64, device="cpu")
        table = group.all_gather(rows).view(group.size, len(values), 3)
        gaps = (table - table[root]).abs()
        differ = ~((gaps[..., 0] == 0) & (gaps[..., 1:] <= TOLERANCE).all(-1)).T
        return [[group.ranks[i] for i in row.nonzero().flatten().tolist()] for row in differ]

    def require(self, group: Group, name: str, value: Any, advice: str = ADVICE) -> None:
        """Check that all members have the same value; a collective.

        Raises:
            MismatchError: Some members have another one. The message has its `name`, a plural, and
                `advice`.
        """
        (others,) = self.differing(group, value)
        if others:
            msg = (
                f"the {name} on {ranks_text(others)} are not the {name} on rank {group.ranks[0]}, "
                f"but {ranks_text(group.ranks)} compute one batch together. {advice}"
            )
            raise MismatchError(msg)


def _form_of(value: Any) -> float:
    """Return a number of the shapes and dtypes of a value's tensors."""
    forms = [f"{list(tensor.shape)} {tensor.dtype}" for tensor in tensors_in(value)]
    return float(text_digest(" ".join(forms)) >> 12)


@torch.no_grad()
def sketch_of(tensors: Iterable[torch.Tensor]) -> tuple[float, float]:
    """Return two numbers that are nearly equal for nearly equal tensors; see `TOLERANCE`.

    They are a projection of all elements relative to the norm of all elements, and the logarithm of
    that norm. So rounding errors of elements that are nearly zero do not count.
    """
    projection = squares = 0.0
    for position, tensor in enumerate(tensors):
        has_numbers = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_meta)
        if not has_numbers or not tensor.numel():
            continue
        flat = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        flat = flat.reshape(-1).to(torch.float32)
        norm = float(torch.linalg.vector_norm(flat))
        if not math.isfinite(norm):
            return 0.0, INFINITE
        numbers = torch.arange(NUM_COLUMNS, dtype=torch.float64, device=flat.device)
        signs = (numbers.square() + 1 + 2.4 * position).sin().float()
        end = len(flat) // NUM_COLUMNS * NUM_COLUMNS
        columns = flat[:end].view(-1, NUM_COLUMNS).sum(0)
        columns[: len(flat) - end] += flat[end:]
        projection += float((columns * signs).sum())
        squares += norm * norm
    if not squares:
        return 0.0, -INFINITE
    return projection / math.sqrt(squares), math.log(squares) / 2
