"""The functions of remote calls, under torch's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from braid.rpc.caller import OutgoingCall
from braid.rpc.current import current_agent
from braid.rpc.references import RRef, create
from braid.rpc.scope import current_scope
from braid.rpc.workers import To, WorkerInfo

__all__ = ["get_worker_info", "is_cancelled", "remote", "rpc_async", "rpc_sync"]

UNSET = -1.0


def rpc_sync(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET,
) -> Any:
    """Call a function in another node, and return its result.

    Args:
        to: Name or number of the node, or its WorkerInfo.
        func: A function, class or method that the node can find by name, or an operator of torch.
        args: Arguments: plain data, tensors, remote references, dataclasses.
        kwargs: Keyword arguments.
        timeout: Seconds; the node's default when -1, unlimited when 0.

    Cost: one message there and one back; tensors are not copied in this process.

    Raises:
        Exception: The function's exception, with the callee's traceback in its text.
        CommTimeout: No answer came in time.
        PeerLostError: The node is lost.
        ConfigError: The node does not exist, or an argument cannot be sent.
    """
    return current_agent().caller.call_sync(OutgoingCall(to, func, args, kwargs, timeout))


def rpc_async(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET,
) -> torch.futures.Future[Any]:
    """Call a function on another node; return a future of its result. See `rpc_sync`.

    The future can also be cancelled: `future.cancel()`, see `AnswerFuture`.
    """
    return current_agent().caller.call_async(OutgoingCall(to, func, args, kwargs, timeout))


def remote(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET,
) -> RRef:
    """Call a function on another node, and return a reference to the result, which stays there.

    An error of the function is raised when the value is used. See `rpc_sync`.
    """
    return create(current_agent(), OutgoingCall(to, func, args, kwargs, timeout))


def is_cancelled() -> bool:
    """Return whether the current call was cancelled or its deadline has passed.

    A long-running function should check this periodically and return early. Cancelling
    a call also cancels the calls that it has made.
    """
    scope = current_scope()
    if scope is None:
        return False
    late = scope.deadline_ns is not None and current_agent().peers.now_ns() >= scope.deadline_ns
    return scope.is_cancelled or late


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Return name and number of a node; this node's when `worker_name` is None.

    Raises:
        ConfigError: No node has that name.
    """
    agent = current_agent()
    if worker_name is None:
        return agent.info
    record = agent.directory.find(worker_name)
    return WorkerInfo(record.name, record.id)
