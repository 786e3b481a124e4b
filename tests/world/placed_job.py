"""A master that trains over two worker processes, kills one in a step, restarts it, and goes on.

Started as `placed_job.py STORE` by a test; starts itself as `placed_job.py STORE RANK` for workers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import torch
from torch import nn
from torch.nn import functional

from braid import rpc
from braid.errors import PeerLostError, StaleError
from braid.strategies import placed

TARGET = torch.tensor([0, 1, 2, 3, 0, 1])
BEGUN = "middle has begun"


class Middle(nn.Linear):
    def forward(self, x):
        if x.abs().max() < 1e-6:
            print(BEGUN, flush=True)
            threading.Event().wait(60)
        return super().forward(x)


def make() -> tuple[nn.Module, torch.Tensor]:
    """Return a model, and an example."""
    return nn.Sequential(nn.Linear(8, 8), Middle(8, 8), nn.Linear(8, 4)), torch.randn(6, 8)


def pid() -> int:
    """Return the process of a task."""
    return os.getpid()


def join(store: str, rank: int) -> None:
    """Make this process a task."""
    options = rpc.RpcOptions(init_method=f"file://{store}", rpc_timeout=60)
    rpc.init_rpc(f"worker:{rank}", rank=rank, rpc_backend_options=options)


def start(store: str, rank: int) -> subprocess.Popen[str]:
    """Start a worker."""
    command = [sys.executable, __file__, store, str(rank)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def serve(store: str, rank: int) -> None:
    """Serve until the master ends this process."""
    join(store, rank)
    print("ready", flush=True)
    threading.Event().wait(120)


def kill_in_step(worker: subprocess.Popen[str]) -> None:
    """Kill a worker when its layer runs."""
    assert worker.stdout is not None
    for line in worker.stdout:
        if BEGUN in line:
            worker.kill()


def main(store: str) -> None:
    """Train, lose a worker, restore, train; print what is right."""
    workers = {rank: start(store, rank) for rank in (1, 2)}
    join(store, 0)
    for worker in workers.values():
        assert worker.stdout is not None
        worker.stdout.readline()
    names = [f"worker:{rank}" for rank in range(3)]
    devices = {"0": "/task:0", "1": "/task:1", "2": "/task:2"}
    x, loss = torch.randn(6, 8), functional.cross_entropy
    program = placed.place(make, devices=devices, nodes=names)
    program.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    alone = make()[0]
    alone.load_state_dict(program.state_dict())
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)

    def is_equal() -> bool:
        value = loss(alone(x), TARGET)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return torch.equal(value.detach(), program.step(x, TARGET, loss=loss))

    print("equal before:", all(is_equal() for _ in range(3)))
    state, states = program.state_dict(), program.optimizer_state()
    print("pids differ:", rpc.rpc_sync("worker:1", pid) != os.getpid())
    killer = threading.Thread(target=kill_in_step, args=(workers[1],))
    killer.start()
    try:
        # zeros in and a bias of zero make the middle layer wait
        silent = {**state, "0.bias": torch.zeros(8)}
        program.load_state_dict(silent)
        program.step(x * 0, TARGET, loss=loss)
    except PeerLostError as exc:
        print("lost:", str(exc).splitlines()[0])
    killer.join()
    workers[1].wait()
    workers[1] = start(store, 1)
    assert workers[1].stdout is not None
    workers[1].stdout.readline()
    try:
        program.step(x, TARGET, loss=loss)
    except (StaleError, PeerLostError) as exc:
        print("stale:", type(exc).__name__, "placed.restore(state)" in str(exc))
    program.restore(state, states)
    print("equal after:", all(is_equal() for _ in range(3)))
    print("pending:", program.num_pending)
    program.close()
    for worker in workers.values():
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    rpc.shutdown(graceful=False)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        serve(sys.argv[1], int(sys.argv[2]))
    else:
        main(sys.argv[1])
