"""Counter-based random numbers: a function of a key and a position, without state.

Problem: if work is divided between ranks in another way, a stateful generator gives other numbers,
so that no parallel run with dropout can equal the run of one process.

Idea: number the elements, and compute the random number of an element from its number. Philox
encrypts the number in ten rounds of multiplications. A rank computes the numbers of the elements
that it has, in any order.

    counter    element / 4 (64 bits), sample (64 bits)         one counter gives four words
    key        64 bits: seed, step, layer and operation

Source: J. Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011 (Philox4x32-10).
"""

from __future__ import annotations

import torch

__all__ = ["random_words", "uniform"]

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
LOW = 0xFFFFFFFF
MANTISSA_BITS = 24  # of a float32, so that the result is exact


def random_words(key: int, samples: torch.Tensor, num_elements: int) -> torch.Tensor:
    """Return random words of 32 bits that depend only on key, sample and element number.

    Args:
        key: Key; its low 64 bits are used.
        samples: Numbers of the samples (int64), shape [rows].
        num_elements: Number of elements of each sample.

    Returns:
        Words in int64, shape [rows, num_elements], on the device of `samples`.

    Cost: about 30 operations on int64 for each word.
    """
    quads = torch.arange(-(-num_elements // 4), device=samples.device)
    shape = (len(samples), len(quads))
    words = [
        (quads & LOW).expand(shape),
        (quads >> 32 & LOW).expand(shape),
        (samples & LOW).unsqueeze(1).expand(shape),
        (samples >> 32 & LOW).unsqueeze(1).expand(shape),
    ]
    keys = [key & LOW, key >> 32 & LOW]
    for _ in range(ROUNDS):
        high_0, low_0 = _product(MULTIPLIERS[0], words[0])
        high_1, low_1 = _product(MULTIPLIERS[1], words[2])
        words = [high_1 ^ words[1] ^ keys[0], low_1, high_0 ^ words[3] ^ keys[1], low_0]
        keys = [(k + step) & LOW for k, step in zip(keys, WEYL, strict=True)]
    return torch.stack(words, dim=2).flatten(1)[:, :num_elements]


def uniform(key: int, samples: torch.Tensor, num_elements: int) -> torch.Tensor:
    """Return random numbers in [0, 1) as float32, of shape [rows, num_elements]."""
    words = random_words(key, samples, num_elements) >> (32 - MANTISSA_BITS)
    return words.to(torch.float32) * 2.0**-MANTISSA_BITS


def _product(factor: int, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the high and the low 32 bits of products; int64 overflows as two's complement."""
    product = words * factor
    return product >> 32 & LOW, product & LOW
