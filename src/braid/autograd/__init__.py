"""What backward needs to know about ranks, streams and memory: collectives with gradients, order, copies, recomputation."""

from braid.autograd.conjugate import (
    all_gather_forward_split_backward,
    all_reduce_forward_identity_backward,
    identity_forward_all_reduce_backward,
    split_forward_all_gather_backward,
)
from braid.autograd.dependency import depend, fork, join
from braid.autograd.messages import exchange, recv, send
from braid.autograd.parts import all_gather, all_to_all, reduce_scatter
from braid.autograd.phony import phony
from braid.autograd.reductions import all_reduce, scan
from braid.autograd.rooted import broadcast, gather, reduce, scatter

__all__ = [
    "all_gather",
    "all_gather_forward_split_backward",
    "all_reduce",
    "all_reduce_forward_identity_backward",
    "all_to_all",
    "broadcast",
    "depend",
    "exchange",
    "fork",
    "gather",
    "identity_forward_all_reduce_backward",
    "join",
    "phony",
    "recv",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
    "send",
    "split_forward_all_gather_backward",
]
