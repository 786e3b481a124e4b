"""Serving: one forward answers the calls of many clients, and a serial object counts them.

braid run -n 2 examples/44_serving.py
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn

from braid import rpc

FILE = Path(sys.argv[1]) if len(sys.argv) > 1 else None  # measures for longer, and writes it
CLIENTS, REQUESTS, D, H = 16, 60 if FILE else 3, 512, 8192
SIZES = (1, 2, 4, 8, 16)
MODEL = nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, 8))
GENERATOR = torch.Generator().manual_seed(0)
for each in MODEL.parameters():  # small whole numbers, whose sums are exact in any batch
    each.data = torch.randint(-2, 3, each.shape, generator=GENERATOR).float()


@torch.no_grad
def answers_of(states: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(MODEL(torch.stack(states)))


BATCHED = {size: rpc.batch(max_size=size, max_wait_s=0.005)(answers_of) for size in SIZES}


@rpc.functions.async_execution
def serve(size: int, state: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    return BATCHED[size](state)  # a future: the reply leaves when the batch is answered


@rpc.serial
class Ledger:
    """A number to which many add; one call runs at a time, so none is lost."""

    total = 0

    def add(self, n: int) -> int:
        """Add to the number."""
        self.total += n
        return self.total


def client(number: int, size: int, ledger: rpc.RRef) -> tuple[list, list]:
    """Ask one thing after the other; return what was asked and answered."""
    generator = torch.Generator().manual_seed(number)
    states = list(torch.randint(-2, 3, (REQUESTS, D), generator=generator).float())
    answers = [rpc.rpc_sync("server", serve, (size, state)) for state in states]
    ledger.rpc_sync().add(len(answers))
    return states, answers


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc(("clients", "server")[rank])
    if rank == 0:
        rates, ledger = {}, rpc.remote("server", Ledger)
        with ThreadPoolExecutor(CLIENTS) as pool:
            for size in SIZES:
                began = time.perf_counter()
                futures = [pool.submit(client, n, size, ledger) for n in range(CLIENTS)]
                results = [each.result() for each in futures]
                rates[size] = round(CLIENTS * REQUESTS / (time.perf_counter() - began))
                print(f"batches of up to {size}: {rates[size]} requests/s")
                assert all(all(map(torch.equal, b, answers_of(a))) for a, b in results)
        assert ledger.rpc_sync().add(0) == CLIENTS * REQUESTS * len(SIZES)
        if FILE is not None:
            FILE.write_text(json.dumps(rates))
        print("answers are those of one process bit by bit, and all are counted")
    rpc.shutdown()
