"""The backends of torch.distributed.rpc: one name, for which braid is used."""

from __future__ import annotations

import enum
from typing import Any

from braid.compat.torch_rpc.rpc import constants
from braid.compat.torch_rpc.rpc.options import TensorPipeRpcBackendOptions

__all__ = ["BackendType", "backend_registered", "construct_rpc_backend_options"]


class BackendType(enum.Enum):
    """Names of the RPC backends."""

    TENSORPIPE = "TENSORPIPE"

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"


def backend_registered(backend_name: str) -> bool:
    """Return whether a backend exists."""
    return backend_name in BackendType.__members__


def construct_rpc_backend_options(
    backend: BackendType,
    rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = constants.DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> TensorPipeRpcBackendOptions:
    """Return options for a backend; `kwargs` are further fields of the options."""
    del backend
    return TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)
