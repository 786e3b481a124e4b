"""Distributed autograd: gradients through the tensors that remote calls carry.

    with dist_autograd.context() as context_id:
        loss = model(x).sum()                       calls of other nodes inside
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)                  or get_gradients(context_id)

Gradients belong to the context; `.grad` of parameters does not change.
"""

from __future__ import annotations

from braid.rpc.autograd.accumulation import run_hooks
from braid.rpc.autograd.api import backward, context, get_gradients

__all__ = ["backward", "context", "get_gradients", "run_hooks"]
