"""Commands without keys: a worker sets the learning rate of all servers, and asks for their state.

braid run --servers 2 --workers 2 examples/59_simple_app.py
"""

from __future__ import annotations

import os

import torch

import braid
from braid.ps import kv

KEYS = torch.tensor([k << 61 for k in range(8)], dtype=torch.uint64)  # four for each server
APP, RATE, STATUS = 1, 1, 2  # number of the app (app 0 has the keys), and heads of commands
RATES = (0.5, 0.25, 0.125)


class Weights:
    """Weights of a server: pushes change them, commands change the learning rate."""

    def __init__(self) -> None:
        self.weights, self.rate, self.num_pushes = dict[int, float](), 0.0, 0

    def command(self, asked: kv.SimpleData, app: kv.SimpleApp) -> None:
        """Answer a command; the sender gets the text of an exception."""
        assert asked.head in {RATE, STATUS}, f"no such command: {asked.head}"
        if asked.head == RATE:
            self.rate = float(asked.body)
        app.response(asked, f"{self.num_pushes} pushes, rate {self.rate}")

    def __call__(self, meta: kv.KVMeta, pairs: kv.KVPairs, server: kv.KVServer) -> None:
        """Answer a push or a pull."""
        keys = pairs.keys.tolist()
        if meta.pull:
            values = [self.weights.get(key, 0.0) for key in keys]
            return server.response(meta, kv.KVPairs((), torch.tensor(values)))
        for key, gradient in zip(keys, pairs.vals.tolist(), strict=True):
            self.weights[key] = self.weights.get(key, 0.0) - self.rate * gradient
        self.num_pushes += 1
        return server.response(meta)


def gradient(worker: int, number: int) -> torch.Tensor:
    """Return whole numbers, so that sums do not depend on their order."""
    return (KEYS.view(torch.int64) % 97 + 10 * number - 7 * worker).float()


def work(node: kv.KVNode) -> None:
    worker, commands = kv.KVWorker(node), kv.SimpleApp(node, APP)
    for number, rate in enumerate(RATES):
        if node.number == 0:
            commands.wait(commands.request(RATE, str(rate), kv.SERVER_GROUP))
        node.barrier(kv.WORKER_GROUP)  # all servers have the rate
        worker.wait(worker.push(KEYS, gradient(node.number, number)))
        node.barrier(kv.WORKER_GROUP)  # all pushes with this rate are executed
    commands.set_response_handle(lambda data, _: print(f"node {data.sender}: {data.body}"))
    commands.wait(commands.request(STATUS, "", kv.SERVER_GROUP))
    worker.wait(worker.pull(KEYS, weights := torch.empty(0)))
    alone = torch.zeros(len(KEYS))
    for number, rate in enumerate(RATES):
        alone -= rate * sum(gradient(w, number) for w in range(node.num_workers))
    assert torch.equal(weights, alone)
    print("weights equal one process bit by bit")


def main() -> None:
    with kv.join(braid.init(), int(os.environ["BRAID_SERVERS"])) as node:
        if node.is_server:
            weights = Weights()
            kv.SimpleApp(node, APP).set_request_handle(weights.command)
            kv.KVServer(node).set_request_handle(weights)
        elif node.is_worker:
            work(node)


if __name__ == "__main__":
    main()
