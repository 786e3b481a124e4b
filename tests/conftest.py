"""Fixtures: worlds of ranks on threads or processes, and the check that nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from braid.testing.leaks import no_leaks
from braid.testing.pool import ProcessPool
from braid.testing.worlds import run_threads

World = Callable[..., list[Any]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--world",
        choices=("threads", "procs", "portable", "hosts"),
        default="threads",
        help="run ranks as threads of this process (default), as processes of a reused pool, or as such processes that "
        "share no memory, or of which only every two do, as if they were on several hosts",
    )


@pytest.fixture(scope="session", autouse=True)
def _one_thread_per_rank() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[ProcessPool]:
    world = request.config.getoption("--world")
    with ProcessPool(
        portable=world == "portable", ranks_per_host=2 if world == "hosts" else 0
    ) as processes:
        yield processes


@pytest.fixture
def procs(pool: ProcessPool) -> World:
    """`procs(size, main, *args)`: ranks as processes."""
    return pool.run


@pytest.fixture(scope="session")
def portable_pool() -> Iterator[ProcessPool]:
    with ProcessPool(portable=True) as processes:
        yield processes


@pytest.fixture
def portable(portable_pool: ProcessPool) -> World:
    """`portable(size, main, *args)`: ranks as processes that share no memory."""
    return portable_pool.run


@pytest.fixture(scope="session")
def hosts_pool() -> Iterator[ProcessPool]:
    with ProcessPool(ranks_per_host=2) as processes:
        yield processes


@pytest.fixture
def hosts(hosts_pool: ProcessPool) -> World:
    """`hosts(size, main, *args)`: ranks as processes, of which every two take themselves for a host of their own."""
    return hosts_pool.run


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    """`world(size, main, *args)`: ranks as threads, or as processes with --world=procs, portable or hosts."""
    if request.config.getoption("--world") != "threads":
        return request.getfixturevalue("procs")
    return run_threads


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    names = set(request.fixturenames)
    if "world" not in str(request.path.parent.name):
        yield
        return
    processes: ProcessPool | None = None
    of_pools = names & {"pool", "procs", "portable_pool", "hosts_pool"}
    if of_pools or request.config.getoption("--world") != "threads":
        processes = request.getfixturevalue("pool")
        yield  # a pool's children and pipes outlive the test; they are checked when it closes
        return
    with no_leaks(processes.pids if processes else frozenset()):
        yield
