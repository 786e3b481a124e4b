"""Remote calls: results, errors, deadlines, and the time of a round trip.

braid run -n 2 examples/38_a_call.py
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch

from braid import rpc
from braid.errors import CommTimeout

NAMES = ("caller", "callee")


def scaled(x: torch.Tensor, *, by: float = 1.0) -> torch.Tensor:
    return by * x / x.norm()


def nested(x: torch.Tensor) -> torch.Tensor:
    """Call back the caller while it waits for this call; runs in the callee."""
    return rpc.rpc_sync("caller", torch.neg, (scaled(x),))


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def slow() -> None:
    time.sleep(0.3)


def median_us(act: Callable[[], object], times: int) -> float:
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began)
    return 1e6 * statistics.median(seconds)


def first_line(act: Callable[[], object]) -> str:
    try:
        act()
    except (RuntimeError, CommTimeout) as exc:
        lines = str(exc).splitlines()
        return f"{type(exc).__name__}: {' / '.join(lines[:2])}"
    raise AssertionError("no error was raised")


def call() -> None:
    x = torch.arange(1.0, 5.0)
    assert torch.equal(rpc.rpc_sync("callee", scaled, (x,), {"by": 2.0}), scaled(x, by=2.0))
    assert torch.equal(rpc.rpc_sync("callee", nested, (x,)), -scaled(x))
    futures = [rpc.rpc_async("callee", scaled, (x + n,)) for n in range(20)]  # run concurrently
    assert all(torch.equal(future.wait(), scaled(x + n)) for n, future in enumerate(futures))
    print(first_line(lambda: rpc.rpc_sync("callee", torch.dot, (x, x[:2]))))
    print(first_line(lambda: rpc.rpc_sync("callee", os.getenv, ("HOME",))))
    late = first_line(lambda: rpc.rpc_sync("callee", slow, timeout=0.1))
    print(late)
    assert CommTimeout.__name__ in late
    for name, numel, times in (("8 bytes", 2, 300), ("1 MiB", 1 << 18, 30), ("16 MiB", 1 << 22, 5)):
        sent = torch.ones(numel)
        took_us = median_us(lambda sent=sent: rpc.rpc_sync("callee", same, (sent,)), times)
        print(f"{name} there and back: {took_us:,.0f} us")
    print("results equal local calls bit by bit")


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc(NAMES[rank])
    if rank == 0:
        call()
    rpc.shutdown()
