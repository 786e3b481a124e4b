"""Context parallelism: sequences sharded over ranks, and attention over all of their positions."""

from __future__ import annotations

from braid.parallel.context_parallel.heads import all_to_all_attention, all_to_all_costs
from braid.parallel.context_parallel.loss import mean_over_sequence, shifted_labels
from braid.parallel.context_parallel.model import ContextParallel, context_parallel
from braid.parallel.context_parallel.ring import ring_attention, ring_costs
from braid.parallel.context_parallel.sequence import (
    BatchSplitter,
    gather_sequence,
    join_sequence,
    pad_sequence,
    padded_length,
    position_ids,
    split_sequence,
)

__all__ = [
    "BatchSplitter",
    "ContextParallel",
    "all_to_all_attention",
    "all_to_all_costs",
    "context_parallel",
    "gather_sequence",
    "join_sequence",
    "mean_over_sequence",
    "pad_sequence",
    "padded_length",
    "position_ids",
    "ring_attention",
    "ring_costs",
    "shifted_labels",
    "split_sequence",
]
