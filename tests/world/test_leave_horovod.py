"""The example of the guide: a script of Horovod's, one line of which is changed, started in both ways."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from program_jobs import run_program

pytestmark = pytest.mark.procs

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "leave_horovod"


def _lines(name: str) -> list[str]:
    return (EXAMPLE / name).read_text().splitlines()


def test_one_line_is_changed_and_the_guide_shows_it():
    diff = list(difflib.unified_diff(_lines("before.py"), _lines("after.py"), n=0))[3:]
    assert diff == ["-import horovod.torch as hvd", "+import braid.compat.horovod.torch as hvd"]
    assert "\n".join(diff) in (ROOT / "docs" / "from-horovod.md").read_text()


def _epochs(printed: str) -> list[tuple[float, float]]:
    found = re.findall(r"loss ([\d.]+), ([\d.]+)% of unseen", printed)
    return [(float(loss), float(right)) for loss, right in found]


@pytest.mark.launcher
def test_both_ways_of_starting_it_train_the_same(procs, tmp_path):
    script = EXAMPLE / "after.py"
    by_braid = _epochs("".join(run_program(procs, 2, script)))
    words = [sys.executable, str(script)]  # `python` may be another one
    done = subprocess.run(
        [sys.executable, "-m", "braid.compat.horovod.run", "-np", "2", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert by_braid == _epochs(done.stdout)
    assert len(by_braid) == 5
    assert by_braid[-1][1] > 80
