"""Collectives with gradients, order in backward, copies between streams, and recomputation."""

from braid.comm.autograd.conjugate import (
    all_gather_forward_split_backward,
    all_reduce_forward_identity_backward,
    identity_forward_all_reduce_backward,
    split_forward_all_gather_backward,
)
from braid.comm.autograd.dependency import depend, fork, join
from braid.comm.autograd.layer_costs import LiveTensors, measure
from braid.comm.autograd.messages import exchange, recv, send
from braid.comm.autograd.parts import all_gather, all_to_all, reduce_scatter
from braid.comm.autograd.phony import phony
from braid.comm.autograd.recompute import RecomputeError, checkpoint
from braid.comm.autograd.recompute_layers import recompute_layers
from braid.comm.autograd.recompute_plan import (
    LayerCost,
    RecomputePlan,
    Segment,
    by_budget,
    equal_segments,
    least_budget,
    sqrt_segments,
)
from braid.comm.autograd.recompute_policy import MATMULS, CheckpointPolicy
from braid.comm.autograd.reductions import all_reduce, scan
from braid.comm.autograd.rooted import broadcast, gather, reduce, scatter
from braid.comm.autograd.sequential import checkpoint_sequential
from braid.comm.autograd.streams import Stream
from braid.comm.autograd.transfer import copy, wait

__all__ = [
    "MATMULS",
    "CheckpointPolicy",
    "LayerCost",
    "LiveTensors",
    "RecomputeError",
    "RecomputePlan",
    "Segment",
    "Stream",
    "all_gather",
    "all_gather_forward_split_backward",
    "all_reduce",
    "all_reduce_forward_identity_backward",
    "all_to_all",
    "broadcast",
    "by_budget",
    "checkpoint",
    "checkpoint_sequential",
    "copy",
    "depend",
    "equal_segments",
    "exchange",
    "fork",
    "gather",
    "identity_forward_all_reduce_backward",
    "join",
    "least_budget",
    "measure",
    "phony",
    "recompute_layers",
    "recv",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
    "send",
    "split_forward_all_gather_backward",
    "sqrt_segments",
    "wait",
]
