"""Remote references: which references keep a value alive, and when the owner deletes it.

braid run -n 3 examples/39_references.py
"""

from __future__ import annotations

import os
import time

import torch

from braid import rpc
from braid.rpc.current import current_agent

KEPT: list[rpc.RRef] = []  # handles of the third node


def made(seed: int) -> torch.Tensor:
    return torch.randn(1000, generator=torch.Generator().manual_seed(seed))


def keep(value: rpc.RRef) -> tuple[str, bool]:
    KEPT.append(value)
    return value.owner_name(), value.is_owner()


def add(a: rpc.RRef, b: rpc.RRef) -> torch.Tensor:
    return a.to_here() + b.to_here()


def forget() -> None:
    KEPT.clear()


def forks() -> tuple[int, int]:
    """Return how many values other nodes refer to, and how many references they have."""
    counts = current_agent().references.counts()
    return counts.shared, counts.forks


def show(text: str, expected: tuple[int, int]) -> None:
    """Print the owner's counts as soon as they equal `expected`."""
    until = time.monotonic() + 20
    while (counts := rpc.rpc_sync("owner", forks)) != expected:
        assert time.monotonic() < until, (text, counts)
        time.sleep(0.01)
    print(f"{text}: {counts[0]} value, {counts[1]} references")


def share() -> None:
    value = rpc.remote("owner", made, (0,))
    assert torch.equal(value.to_here(), made(0))
    show("made", (1, 1))
    assert rpc.rpc_sync("third", keep, (value,)) == ("owner", False)
    show("passed on", (1, 2))
    mine = rpc.RRef(made(1))
    total = rpc.rpc_sync("third", add, (value, mine))
    squares = value.rpc_sync().square()  # a method runs in the owner
    del value
    show("let go here", (1, 1))
    rpc.rpc_sync("third", forget)
    show("let go there", (0, 0))
    assert torch.equal(total, made(0) + made(1))
    assert torch.equal(squares, made(0).square())
    wrong = rpc.remote("owner", torch.ones, ([-1],))  # fails on the owner; to_here() raises
    try:
        wrong.to_here()
    except RuntimeError as exc:
        print(str(exc).splitlines()[1])
    print("values equal one process bit by bit")


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc(("first", "owner", "third")[rank])
    if rank == 0:
        share()
    rpc.shutdown()
