"""Fixtures of several unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def mirrored() -> Iterator[object]:
    """A strategy with two replicas on the CPU."""
    from braid.strategies import MirroredStrategy

    strategy = MirroredStrategy(["cpu", "cpu"])
    yield strategy
    strategy.close()
