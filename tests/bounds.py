"""A bound for each test: what is stuck fails alone, with the stacks of all threads, and the run goes on.

The bound is an alarm in the main thread, which ends every wait of Python. A test that is stuck outside of Python is ended
by pytest's `faulthandler_timeout`, with its process; on several workers only that worker is lost, and replaced.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
from collections.abc import Iterator
from types import FrameType

import pytest

LIMIT_S = 240.0  # more than pools and launchers' tests wait for their processes: those know more of what is wrong
PROOF_LIMIT_S = 900.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    yield from _bounded(item, "set-up")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield from _bounded(item, "test")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield from _bounded(item, "tear-down")


def _bounded(item: pytest.Item, phase: str) -> Iterator[None]:
    limit_s = PROOF_LIMIT_S if item.get_closest_marker("proof") else LIMIT_S

    def ring(number: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
        msg = f"The {phase} did not end within {limit_s:g} s. Stacks of all threads are in stderr."
        raise TimeoutError(msg)

    usual = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, usual)
