"""The API of torch.distributed.autograd, including private functions that programs use."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from braid.rpc.autograd.node_context import Context
from braid.rpc.current import current_agent
from braid.rpc.dist_autograd import backward, context, get_gradients, run_hooks
from braid.rpc.outcomes import RpcError
from braid.runtime.torch_internals import active_ddp

__all__ = ["backward", "context", "get_gradients", "is_available", "run_hooks"]

DistAutogradContext = Context


def average_ddp(module: nn.Module, args: Any) -> None:
    """Forward pre-hook of all modules: makes distributed autograd run the hooks of DDP modules.

    DDP is torch's DistributedDataParallel. If the program calls `ddp.forward(x)`, hooks of `ddp`
    do not run. So this function also acts for the module that `ddp` wraps.
    """
    del args
    if torch.compiler.is_compiling():
        return
    ddp = module if isinstance(module, nn.parallel.DistributedDataParallel) else active_ddp()
    if ddp is not None and module in (ddp, ddp.module):  # once per forward, not for each layer
        is_early = ddp.static_graph or ddp.find_unused_parameters
        run_hooks(ddp.parameters(), is_early=is_early)


def is_available() -> bool:
    """Return True: distributed autograd is available."""
    return True


def _init(worker_id: int) -> None:
    """Do nothing: `init_rpc` initializes everything."""
    del worker_id


def _new_context() -> Context:
    """Begin a context in this thread."""
    contexts = current_agent().contexts
    return contexts.get(contexts.open())


def _release_context(context_id: int) -> None:
    """End a context on all nodes."""
    current_agent().contexts.close(context_id)


def _retrieve_context(context_id: int) -> Context:
    """Return a context of this node.

    Raises:
        RpcError: The context has ended, or is unknown on this node.
    """
    return current_agent().contexts.get(context_id)


def _is_valid_context(context_id: int) -> bool:
    """Return True if a context is known on this node.

    Raises:
        RpcError: The context is unknown.
    """
    return _retrieve_context(context_id) is not None


def _has_valid_context() -> bool:
    """Return whether a context is open in this thread."""
    return current_agent().contexts.current is not None


def _current_context() -> Context:
    """Return the context of this thread.

    Raises:
        RpcError: The thread has no context.
    """
    context = current_agent().contexts.current
    if context is None:
        msg = (
            "Can't retrieve context: this thread has no autograd context. Use "
            "`with dist_autograd.context() as context_id:`"
        )
        raise RpcError(msg)
    return context


def _get_max_id() -> int:
    """Return the largest number that a context of this node can have."""
    return current_agent().contexts.largest_number


def _get_debug_info() -> dict[str, str]:
    """Return counts of this node."""
    contexts = current_agent().contexts
    return {
        "num_current_backward_passes": str(contexts.num_backwards),
        "num_autograd_contexts": str(len(contexts.numbers)),
    }
