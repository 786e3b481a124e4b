"""Keys and values: a custom handle on the servers, a slicer, and filters that save bytes.

braid run --servers 2 --workers 2 examples/34_keys_and_values.py
"""

from __future__ import annotations

import itertools
import math
import os

import torch

import braid
from braid.ps import kv

KEYS = torch.arange(20_000)  # small numbers: a division by ranges puts all keys on server 0
ROUNDS = 5


class Largest:
    """Keeps the largest value of each key, so the order of values does not matter."""

    def __init__(self) -> None:
        self.values: dict[int, float] = {}

    def __call__(self, meta: kv.KVMeta, pairs: kv.KVPairs, server: kv.KVServer) -> None:
        """Handle a push, a pull, or both."""
        keys = pairs.keys.tolist()
        if meta.push:
            for key, value in zip(keys, pairs.vals.tolist(), strict=True):
                self.values[key] = max(value, self.values.get(key, -math.inf))
        answer = None
        if meta.pull:
            answer = kv.KVPairs((), torch.tensor([self.values.get(k, -math.inf) for k in keys]))
        server.response(meta, answer)


def values(worker: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * number + worker)
    return torch.randn(len(KEYS), generator=generator).relu()  # half of them are zeros


def work(node: kv.KVNode) -> None:
    filters = [kv.KeyCache(), kv.Compression()]  # neither loses a bit
    worker = kv.KVWorker(node, filters=filters)
    worker.set_slicer(kv.by_hash)
    for number in range(ROUNDS):
        worker.wait(worker.push(KEYS, values(node.number, number)))
    node.barrier(kv.WORKER_GROUP)
    worker.wait(worker.pull(KEYS, largest := torch.empty(0)))
    everyone = itertools.product(range(node.num_workers), range(ROUNDS))
    alone = torch.stack([values(*push) for push in everyone]).amax(0)
    whole = (ROUNDS + 1) * KEYS.nbytes + (ROUNDS + 1) * alone.nbytes
    saved = ", ".join(f"{type(f).__name__} saves {f.saved_bytes:,}" for f in filters)
    print(f"of {whole:,} bytes {saved}")
    assert torch.equal(largest, alone)
    print("the largest values equal one process bit by bit")


def main() -> None:
    with kv.join(braid.init(), int(os.environ["BRAID_SERVERS"])) as node:
        handle = Largest()
        if node.is_server:
            kv.KVServer(node).set_request_handle(handle)
        elif node.is_worker:
            work(node)
    if node.is_server:
        print(f"{len(handle.values):,} keys of {len(KEYS):,} are here")


if __name__ == "__main__":
    main()
