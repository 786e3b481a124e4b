"""The names of torch.distributed.rpc.functions."""

from braid.rpc.functions import async_execution

__all__ = ["async_execution"]
