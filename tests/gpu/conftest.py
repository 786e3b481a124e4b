"""Fixtures of the tests that compute on `--device`: the device, and figures for docs/gpu.md."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bounds import remaining_s
from support.pool import ProcessPool

Figures = Callable[..., None]
RANKS_S = 60.0  # for the ranks of a test; fewer when the section ends earlier
STACKS_S = 4.0  # to collect the stacks of ranks that hang


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure when its test ends: a later test may hang until the kit ends the section."""
    if "SECTION_ENDS_S" in os.environ and report.failed:
        heading = f"FAILED {report.nodeid} ({report.when}) after {report.duration:.1f} s"
        print(f"\n{heading}\n{report.longreprtext}\n", flush=True)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The device that all ranks share, "cpu" or "cuda"."""
    name: str = request.config.getoption("--device")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.fail("--device cuda: torch sees no GPU here", pytrace=False)
    return name


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPool]:
    """Processes that share the device."""
    with ProcessPool() as processes:
        yield processes


@pytest.fixture
def procs(pool: ProcessPool) -> Callable[..., list[Any]]:
    """`procs(size, main, *args)`: ranks as processes; those that hang are ended in time."""

    def run(size: int, main: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        limit_s = remaining_s(RANKS_S + STACKS_S) - STACKS_S
        return pool.run(size, main, *args, **{"timeout_s": max(1.0, limit_s), **options})

    return run


@pytest.fixture
def figures(request: pytest.FixtureRequest, device: str) -> Figures:
    """`figures(**values)`: shown, and written to $OUT/figures.jsonl with the test and the device."""

    def note(**values: float | str) -> None:
        line = json.dumps({"test": request.node.name, "device": device, **values})
        print(line)
        if out := os.environ.get("OUT"):
            with (Path(out) / "figures.jsonl").open("a") as file:
                file.write(line + "\n")

    return note
