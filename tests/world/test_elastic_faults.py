"""Faults of real processes at all points of an elastic training lose no step and no bit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_starts import marked, nothing_left

from elastic_faults import MOST_SPARED, NUM_RANKS, NUM_SEEDS, plan, struck_in

pytestmark = [pytest.mark.procs, pytest.mark.launcher]
JOB = str(Path(__file__).with_name("elastic_job.py"))
LIMIT_S = 120.0
IN_ALL = (5,)


@pytest.fixture(autouse=True)
def _nothing_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[None]:
    """Check that nothing is left of the processes, their memory and their checkpoints."""
    monkeypatch.chdir(tmp_path)
    with nothing_left(request.node.nodeid):
        yield
        _wait_for_ranks(request.node.nodeid)
    pids = {str(event["pid"]) for event in _events("run*", "started")}
    left = [path for path in Path("/dev/shm").iterdir() if pids.intersection(path.name.split("_"))]
    assert [*left, *Path("saves").glob(".*")] == []


def _wait_for_ranks(mark: str) -> None:
    """Wait for ranks without a launcher, which save."""
    deadline_s = time.monotonic() + LIMIT_S
    while marked(mark) and time.monotonic() < deadline_s:
        time.sleep(0.05)


def _events(runs: str, *kinds: str) -> list[dict[str, int]]:
    files = Path().glob(f"{runs}/events/launcher.jsonl")
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [event for event in map(json.loads, lines) if event["kind"] in kinds]


def _train(log_dir: str, num_ranks: int, min_ranks: int) -> tuple[int, set[str], str]:
    """Return the exit code, the last lines of the ranks, and all output of a run."""
    words = f"run -n {num_ranks} --min-ranks {min_ranks} --restarts 20 --threads 1"
    words += f" --timeout {LIMIT_S / 2} --log-dir {log_dir} {JOB}"
    done = subprocess.run(
        [sys.executable, "-m", "braid", *words.split()],
        capture_output=True,
        text=True,
        env={**os.environ, "PASSES": "3"},
        check=False,
        timeout=LIMIT_S,
    )
    text = done.stdout + done.stderr
    return done.returncode, set(re.findall(r"\b\d+ [0-9a-f]{64}\b", text)), text


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    code, ends, text = _train(str(tmp_path_factory.mktemp("alone") / "run"), 1, 1)
    assert (code, len(ends)) == (0, 1), text
    return ends


@pytest.mark.parametrize(
    "seed",
    [pytest.param(n, marks=[pytest.mark.proof] * (n not in IN_ALL)) for n in range(NUM_SEEDS)],
)
def test_faults_at_any_point_lose_no_step_and_no_bit(undisturbed, monkeypatch, request, seed):
    monkeypatch.setenv("SAVES", "saves")
    monkeypatch.setenv("SAVES_EVERY", str(1 + seed % 3))
    *interrupted, _ = runs = plan(seed)
    for number, faults in enumerate(runs):
        directory = Path(f"faults{number}")
        directory.mkdir()
        (directory / "plan.json").write_text(json.dumps(faults))
        monkeypatch.setenv("FAULTS", str(directory))
        code, ends, text = _train(f"run{number}", NUM_RANKS, 1 + seed % NUM_RANKS)
        strikes = struck_in(directory)
        shown = "\n".join([*map(str, faults), *map(str, strikes), text])
        if number < len(interrupted):
            assert (code, ends) == (-9, set()), shown
            _wait_for_ranks(request.node.nodeid)
            saved = max((int(path.name[5:]) for path in Path("saves").glob("step-*")), default=0)
            assert saved >= max(strike.num_steps for strike in strikes), shown
        else:
            assert (code, ends) == (0, undisturbed), shown
            lost = {event["rank"] for event in _events(f"run{number}", "lost", "left")}
            assert lost == {strike.rank for strike in strikes}, shown
        spared = {*faults} - {strike.fault for strike in strikes}
        assert len(spared) <= MOST_SPARED, shown
        assert not any(fault.is_in_step for fault in spared), shown
