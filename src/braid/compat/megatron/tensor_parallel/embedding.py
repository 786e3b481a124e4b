"""Embedding with rows divided among ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from braid.compat.megatron.model_parallel_config import ModelParallelConfig
from braid.compat.megatron.tensor_parallel.divided_layer import DividedLayer, InitMethod
from braid.compat.megatron.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from braid.compat.megatron.tensor_parallel.utils import VocabUtility
from braid.compat.megatron.utils import part_size
from braid.parallel.tensor_parallel import Slicing
from braid.parallel.tensor_parallel.embedding import local_rows

__all__ = ["VocabParallelEmbedding"]


class VocabParallelEmbedding(DividedLayer):
    """Embedding with rows divided among ranks.

    Args:
        num_embeddings: Number of rows over all ranks.
        embedding_dim: Length of a row.
        init_method: Function that fills the weight in place.
        reduce_scatter_embeddings: Whether to return only this rank's positions, as [positions,
            batch, embedding_dim].
        config: Megatron's configuration of the model.
        tp_group: Group of ranks; the tensor parallel group when None.

    Raises:
        UsageError: The number of rows is not divisible by the number of ranks.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: InitMethod,
        reduce_scatter_embeddings: bool = False,
        config: ModelParallelConfig,
        tp_group: Any = None,
    ) -> None:
        super().__init__(config, tp_group, is_expert=False)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
        self.deterministic_mode = config.deterministic_mode
        group = self.group
        part_size("num_embeddings", num_embeddings, group.size)
        self.vocab_start_index, self.vocab_end_index = (
            VocabUtility.vocab_range_from_global_vocab_size(num_embeddings, group.rank, group.size)
        )
        self.num_embeddings_per_partition = self.vocab_end_index - self.vocab_start_index
        self.weight = self.make_weight((num_embeddings, embedding_dim), Slicing(0), init_method)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids, shape [batch, positions, embedding_dim].

        Raises:
            IndexError: An id is out of range; raised on all ranks.
        """
        count = self.num_embeddings_per_partition
        local, is_local = local_rows(input_, self.vocab_start_index, count, self.num_embeddings)
        if self.deterministic_mode:
            rows = self.weight[local]
        else:
            rows = functional.embedding(local, self.weight)
        rows = rows.masked_fill(~is_local.unsqueeze(-1), 0)
        if self.reduce_scatter_embeddings:
            terms = rows.transpose(0, 1).contiguous()
            return reduce_scatter_to_sequence_parallel_region(terms, self.tp_group)
        return reduce_from_tensor_model_parallel_region(rows, self.tp_group)
