"""Batched serving: one forward answers the calls of many clients; a serial object counts them.

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

FILE = Path(sys.argv[1]) if len(sys.argv) > 1 else None  # run longer, write the rates there
CLIENTS, REQUESTS, D, H = 16, 60 if FILE else 3, 512, 8192
SIZES = (1, 2, 4, 8, 16)
MODEL = nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, 8))
GENERATOR = torch.Generator().manual_seed(0)
for param in MODEL.parameters():  # small whole numbers: their sums are exact in any batch
    param.data = torch.randint(-2, 3, param.shape, generator=GENERATOR).float()


@torch.no_grad
def answers_of(states: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(MODEL(torch.stack(states)))


BATCHED = {size: rpc.batch(max_size=size, max_wait_s=0.005)(answers_of) for size in SIZES}


@rpc.functions.async_execution
def serve(size: int, state: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    return BATCHED[size](state)  # a future: the reply is sent when the batch is computed


@rpc.serial
class Ledger:
    """A counter for many clients: calls run one at a time, so no increment is lost."""

    total = 0

    def add(self, n: int) -> int:
        """Add n; return the total."""
        self.total += n
        return self.total


def client(number: int, size: int, ledger: rpc.RRef) -> tuple[list, list]:
    """Send requests one at a time; return the requests and the answers."""
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
                results = [future.result() for future in futures]
                rates[size] = round(CLIENTS * REQUESTS / (time.perf_counter() - began))
                print(f"batches of up to {size}: {rates[size]} requests/s")
                assert all(all(map(torch.equal, b, answers_of(a))) for a, b in results)
        assert ledger.rpc_sync().add(0) == CLIENTS * REQUESTS * len(SIZES)
        if FILE is not None:
            FILE.write_text(json.dumps(rates))
        print("answers equal one process bit by bit, and all are counted")
    rpc.shutdown()
