"""The demonstration proves what it says, and fails when the proof does."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from braid.checkpoint import Comparison
from braid.demo import show as room

pytestmark = [pytest.mark.procs, pytest.mark.launcher]
STEPS = 6


def demonstrate(
    log_dir: str, num_ranks: int = 2, *, steps: int = STEPS, chaos: bool = False
) -> tuple[int, str]:
    out = io.StringIO()
    code = room.show(
        Console(file=out, width=300),
        num_ranks=num_ranks,
        log_dir=log_dir,
        steps=steps,
        chaos=chaos,
    )
    return code, out.getvalue()


def test_a_rank_that_is_killed_is_named_and_the_resumed_training_ends_with_the_same_weights(
    tmp_path,
):
    code, text = demonstrate(str(tmp_path / "demo"), steps=300, chaos=True)
    assert code == 0, text
    assert re.search(r"rank 1 was killed \(SIGKILL\) after step \d+", text)
    assert re.search(r"\| cause +rank 1 \(pid \d+\): killed by signal 9", text)
    assert re.search(r"resumed from step [1-9]\d* .* weights equal to 1: yes", text)


def test_the_demonstration_proves_that_parallel_is_equal(tmp_path):
    code, text = demonstrate(str(tmp_path / "demo"))
    assert code == 0, text
    assert text.startswith("braid ")
    losses = re.findall(r"^  \d \w+ +[^\n]* loss ([\d.]+ -> [\d.]+) +[\d.]+ s", text, re.MULTILINE)
    assert len(losses) == 2
    assert losses[0] == losses[1]
    assert "weights equal to 1: yes (max diff 0)" in text
    assert [len(row) for row in re.findall(r"rank \d +([#=.]+) ", text)] == [room.BAR_WIDTH] * 2
    assert f"braid report {tmp_path}/demo/parallel" in text


def test_a_proof_that_fails_is_said_and_is_the_exit_code(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "compare", lambda *_: Comparison(60, ("model/norm.weight",), 1e-7))
    code, text = demonstrate(str(tmp_path / "demo"), num_ranks=1)
    assert code == 1
    assert "weights equal to 1: NO (max diff 1e-07)" in text
    assert "1 of 60 differ, first model/norm.weight" in text


def test_a_stage_that_fails_shows_the_error_block(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "LR", 1e30)
    code, text = demonstrate(str(tmp_path / "demo"), num_ranks=1)
    assert code == 1
    assert "  cause    rank 0 (pid " in text
    assert "TrainingDivergedError: expected a finite" in text
    assert "equal to 1" not in text
