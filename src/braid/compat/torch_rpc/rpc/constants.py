"""The constants of torch.distributed.rpc.constants."""

from __future__ import annotations

from datetime import timedelta

from braid.rpc.options import DEFAULT_TIMEOUT_S

__all__ = [
    "DEFAULT_INIT_METHOD",
    "DEFAULT_NUM_WORKER_THREADS",
    "DEFAULT_PROCESS_GROUP_TIMEOUT",
    "DEFAULT_RPC_TIMEOUT_SEC",
    "DEFAULT_SHUTDOWN_TIMEOUT",
    "UNSET_RPC_TIMEOUT",
]

DEFAULT_RPC_TIMEOUT_SEC: float = DEFAULT_TIMEOUT_S
DEFAULT_INIT_METHOD: str = "env://"
DEFAULT_SHUTDOWN_TIMEOUT: float = 0
DEFAULT_NUM_WORKER_THREADS: int = 16
DEFAULT_PROCESS_GROUP_TIMEOUT = timedelta(milliseconds=2**31 - 1)  # of no use here
UNSET_RPC_TIMEOUT: float = -1.0
