"""Fixtures: worlds of ranks on threads or processes, and the check that nothing is left behind.

`bounds` ends a test that is stuck; `costs` prints at the end what the run has cost, and what it may; `tiers` decides which
tests run in `make test` and which in `make test-all` only.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from support.leaks import Belongings, ImportFreezer, no_leaks
from support.pool import ProcessPool
from support.signals import default_signals
from support.worlds import run_threads
from tiers import mark_tiers

pytest_plugins = ("bounds", "costs")
STARTUP = str(Path(__file__).parent / "support" / "startup")
# programs that tests start import `support` and `benchmarks`, too
_PATHS = [
    *map(str, Path(__file__).parents[:2]),
    *os.environ.get("PYTHONPATH", "").split(os.pathsep),
]
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in dict.fromkeys(_PATHS) if path)
hypothesis.settings.register_profile(
    "fast",
    max_examples=25,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.register_profile(
    "proof", hypothesis.settings.get_profile("fast"), max_examples=500, derandomize=False
)
hypothesis.settings.load_profile("fast")  # unless --hypothesis-profile names another

World = Callable[..., list[Any]]
WORLDS = {
    "threads": {},
    "procs": {},
    "portable": {"portable": True},
    "hosts": {"ranks_per_host": 2},
}
FREEZE_IMPORTS = ImportFreezer()
# torch.export crashes the interpreter on other threads than the main one
EXPORT_NEEDS_A_PROCESS = torch.__version__.startswith("2.10.")
# tests that start launchers or namespaces, by the beginning of their path below tests/: two of the
# first kind do not run at the same time, those of one file of the second kind run on one worker
MACHINE_WIDE = (
    "netns/",
    "world/test_bench.py",
    "world/test_bench_ps.py",
    "world/test_horovod_run.py",
    "world/test_launch",
    "world/test_portable.py::test_launched",
    "world/test_torch_backend_faults.py",
)
LAUNCHING = (
    "gpu/test_gpu_cores.py",
    "gpu/test_gpu_elastic.py",
    "gpu/test_gpu_launch.py",
    "gpu/test_gpu_train.py",
    "world/test_chaos_runs.py",
    "world/test_command_line.py",
    "world/test_conversion_trains.py",
    "world/test_demo.py",
    "world/test_elastic_faults.py",
    "world/test_elastic_launchers.py",
    "world/test_elastic_runs.py",
    "world/test_fork_server.py",
    "world/test_horovod_elastic_runs.py",
    "world/test_hostfile_slots.py",
    "world/test_leave_horovod.py",
    "world/test_membership.py",
    "world/test_observe.py",
    "world/test_probe.py",
    "world/test_proving.py",
    "world/test_ps.py::test_the_example",
    "world/test_ps_jobs.py",
    "world/test_ps_launched.py",
    "world/test_ps_hang.py",
    "world/test_ps_stopped.py",
    "world/test_pslite_programs.py",
    "world/test_bench_messages.py",
    "world/test_bench_plan.py",
    "world/test_plan_here.py",
    "world/test_bench_rpc.py",
    "world/test_rl.py::test_a_killed_actor",
    "world/test_rl.py::test_a_new_process_plays",
    "world/test_rl.py::test_actors_solve",
    "world/test_rl.py::test_the_league",
    "world/test_rl.py::test_two_learners",
    "world/test_rpc.py::test_a_batched_parameter_server",
    "world/test_rpc.py::test_a_language_model",
    "world/test_rpc.py::test_the_example",
    "world/test_rpc_launched.py",
    "world/test_readme_and_examples.py",
    "world/test_resume.py::test_a_run_that",
    "world/test_store_torch.py",
    "world/test_strategies_workers.py::test_one_line",
    "world/test_torch_backend_life.py",
    "world/test_torch_rpc.py::test_a_program",
    "world/test_train.py",
    "world/test_train_elastic.py",
    "world/test_train_on_servers.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--world",
        choices=tuple(WORLDS),
        default="threads",
        help="run ranks as threads of this process (default), as processes of a reused pool, or as such processes that "
        "share no memory, or of which only every two do, as if they were on several hosts",
    )
    parser.addoption(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the tests of tests/gpu compute: on the CPU with small sizes (default), or on the GPU that all ranks "
        "share",
    )


def pytest_configure(config: pytest.Config) -> None:
    default_signals()
    paths = os.environ["PYTHONPATH"].split(os.pathsep)
    if config.getoption("--hypothesis-profile") != "proof" and STARTUP not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([STARTUP, *paths])


def _scope(nodeid: str) -> str:
    """Tests of one scope run on one worker, in their order."""
    path = nodeid.removeprefix("tests/")
    if path.startswith(MACHINE_WIDE):
        return "machine"
    return path.partition("::")[0] if path.startswith(LAUNCHING) else nodeid


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `make test-all`; put tests that start launchers or hosts first, which take longest."""
    scopes = {item: _scope(item.nodeid) for item in items}
    mark_tiers(items, {item: scope != item.nodeid for item, scope in scopes.items()})
    strays = [
        item.nodeid
        for item in items
        if item.get_closest_marker("launcher") and scopes[item] == item.nodeid
    ]
    if strays:
        msg = f"MACHINE_WIDE and LAUNCHING in tests/conftest.py lack tests that start launchers: {strays}"
        raise pytest.UsageError(msg)
    items.sort(key=lambda item: (scopes[item] != "machine", scopes[item] == item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Divide tests among workers by `_scope`."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope = _scope(nodeid)
            return nodeid.partition("[")[0] if scope == nodeid else scope

    return Scheduling(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    FREEZE_IMPORTS()


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """What braid logs in this process during a test."""
    logger, logged = logging.getLogger("braid"), []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield logged
    logger.removeHandler(handler)


@pytest.fixture(scope="session", autouse=True)
def _one_thread_per_rank() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[ProcessPool]:
    """The processes of this session, whatever ranks are to share."""
    with ProcessPool(**WORLDS[request.config.getoption("--world")]) as processes:
        yield processes


@pytest.fixture
def procs(pool: ProcessPool) -> World:
    """`procs(size, main, *args)`: ranks as processes."""
    return pool.run


@pytest.fixture
def portable(pool: ProcessPool) -> World:
    """`portable(size, main, *args)`: ranks as processes that share no memory."""
    return partial(pool.run, portable=True, ranks_per_host=0)


@pytest.fixture
def hosts(pool: ProcessPool) -> World:
    """`hosts(size, main, *args)`: ranks as processes, of which every two take themselves for a host of their own."""
    return partial(pool.run, portable=False, ranks_per_host=2)


def _needs_a_process(request: pytest.FixtureRequest) -> bool:
    return EXPORT_NEEDS_A_PROCESS and "insertion" in request.path.name


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    """`world(size, main, *args)`: ranks as threads, or as processes with --world=procs, portable or hosts."""
    if _needs_a_process(request) or request.config.getoption("--world") != "threads":
        return request.getfixturevalue("procs")
    return run_threads


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test of ranks that leaves something behind, in this process or in those of the pool."""
    if "world" not in str(request.path.parent.name):
        yield
        return
    on_pool = "pool" in request.fixturenames or (
        "world" in request.fixturenames
        and (_needs_a_process(request) or request.config.getoption("--world") != "threads")
    )
    processes: ProcessPool | None = request.getfixturevalue("pool") if on_pool else None
    with no_leaks(processes.belongings if processes else Belongings):
        yield
        problems = processes.left_behind() if processes else []
    FREEZE_IMPORTS()
    if problems and not request.node.get_closest_marker("held_by_torch"):
        pytest.fail("The test left something behind in " + "\n".join(problems), pytrace=False)
