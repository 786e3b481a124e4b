"""An embedding whose rows are divided over ranks.

Ids of other ranks' rows are looked up as row 0 and masked; the sum over ranks has all rows.

Source: M. Shoeybi et al., Megatron-LM, 2019, section 3.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.nn import functional

from braid.autograd import all_reduce_forward_identity_backward
from braid.comm import Group
from braid.errors import ConfigError
from braid.tensor_parallel.linear import slice_param
from braid.tensor_parallel.slices import Slicing

__all__ = ["VocabParallelEmbedding"]


class VocabParallelEmbedding(nn.Embedding):
    """An embedding of which each rank has some rows.

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
        """Divide an embedding in place: the object, its parameter and their names stay.

        Raises:
            ConfigError: The rows cannot be divided, or it limits norms or has sparse gradients.
        """
        if embedding.max_norm is not None or embedding.sparse or embedding.scale_grad_by_freq:
            msg = (
                f"{name} cannot be divided: it has max_norm, sparse or scale_grad_by_freq; leave "
                "it whole"
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
        """Return the rows of ids."""
        count = self.weight.shape[0]
        own = (ids >= self.first) & (ids < self.first + count)
        local = torch.where(own, ids - self.first, 0)
        padding = None
        if self.padding_idx is not None and 0 <= self.padding_idx - self.first < count:
            padding = self.padding_idx - self.first
        rows = functional.embedding(local, self.weight, padding)
        rows = rows.masked_fill(~own.unsqueeze(-1), 0)
        return all_reduce_forward_identity_backward(self.group, rows)
