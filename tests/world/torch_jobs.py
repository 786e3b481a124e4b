"""Ranks of torch.distributed on the processes of a pool: what the tests of the backend run."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import braid.comm.torch_backend  # noqa: F401 - registers the backend, also where braid is not installed anew
from braid.comm import Group
from support.pool import ProcessPool

NUM_RUNS = iter(range(1_000_000))


@contextlib.contextmanager
def process_group(
    backend: str, rank: int, size: int, path: str, timeout_s: float = 60.0
) -> Iterator[None]:
    """torch's default process group, for as long as the block runs."""
    dist.init_process_group(
        backend,
        init_method=f"file://{path}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _main(group: Group, backend: str, path: str, main: Callable[..., Any], args: Any) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates its own names from release to release
        with process_group(backend, group.rank, group.size, path):
            return main(*args)


def run(
    pool: ProcessPool,
    tmp_path: Path,
    size: int,
    main: Callable[..., Any],
    *args: Any,
    backend: str = "braid",
) -> list[Any]:
    """Call `main(*args)` on `size` ranks of torch.distributed; their results in the order of ranks."""
    path = str(tmp_path / f"store-{next(NUM_RUNS)}")
    return pool.run(size, _main, backend, path, main, args)


def both(
    pool: ProcessPool, tmp_path: Path, size: int, main: Callable[..., Any], *args: Any
) -> tuple[list[Any], list[Any]]:
    """The results over braid, and over Gloo."""
    ours = run(pool, tmp_path, size, main, *args)
    return ours, run(pool, tmp_path, size, main, *args, backend="gloo")
