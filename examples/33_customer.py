"""Requests over links that lose every fifth message: resent, answered in parts, executed once.

braid run --servers 2 --workers 2 examples/33_customer.py
"""

from __future__ import annotations

import itertools
import os
from collections import Counter

import torch

import braid
from braid.ps import kv
from braid.runtime.message import Delivery

KEYS = torch.tensor([k << 61 for k in range(8)], dtype=torch.uint64)  # four for each server
PUSHES = 60


class CountingHandle(kv.KVServerDefaultHandle):
    """Sums pushed values, and counts how often each request is executed."""

    def __init__(self) -> None:
        super().__init__()
        self.executed: Counter[tuple[int, int]] = Counter()

    def __call__(self, meta: kv.KVMeta, pairs: kv.KVPairs, server: kv.KVServer) -> None:
        """Handle a request."""
        self.executed[meta.sender, meta.timestamp] += 1
        super().__call__(meta, pairs, server)


def values(worker: int, number: int) -> torch.Tensor:
    """Return whole numbers: their sums are exact in any order."""
    generator = torch.Generator().manual_seed(100 * number + worker)
    return torch.randint(-999, 999, (len(KEYS),), generator=generator).float()


def work(node: kv.KVNode) -> None:
    worker = kv.KVWorker(node)
    finished: list[int] = []
    stamps = [
        worker.push(KEYS, values(node.number, n), callback=lambda number=n: finished.append(number))
        for n in range(PUSHES)  # without waiting for earlier ones
    ]
    for stamp in stamps:
        worker.wait(stamp, timeout_s=60)
    node.barrier(kv.WORKER_GROUP)
    worker.wait(worker.pull(KEYS, sums := torch.empty(0)), timeout_s=60)
    alone = sum(values(w, n) for w in range(node.num_workers) for n in range(PUSHES))
    assert torch.equal(sums, alone)
    early = sum(a > b for a, b in itertools.pairwise(finished))
    print(f"timestamps {stamps[0]} to {stamps[-1]}; {early} callbacks overtook the one before")
    print("sums equal one process bit by bit")


def count_arrivals(node: kv.KVNode) -> Counter[str]:
    """Count the messages that the node handles from now on, by type."""
    came: Counter[str] = Counter()
    handle = node.postoffice.handle

    def count(delivery: Delivery) -> None:
        came[type(delivery.message).__name__] += 1
        handle(delivery)

    node.postoffice.handle = count
    return came


def main() -> None:
    servers = int(os.environ["BRAID_SERVERS"])
    with kv.join(braid.init(), servers, drop=0.2, resend_s=0.1) as node:
        handle, came = CountingHandle(), count_arrivals(node)
        if node.is_server:
            kv.KVServer(node).set_request_handle(handle)
        elif node.is_worker:
            work(node)
    if node.is_server:
        executed = handle.executed
        total = f"{came['Transfer']} of {came.total()} messages that came are requests"
        print(f"{total}; {len(executed)} were executed, each once")
        assert set(executed.values()) == {1}


if __name__ == "__main__":
    main()
