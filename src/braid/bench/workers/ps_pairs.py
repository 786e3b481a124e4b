"""Pairs of keys and values, pushed to and pulled from a handle that does nothing."""

from __future__ import annotations

import torch

from braid.ps import kv

__all__ = ["Pairs", "serve_pairs"]


def serve_pairs(node: kv.KVNode, num_pairs: int) -> kv.KVServer:
    """Answer requests of a server's node: pushes with nothing, pulls with values that exist."""
    vals = torch.zeros(num_pairs)

    def handle(meta: kv.KVMeta, pairs: kv.KVPairs, server: kv.KVServer) -> None:
        server.response(meta, kv.KVPairs(pairs.keys, vals) if meta.pull else None)

    server = kv.KVServer(node)
    server.set_request_handle(handle)
    return server


class Pairs:
    """A worker's pairs.

    Args:
        node: Node of the worker.
        num_pairs: Number of pairs.
    """

    def __init__(self, node: kv.KVNode, num_pairs: int) -> None:
        self._worker = kv.KVWorker(node)
        self._keys = torch.arange(num_pairs).view(torch.uint64)
        self._vals, self._out = torch.ones(num_pairs), torch.empty(num_pairs)

    def push(self) -> None:
        """Push all pairs without a copy, and wait for the answer."""
        self._worker.wait(self._worker.push(self._keys, self._vals, copy=False))

    def pull(self) -> None:
        """Pull all values into memory that exists."""
        self._worker.wait(self._worker.pull(self._keys, self._out, copy=False))
