"""Digests of the weights of a training, which do not depend on how ranks share them.

`braid chaos` compares a run under faults with the same run without faults. Ranks cannot send their
weights for this, and after a loss other ranks have them, in other parts. So each element gets a
term, a hash of its bits, its index and the name of its parameter, and a digest is the sum of the
terms: the sum over all ranks is the same on any mesh.

A projection of the weights on a vector of pseudo-random signs also shows how much two runs differ:
its square is, on average, the square of their distance.

Cost: about 10 ms for a million elements on one core, and some MiB of memory.

Source: the finalizer of A. Appleby's MurmurHash3 for the hash; D. Achlioptas, "Database-friendly
random projections", 2003, for the signs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple
from zlib import crc32

import torch

from braid.elasticity.parts import TensorBox

__all__ = ["NUM_STEPS", "WeightBox", "weight_digest"]

NUM_STEPS = 10  # between two digests
MASK = (1 << 52) - 1  # integers up to 2**53 are exact in a log
MOST_WORDS = 1 << 16  # at a time: they fit into a core's cache
FIRST, SECOND = -0x7A143595, -0x3D4D51CB  # odd factors of 32 bits
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


class WeightBox(NamedTuple):
    """A box of a parameter: its name, where it is in the whole parameter, and a rank's tensor."""

    name: str
    box: TensorBox
    tensor: torch.Tensor


def weight_digest(boxes: Iterable[WeightBox], num_steps: int, *, order: int) -> dict[str, float]:
    """Return the digest of a rank's boxes as numbers to log; equal names are to be added up.

    Args:
        boxes: The boxes; all ranks together have each element once.
        num_steps: Number of steps so far; other steps have other signs in the projection.
        order: Number of the order in which gradients are added up; runs with the same one have the
            same bits. -1 if bits may differ from run to run.
    """
    count, digest = 0, 0
    projection, squares = 0.0, 0.0
    for words, values, hashes in _blocks(boxes):
        count += values.numel()
        digest += int(_mixed(words ^ hashes).sum())
        numbers = values.double()
        signs = hashes[:, :: words.shape[1] // values.shape[1]] >> (num_steps // NUM_STEPS % 32) & 1
        projection += float(torch.where(signs.bool(), numbers, -numbers).sum())
        squares += float(numbers.square().sum())
    return {
        "weights": count,
        "weights_digest": digest & MASK,
        "weights_projection": projection,
        "weights_squares": squares,
        "weights_order": order,
    }


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Return pseudo-random words that depend on all bits of `words`, which are overwritten."""
    words ^= (words >> 16) & 0xFFFF  # a shift alone would copy the sign
    words *= FIRST
    words ^= (words >> 13) & 0x7FFFF
    words *= SECOND
    words ^= (words >> 16) & 0xFFFF
    return words


def _blocks(
    boxes: Iterable[WeightBox],
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield blocks of a box: their words of 32 bits, their values, and hashes of words' indices."""
    for name, box, tensor in boxes:
        whole, offset, extent = box.whole, box.offset, box.extent
        values = box.view(tensor.detach(), offset, extent)
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj())
            whole, offset, extent = (*whole, 2), (*offset, 0), (*extent, 2)
        if not values.numel():
            continue
        if not whole:
            whole, offset, extent = (1,), (0,), (1,)
        device, seed = values.device, crc32(name.encode()) - (1 << 31)
        rows = torch.zeros((), dtype=torch.int64, device=device)  # index of the first of each row
        strides = torch.empty(whole, device="meta").stride()
        for first, size, stride in zip(offset[:-1], extent[:-1], strides[:-1], strict=True):
            positions = torch.arange(first, first + size, device=device) * stride
            rows = rows.unsqueeze(-1) + positions
        rows = rows.reshape(-1, 1) + offset[-1]
        table = values.reshape(-1, extent[-1])
        num_words = max(1, values.element_size() // 4)  # of an element
        width = min(extent[-1], MOST_WORDS)
        height = max(1, MOST_WORDS // width)
        for column in range(0, extent[-1], width):
            columns = table[:, column : column + width]
            at = torch.arange(columns.shape[1] * num_words, device=device) + column * num_words
            for row in range(0, len(table), height):
                block = columns[row : row + height]
                words = block.contiguous().view(WORDS[block.element_size()]).int()
                index = (rows[row : row + height] * num_words + at).int()  # modulo 2**32
                yield words, block, _mixed(index ^ seed)
