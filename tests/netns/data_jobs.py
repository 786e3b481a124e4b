"""Programs that communicate over several hosts; `python data_jobs.py NAME ARGS...` runs the function NAME."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import distributed as dist

import braid


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def everything() -> None:
    """Where ranks are, and what they sum: exactly, in 16 bits, by a program of the catalogue, through torch."""
    group = braid.init()
    x = torch.arange(200_000.0) * (group.rank + 1)
    expected = torch.arange(200_000.0) * sum(range(1, group.size + 1))
    exact = torch.equal(group.all_reduce(x.clone()), expected)
    ring = torch.equal(group.all_reduce(x.clone(), algorithm="ring"), expected)
    close = torch.allclose(group.all_reduce(x.clone(), wire="bf16"), expected, rtol=2**-7)
    dist.init_process_group("braid")
    y = x.clone()
    dist.all_reduce(y)
    dist.destroy_process_group()
    say(f"{group.engine.transport.hosts} {exact} {ring} {close} {torch.equal(y, expected)}")


def codes() -> None:
    """Whether frames to ranks of other hosts carry codes."""
    group = braid.init()
    links = group.engine.transport._links.by_rank
    here = [link._connection.has_codes for link in links.values()]
    say(f"{here} {group.all_reduce(torch.ones(1_000_000)).sum().item():.0f}")


def losing(directory: str) -> None:
    """Reduce until the network is gone."""
    group = braid.init()
    (Path(directory) / f"here-{group.rank}").touch()
    try:
        while True:
            group.all_reduce(torch.ones(1_000_000))
    except braid.PeerLostError as error:
        say(f"lost {'cannot be reached any more' in str(error)}")


def alone() -> None:
    """Join, and say why that was not possible."""
    try:
        braid.init(timeout_s=20.0)
    except braid.BraidError as error:
        say(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
