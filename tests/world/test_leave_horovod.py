"""The example of the guide: a script of Horovod's, one line of which is changed, started in both ways."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.launcher]

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "leave_horovod"


def _lines(name: str) -> list[str]:
    return (EXAMPLE / name).read_text().splitlines()


def test_one_line_is_changed_and_the_guide_shows_it():
    diff = list(difflib.unified_diff(_lines("before.py"), _lines("after.py"), n=0))[3:]
    assert diff == ["-import horovod.torch as hvd", "+import braid.compat.horovod.torch as hvd"]
    assert "\n".join(diff) in (ROOT / "docs" / "from-horovod.md").read_text()


def _epochs(command: list[str], folder: Path) -> list[tuple[float, float]]:
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"loss ([\d.]+), ([\d.]+)% of unseen", done.stdout)
    return [(float(loss), float(right)) for loss, right in found]


def test_both_ways_of_starting_it_train_the_same(tmp_path):
    script = str(EXAMPLE / "after.py")
    by_braid = _epochs(["braid", "run", "-n", "2", script], tmp_path / "braid")
    start = [
        "braid.compat.horovod.run",
        "-np",
        "2",
        sys.executable,
        script,
    ]  # `python` may be another one
    by_horovodrun = _epochs(start, tmp_path / "horovodrun")
    assert by_braid == by_horovodrun
    assert len(by_braid) == 5
    assert by_braid[-1][1] > 80
