"""Splitting of a batch into micro-batches along dim 0, for any containers of tensors.

Sizes differ by one row at most. The mean loss of a batch of N rows is the sum of the micro-batches'
means, each multiplied by n_i / N: with these weights uneven micro-batches give the exact gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from braid.comm.autograd.nested import flatten, unflatten
from braid.errors import ConfigError

__all__ = ["gather", "num_rows", "scatter", "sizes_of"]


def num_rows(batch: Any) -> int:
    """Return the number of rows of a batch, the length of dim 0 of its tensors.

    Raises:
        ConfigError: The batch has no tensor, or lengths differ.
    """
    _, tensors = flatten(batch)
    lengths = {tensor.shape[0] for tensor in tensors if tensor.dim()}
    if len(lengths) != 1:
        shown = f"tensors of {sorted(lengths)} rows" if lengths else "no tensor with rows"
        msg = (
            "a batch is split along dim 0, so its tensors must have the same length there, got "
            f"{shown}"
        )
        raise ConfigError(msg)
    return int(lengths.pop())


def sizes_of(rows: int, num_microbatches: int) -> list[int]:
    """Return the sizes of at most `num_microbatches` nonempty micro-batches."""
    count = min(rows, num_microbatches)
    return [rows // count + (i < rows % count) for i in range(count)] if count else []


def scatter(batch: Any, sizes: list[int]) -> list[Any]:
    """Split a batch into micro-batches of these sizes; tensors without dims go to all of them."""
    tree, tensors = flatten(batch)
    parts = [
        torch.split(tensor, sizes) if tensor.dim() else [tensor] * len(sizes) for tensor in tensors
    ]
    return [unflatten(tree, [part[i] for part in parts]) for i in range(len(sizes))]


def gather(parts: list[Any]) -> Any:
    """Concatenate micro-batches to one batch.

    Raises:
        ConfigError: Numbers of tensors differ, or tensors have no dims.
    """
    trees, tensors = zip(*(flatten(part) for part in parts), strict=True)
    counts = {len(items) for items in tensors}
    if len(counts) > 1:
        msg = (
            f"micro-batches returned {', '.join(map(str, sorted(counts)))} tensors: return the "
            "same number for each, so that they can be joined to a batch"
        )
        raise ConfigError(msg)
    if len(parts) > 1 and any(not x.dim() for x in tensors[0]):
        msg = (
            f"{len(parts)} micro-batches returned a tensor without dims each, which cannot be "
            "joined to a batch: return a value for each row"
        )
        raise ConfigError(msg)
    joined = [
        torch.cat(items) if items[0].dim() else items[-1] for items in zip(*tensors, strict=True)
    ]
    return unflatten(trees[0], joined)
