"""Tensor parallelism: layers with parameters sharded over ranks."""

from __future__ import annotations

from braid.parallel.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from braid.parallel.tensor_parallel.divide import clip_grad_norm_, parallelize
from braid.parallel.tensor_parallel.embedding import VocabParallelEmbedding
from braid.parallel.tensor_parallel.insertion import Division, Shard
from braid.parallel.tensor_parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_linear,
)
from braid.parallel.tensor_parallel.sequence import (
    gather_sequence,
    reduce_scatter_sequence,
    scatter_sequence,
)
from braid.parallel.tensor_parallel.sequence_linear import sequence_column_linear
from braid.parallel.tensor_parallel.slices import Slicing
from braid.parallel.tensor_parallel.whole import divide_states, slicing_of, undivide

__all__ = [
    "ColumnParallelLinear",
    "Division",
    "RowParallelLinear",
    "Shard",
    "Slicing",
    "VocabParallelEmbedding",
    "clip_grad_norm_",
    "column_linear",
    "divide_states",
    "gather_sequence",
    "parallelize",
    "reduce_scatter_sequence",
    "scatter_sequence",
    "sequence_column_linear",
    "slicing_of",
    "undivide",
    "vocab_parallel_cross_entropy",
]
