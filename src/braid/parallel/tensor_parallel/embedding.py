"""Embedding with the rows sharded over ranks.

Ids of other ranks' rows are looked up as row 0 and masked; the sum over ranks has all rows. An id
outside of the whole table is out of range on every rank, so each rank raises torch's IndexError.

Source: M. Shoeybi et al., Megatron-LM, 2019, section 3.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.nn import functional

from braid.comm import Group
from braid.comm.autograd import all_reduce_forward_identity_backward
from braid.errors import ConfigError
from braid.parallel.tensor_parallel.linear import slice_param
from braid.parallel.tensor_parallel.slices import Slicing

__all__ = ["VocabParallelEmbedding", "local_rows"]


def local_rows(
    ids: torch.Tensor, first: int, count: int, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each id's index in this rank's rows of a table, and which ids this rank has.

    Args:
        ids: Rows of the whole table.
        first: First row of this rank.
        count: Number of rows of this rank.
        total: Number of rows of the whole table.

    Returns:
        Two tensors. The index of each id: 0 for rows of other ranks, and `count`, which is out of
            range, for ids outside of the whole table. And whether this rank has each id's row.
    """
    is_local = (ids >= first) & (ids < first + count)
    elsewhere = torch.where((ids >= 0) & (ids < total), 0, count)
    return torch.where(is_local, ids - first, elsewhere), is_local


class VocabParallelEmbedding(nn.Embedding):
    """Embedding with the rows sharded over ranks.

    Args:
        num_embeddings: Number of rows over all ranks.
        embedding_dim: Length of a row.
        group: Ranks that share the layer.

    Raises:
        ConfigError: The rows cannot be divided; the message has the valid numbers of ranks.
    """

    group: Group
    first: int

    def __init__(self, num_embeddings: int, embedding_dim: int, group: Group) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.shard(self, group)

    @classmethod
    def shard(
        cls, embedding: nn.Embedding, group: Group, *, name: str = "num_embeddings"
    ) -> VocabParallelEmbedding:
        """Shard an embedding in place: the object, its parameter and their names are kept.

        Raises:
            ConfigError: The rows cannot be divided, or the embedding limits norms or has sparse
                gradients.
        """
        if embedding.max_norm is not None or embedding.sparse or embedding.scale_grad_by_freq:
            msg = (
                f"{name} cannot be sharded: it has max_norm, sparse or scale_grad_by_freq; leave "
                "it out of the plan"
            )
            raise ConfigError(msg)
        slicing = Slicing(0)
        slicing.check(name, embedding.num_embeddings, group.size)
        embedding.__class__ = cls
        layer = cast("VocabParallelEmbedding", embedding)
        layer.group = group
        slice_param(layer.weight, slicing, group)
        layer.first = group.rank * layer.weight.shape[0]
        return layer

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of the whole table for `ids`, on all ranks.

        Raises:
            IndexError: An id is outside of the whole table; raised on all ranks.
        """
        count = self.weight.shape[0]
        local, is_local = local_rows(ids, self.first, count, count * self.group.size)
        padding = None
        if self.padding_idx is not None and 0 <= self.padding_idx - self.first < count:
            padding = self.padding_idx - self.first
        rows = functional.embedding(local, self.weight, padding)
        rows = rows.masked_fill(~is_local.unsqueeze(-1), 0)
        return all_reduce_forward_identity_backward(self.group, rows)
