"""The names of torch.distributed.rpc."""

from braid.compat.torch_rpc.rpc import api, backend_registry, constants, functions, options
from braid.compat.torch_rpc.rpc.agent import (
    RpcAgent,
    TensorPipeAgent,
    _get_current_rpc_agent,
    _get_debug_info,
    _is_current_rpc_agent_set,
    _rref_context_get_debug_info,
    _set_rpc_timeout,
    get_rpc_timeout,
)
from braid.compat.torch_rpc.rpc.api import (
    RRef,
    WorkerInfo,
    _all_gather,
    _barrier,
    _delete_all_user_and_unforked_owner_rrefs,
    _wait_all,
    _wait_all_workers,
    get_worker_info,
    init_rpc,
    is_available,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from braid.compat.torch_rpc.rpc.backend_registry import BackendType
from braid.compat.torch_rpc.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions

PyRRef = RRef

__all__ = [
    "BackendType",
    "PyRRef",
    "RRef",
    "RpcAgent",
    "RpcBackendOptions",
    "TensorPipeAgent",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "_all_gather",
    "_barrier",
    "_delete_all_user_and_unforked_owner_rrefs",
    "_get_current_rpc_agent",
    "_get_debug_info",
    "_is_current_rpc_agent_set",
    "_rref_context_get_debug_info",
    "_set_rpc_timeout",
    "_wait_all",
    "_wait_all_workers",
    "api",
    "backend_registry",
    "constants",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "is_available",
    "options",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]
