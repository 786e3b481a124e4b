"""A bound for each test: what is stuck fails alone, with the stacks of all threads, and the run goes on.

The bound is an alarm in the main thread, which ends every wait of Python. A test that is stuck outside of Python is ended
by a watchdog, with its process; on several workers only that worker is lost, and replaced. The watchdog is a thread, so it
is set anew once a minute, and not for each test as pytest's `faulthandler_timeout` is: that takes longer than most tests.

`SECTION_ENDS_S` of the environment is the Unix time at which tests/gpu/kit.sh ends the whole run: a bound is earlier.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType

import pytest

LIMIT_S = 240.0  # more than pools and launchers' tests wait for their processes: those know more of what is wrong
PROOF_LIMIT_S = 900.0
REPORT_S = 5.0  # to report a stuck test before the run is ended
WATCHDOG_S, AGAIN_S = 1060.0, 60.0  # after that it ends the process; when it is set anew
_watchdog = {"fd": -1, "set_s": -math.inf}


def remaining_s(limit_s: float) -> float:
    """Return `limit_s`, or the seconds until a stuck test must be reported if they are fewer."""
    ends_s = float(os.environ.get("SECTION_ENDS_S", "inf"))
    return max(1.0, min(limit_s, ends_s - REPORT_S - time.time()))


def pytest_configure(config: pytest.Config) -> None:
    if not float(config.getini("faulthandler_timeout") or 0):
        _watchdog["fd"] = os.dup(2)  # before tests' output is captured


def pytest_unconfigure() -> None:
    if _watchdog["fd"] >= 0:
        faulthandler.cancel_dump_traceback_later()
        os.close(_watchdog["fd"])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    now_s = time.monotonic()
    if _watchdog["fd"] >= 0 and now_s - _watchdog["set_s"] > AGAIN_S:
        faulthandler.dump_traceback_later(WATCHDOG_S, exit=True, file=_watchdog["fd"])
        _watchdog["set_s"] = now_s
    yield from _bounded(item, "set-up")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield from _bounded(item, "test")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield from _bounded(item, "tear-down")


def _bounded(item: pytest.Item, phase: str) -> Iterator[None]:
    limit_s = remaining_s(PROOF_LIMIT_S if item.get_closest_marker("proof") else LIMIT_S)

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
