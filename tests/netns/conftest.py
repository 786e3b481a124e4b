"""Several hosts on one machine: network namespaces, each with an eth0 on a common bridge."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from netlab import Lab


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests here, and skip them where namespaces cannot be made."""
    reason = _missing()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.netns)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def _missing() -> str:
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if shutil.which("ip") is None:
        return "needs the command ip (iproute2)"
    probe = f"bx{os.getpid()}"
    made = subprocess.run(
        ["ip", "netns", "add", probe], capture_output=True, text=True, check=False
    )
    if made.returncode:
        return f"cannot make network namespaces: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return ""


@pytest.fixture
def lab() -> Iterator[Callable[[int], Lab]]:
    """`lab(3)`: hosts a, b and c."""
    with ExitStack() as undo:
        yield lambda size: Lab(size, undo)
