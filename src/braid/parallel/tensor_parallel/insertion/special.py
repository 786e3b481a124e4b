"""Modules for operations that need communication or random numbers: vocabularies, losses, dropout.

    VocabRows        rows of other ranks are looked up as zeros; the sum over ranks has all rows
    VocabLoss        cross-entropy of split classes, without gathering them
    DividedDropout   drops the same elements as one process: uses its part of a whole mask
    DividedAttention the same for attention with dropout, step by step

Random numbers are drawn for the whole value on every rank, by the same generator, keyed or not: so
each rank continues with the same state, and draws the same numbers as one process.

Sources: M. Shoeybi et al., Megatron-LM, 2019; its random numbers differ with the number of ranks.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from braid.comm import Group
from braid.parallel.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from braid.parallel.tensor_parallel.embedding import local_rows

__all__ = ["DividedAttention", "DividedDropout", "OwnPart", "VocabLoss", "VocabRows"]


class OwnPart(nn.Module):
    """Module that returns this rank's part of a random value that each rank draws whole.

    Args:
        splits: For each split dim: (dim, number of parts, packed blocks, index of this rank's
            part).
    """

    def __init__(self, splits: list[tuple[int, int, int, int]]) -> None:
        super().__init__()
        self.splits = splits

    def shape(self, part: torch.Size) -> list[int]:
        """Return the shape of the whole value, given the shape of this rank's part."""
        whole = list(part)
        for dim, count, _, _ in self.splits:
            whole[dim] *= count
        return whole

    def forward(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part."""
        for dim, count, num_blocks, index in self.splits:
            blocks = [block.chunk(count, dim)[index] for block in whole.chunk(num_blocks, dim)]
            whole = blocks[0] if num_blocks == 1 else torch.cat(blocks, dim)
        return whole


class DividedDropout(nn.Module):
    """Dropout of this rank's shard with the random numbers of the whole tensor.

    Args:
        part: Module that returns this rank's shard of a whole tensor.
        p: Probability that an element is dropped.
        features: Whether whole features (first two dims) are dropped.
        inplace: Whether the input is changed.
    """

    def __init__(
        self, part: OwnPart, p: float, *, features: bool = False, inplace: bool = False
    ) -> None:
        super().__init__()
        self.part = part
        self.p = p
        self.features = features
        self.inplace = inplace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the value, with elements dropped."""
        ones = torch.ones(self.part.shape(x.shape), dtype=x.dtype, device=x.device)
        drop = torch.feature_dropout if self.features else torch.dropout
        scale: torch.Tensor = self.part(drop(ones, self.p, True))
        return x.mul_(scale) if self.inplace else x * scale


class DividedAttention(nn.Module):
    """Scaled dot product attention with dropout, for the heads of this rank.

    Args:
        part: Module that returns this rank's shard of a whole tensor.
        p: Probability that an attention weight is dropped.
        is_causal: Whether positions attend only to earlier positions.
        scale: Factor of the scores; 1 / sqrt(width) when None.
        gqa: Whether several query heads share a key-value head.
    """

    def __init__(
        self, part: OwnPart, p: float, *, is_causal: bool, scale: float | None, gqa: bool
    ) -> None:
        super().__init__()
        self.drop = DividedDropout(part, p)
        self.is_causal = is_causal
        self.scale = scale
        self.gqa = gqa

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention output of the queries."""
        if self.gqa:
            repeats = query.shape[-3] // key.shape[-3]
            key, value = (x.repeat_interleave(repeats, -3) for x in (key, value))
        scale = self.scale if self.scale is not None else 1 / math.sqrt(query.shape[-1])
        scores = query @ key.transpose(-2, -1) * scale
        if self.is_causal:
            allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~allowed, -math.inf)
        if mask is not None:
            kept = mask.dtype == torch.bool
            scores = scores.masked_fill(~mask, -math.inf) if kept else scores + mask
        kept_scores: torch.Tensor = self.drop(scores.softmax(-1))
        return kept_scores @ value


class VocabRows(nn.Module):
    """Embedding with the rows sharded; the result is a partial sum.

    Args:
        index: Index of this rank's shard.
        num_parts: Number of shards.
        padding: Row without a gradient, counted in the whole table; negative for none.
    """

    def __init__(self, index: int, num_parts: int, padding: int) -> None:
        super().__init__()
        self.index = index
        self.num_parts = num_parts
        self.padding = padding

    def forward(self, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return rows, with zeros for rows of other ranks.

        Raises:
            IndexError: An id is outside of the whole table; raised on all ranks.
        """
        count = weight.shape[0]
        first = self.index * count
        local, is_local = local_rows(ids, first, count, count * self.num_parts)
        padding = self.padding - first
        rows = functional.embedding(local, weight, padding if 0 <= padding < count else None)
        return rows.masked_fill(~is_local.unsqueeze(-1), 0)


class VocabLoss(nn.Module):
    """Cross-entropy of logits that are sharded by class; every rank has the whole loss.

    Args:
        group: Ranks with shards of the logits.
        reduction: torch's constant: 0 none, 1 mean, 2 sum.
        ignore_index: Target that does not count.
        label_smoothing: Share of the target that is spread over all classes.
    """

    def __init__(
        self, group: Group, reduction: int, ignore_index: int, label_smoothing: float
    ) -> None:
        super().__init__()
        self.group = group
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss, reduced by torch's constants: 0 none, 1 mean, 2 sum."""
        losses = vocab_parallel_cross_entropy(
            self.group,
            logits,
            target,
            label_smoothing=self.label_smoothing,
            ignore_index=self.ignore_index,
        )
        if self.reduction == 0:
            return losses.to(logits.dtype)
        total = losses.sum()
        if self.reduction == 1:
            total = total / (target != self.ignore_index).sum()
        return total.to(logits.dtype)
