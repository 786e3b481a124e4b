"""Digests of the weights of a training, which do not depend on how ranks share them.

`braid chaos` compares a run under faults with the same run without faults. Ranks cannot send their
weights for this, and after a loss other ranks have them, in other parts. So each element gets a
term from its bits, its index and the name of its parameter, and a digest is the sum of the terms:
the sum over all ranks is the same on any mesh.

A projection of the weights on a vector of pseudo-random signs also shows how much two runs differ:
its square is, on average, the square of their distance.

Cost: some passes over the weights, about 1 ms for a million elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple
from zlib import crc32

import torch

from braid.elasticity.parts import TensorBox

__all__ = ["NUM_STEPS", "WeightBox", "weight_digest"]

NUM_STEPS = 10  # between two digests
ODD = 0x2545F4914F6CDD1D  # any odd number with many bits
SIGN_BIT = 40
MASK = (1 << 52) - 1  # integers up to 2**53 are exact in a log
MOST_ELEMENTS = 1 << 22  # at a time
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightBox(NamedTuple):
    """A box of a parameter: its name, where it is in the whole parameter, and a rank's tensor."""

    name: str
    box: TensorBox
    tensor: torch.Tensor


def weight_digest(pieces: Iterable[WeightBox], *, is_exact: bool) -> dict[str, float]:
    """Return the digest of a rank's pieces as numbers to log; equal names are to be added up.

    Args:
        pieces: The pieces; those of all ranks together have each element once.
        is_exact: Whether the bits of the weights do not depend on the number of ranks.
    """
    num_elements, digest = 0, 0
    projection, squares = 0.0, 0.0
    for values, factors in _terms(pieces):
        num_elements += values.numel()
        bits = values.view(BITS[values.element_size()]).long()
        bits ^= bits >> 23  # the upper bits count, too
        digest += int((bits * factors).sum())
        signs = (factors >> SIGN_BIT) & 1
        numbers = values.double()
        projection += float(torch.where(signs.bool(), numbers, -numbers).sum())
        squares += float(numbers.square().sum())
    return {
        "weights": num_elements,
        "weights_digest": digest & MASK,
        "weights_projection": projection,
        "weights_squares": squares,
        "weights_exact": int(is_exact),
    }


def _terms(pieces: Iterable[WeightBox]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield values, flat, with odd factors that depend on their parameter and index."""
    for name, box, tensor in pieces:
        whole, offset, extent = box.whole, box.offset, box.extent
        values = box.view(tensor.detach(), offset, extent)
        if values.is_complex():
            values = torch.view_as_real(values)
            whole, offset, extent = (*whole, 2), (*offset, 0), (*extent, 2)
        index = torch.zeros((), dtype=torch.int64, device=values.device)
        strides = torch.empty(whole, device="meta").stride()
        for first, count, stride in zip(offset, extent, strides, strict=True):
            positions = torch.arange(first, first + count, device=values.device) * stride
            index = index.unsqueeze(-1) + positions
        factors = ((index + (crc32(name.encode()) << 20)) * 2 + 1) * ODD
        flat = [torch.split(x.reshape(-1), MOST_ELEMENTS) for x in (values, factors)]
        yield from zip(*flat, strict=True)
