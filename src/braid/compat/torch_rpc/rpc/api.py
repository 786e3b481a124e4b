"""The calls of torch.distributed.rpc.api."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from braid.compat.torch_rpc.dist_autograd import average_ddp
from braid.compat.torch_rpc.futures import wait_all
from braid.compat.torch_rpc.rpc.agent import _get_current_rpc_agent, _is_current_rpc_agent_set
from braid.compat.torch_rpc.rpc.backend_registry import BackendType
from braid.compat.torch_rpc.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from braid.compat.torch_rpc.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions
from braid.rpc import RpcOptions, RRef, WorkerInfo, get_worker_info, remote, rpc_sync, shutdown
from braid.rpc import init_rpc as init
from braid.rpc import rpc_async as call_async
from braid.rpc.all_gather import all_gather, barrier
from braid.rpc.current import current_agent
from braid.rpc.workers import To

__all__ = [
    "RRef",
    "WorkerInfo",
    "_get_current_rpc_agent",
    "_is_current_rpc_agent_set",
    "get_worker_info",
    "init_rpc",
    "is_available",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

_thread_local_var = threading.local()


def is_available() -> bool:
    """Return True: remote calls are available."""
    return True


def init_rpc(
    name: str,
    backend: object = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: object = None,
) -> None:
    """Join the group of processes that can call each other; see `braid.rpc.init_rpc`.

    Args:
        name: Name of this process, different on each process.
        backend: Member of `BackendType`; all members use braid.
        rank: Number of this process; from the environment when -1.
        world_size: Number of processes; from the environment when None.
        rpc_backend_options: Options; the default options when None.

    Afterwards, distributed autograd also averages gradients of DistributedDataParallel modules.

    Raises:
        TypeError: `backend` or `rpc_backend_options` has a wrong type.
    """
    if backend is not None and not isinstance(backend, BackendType):
        msg = f"Argument backend must be a member of BackendType, got {backend!r}"
        raise TypeError(msg)
    options = TensorPipeRpcBackendOptions() if rpc_backend_options is None else rpc_backend_options
    if not isinstance(options, RpcBackendOptions):
        msg = (
            "Argument rpc_backend_options must be an instance of RpcBackendOptions, got "
            f"{type(options).__name__}"
        )
        raise TypeError(msg)
    if type(options) is not RpcOptions and not isinstance(options, TensorPipeRpcBackendOptions):
        msg = (
            f"Could not infer backend for options {options}: pass TensorPipeRpcBackendOptions or "
            "braid.rpc.RpcOptions"
        )
        raise TypeError(msg)
    init(name, None, rank, world_size or None, options)
    hook = register_module_forward_pre_hook(average_ddp)
    current_agent().resources.callback(hook.remove)


def rpc_async(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> torch.futures.Future[Any]:
    """Call a function on another process and return a future; see `braid.rpc.rpc_async`.

    Args:
        to: Name or `WorkerInfo` of the process.
        func: Function to call there.
        args: Positional arguments of the function.
        kwargs: Keyword arguments of the function, by name.
        timeout: Seconds until the future fails; 0 for no limit.
    """
    future = call_async(to, func, args, kwargs, timeout)
    if hasattr(_thread_local_var, "future_list"):
        _thread_local_var.future_list.append(future)
    return future


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Wait on exit for all calls of `rpc_async` inside the context; raise the first error."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        futures = _thread_local_var.future_list
        del _thread_local_var.future_list
        wait_all(futures)


def _all_gather(
    obj: Any, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Return the values of all nodes, or of the named nodes, by name; all of them call this."""
    return all_gather(current_agent(), obj, worker_names, timeout)


def _barrier(worker_names: Iterable[str]) -> None:
    """Wait until all named nodes have called this."""
    barrier(current_agent(), worker_names)


def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Wait until all nodes have called this."""
    barrier(current_agent(), timeout=timeout)


def _delete_all_user_and_unforked_owner_rrefs(timeout: object = None) -> None:
    """Release the references that Python has collected; `shutdown` releases the others."""
    del timeout
    current_agent().references.collect()
