"""Fixtures of the tests that compute on `--device`: the device, and figures for docs/gpu.md."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from braid.testing.pool import ProcessPool

Figures = Callable[..., None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)


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
def figures(request: pytest.FixtureRequest, device: str) -> Figures:
    """`figures(**values)`: shown, and written to $OUT/figures.jsonl with the test and the device."""

    def note(**values: float | str) -> None:
        line = json.dumps({"test": request.node.name, "device": device, **values})
        print(line)
        if out := os.environ.get("OUT"):
            with (Path(out) / "figures.jsonl").open("a") as file:
                file.write(line + "\n")

    return note
