"""An elastic run takes hosts and slots that are added to its file of hosts, and gives back those that are removed."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from braid.cli import main
from braid.launch.cluster.listed_slots import ListedSlots, read_hostfile
from braid.runtime.clock import VirtualClock

JOB = str(Path(__file__).with_name("hostfile_job.py"))


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text("a slots=2\nb slots=2\n")
    return path


def _slots(hostfile: Path, num_ranks: int, max_ranks: int, clock: VirtualClock) -> ListedSlots:
    read = partial(read_hostfile, str(hostfile))
    return ListedSlots(read, read(), num_ranks, max_ranks, clock)


def test_slots_follow_the_file_up_to_the_largest_number(hostfile):
    clock = VirtualClock()
    slots = _slots(hostfile, 2, 5, clock)
    assert slots.hosts == {"a": 2}
    assert slots.poll() == (False, ""), "a second has not passed"

    def later() -> tuple[bool, str]:
        clock.sleep(1.0)
        return slots.poll()

    assert later() == (True, "")
    assert slots.hosts == {"a": 2, "b": 2}
    hostfile.write_text("c slots=4\na slots=2\nb slots=2\n")
    assert later() == (True, "")
    assert slots.hosts == {"a": 2, "b": 2, "c": 1}, "ranks stay where they are"
    hostfile.write_text("a slots=1\n")
    assert later() == (True, "")
    assert slots.hosts == {"a": 1}


def test_a_lost_host_has_no_slots_until_the_file_changes(hostfile):
    clock = VirtualClock()
    slots = _slots(hostfile, 4, 4, clock)
    slots.lost("a")
    assert slots.poll() == (False, ""), "a rank has died on the host"
    slots.lost("a", is_gone=True)
    assert slots.poll() == (True, "")
    assert slots.hosts == {"b": 2}
    clock.sleep(1.0)
    assert slots.poll() == (False, "")
    hostfile.write_text("a slots=1\nb slots=2\n")
    clock.sleep(1.0)
    assert slots.poll() == (True, "")
    assert slots.hosts == {"b": 2, "a": 1}


def test_a_file_that_cannot_be_read_changes_nothing_and_is_named_once(hostfile):
    clock = VirtualClock()
    slots = _slots(hostfile, 4, 4, clock)
    hostfile.unlink()
    clock.sleep(1.0)
    has_changed, notice = slots.poll()
    assert not has_changed
    assert notice.endswith("cannot be read: No such file or directory; the slots stay as they were")
    clock.sleep(1.0)
    assert slots.poll() == (False, "")
    hostfile.write_text("a slots=none\n")
    clock.sleep(1.0)
    assert "slots of a must be a number from 1 to 9999, got 'none'" in slots.poll()[1]
    assert slots.hosts == {"a": 2, "b": 2}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("-n 2 --max-ranks 3", "--max-ranks 3 is more than -n 2, and no further hosts"),
        ("--max-ranks 3 -H a:2", "-n 3 does not match a:2"),
        ("-n 3 --max-ranks 2", "must be 1 (--min-ranks) to 2 (--max-ranks), got 3"),
    ],
)
def test_a_run_that_cannot_gain_ranks_is_refused(options, problem, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert main(["run", *options.split(), "--min-ranks", "1", "train.py"]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.procs
@pytest.mark.launcher
@pytest.mark.parametrize("mesh", [pytest.param("", marks=pytest.mark.proof), "pp=2; dp=3; dp=1"])
def test_ranks_join_and_leave_with_the_slots_of_the_file(tmp_path, mesh):
    (tmp_path / "hosts").write_text("a slots=1\n")
    grown = ("--hostfile", "hosts", "--max-ranks", "3", "--spares", "1", "--threads", "1")
    grown += ("--rsh", "env FAKE_HOST={host}", "--env", "PYTHONPATH")

    def run(options: tuple[str, ...], *changes: str) -> tuple[set[str], str]:
        words = ("run", *options, "--min-ranks", "1", JOB, "hosts", mesh, *changes)
        command = [sys.executable, "-m", "braid", *words]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return set(re.findall(r"(\d \d+ [0-9a-f]+)$", done.stdout, re.MULTILINE)), done.stderr

    ends, text = run(grown, "3:a slots=2\nb slots=1\nc slots=4", "2:b slots=1\na slots=1")
    (alone,), _ = run(("-n", "1"))
    assert ends == {alone.replace("1", "2", 1)}
    assert "braid: host b has joined the run" in text
    assert "host c" not in text, "three slots are enough"
    sizes = [len(ranks.split(",")) for ranks in re.findall(r"epoch \d+: ranks ([\d, ]+) go", text)]
    assert max(sizes) == 3
