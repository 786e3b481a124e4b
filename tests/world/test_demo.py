"""The demonstration proves what it says, and fails when the proof does."""

from __future__ import annotations

import io
import re
from typing import NamedTuple

import pytest
from rich.console import Console

from braid.checkpoint import CheckpointComparison
from braid.train.demo import show as demo

pytestmark = [pytest.mark.procs, pytest.mark.launcher]
STEPS = 6
CHAOS_STEPS = 150  # enough for a rank to be killed on the way


def demonstrate(
    log_dir: str, num_ranks: int = 2, *, steps: int = STEPS, chaos: bool = False
) -> tuple[int, str]:
    out = io.StringIO()
    code = demo.show(
        Console(file=out, width=300),
        num_ranks=num_ranks,
        log_dir=log_dir,
        steps=steps,
        chaos=chaos,
    )
    return code, out.getvalue()


class Shown(NamedTuple):
    """What a demonstration has printed, where its runs are, and its stages in order."""

    code: int
    text: str
    log_dir: str
    stages: list[demo._DemoStage]


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> Shown:
    """The demonstration without a kill: one run for all claims."""
    log_dir, stages = str(tmp_path_factory.mktemp("demo")), []
    train = demo._train

    def kept(*args, **options):
        stages.append(train(*args, **options))
        return stages[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "_train", kept)
        return Shown(*demonstrate(log_dir), log_dir, stages)


@pytest.mark.proof
def test_a_rank_that_is_killed_is_named_and_the_resumed_training_ends_with_the_same_weights(
    tmp_path,
):
    code, text = demonstrate(str(tmp_path / "demo"), steps=CHAOS_STEPS, chaos=True)
    assert code == 0, text
    assert re.search(r"rank 1 was killed \(SIGKILL\) after step \d+", text)
    assert re.search(r"\| cause +rank 1 \(pid \d+\): killed by signal 9", text)
    assert re.search(r"resumed from step [1-9]\d* .* weights equal to run 1: yes", text)


def test_the_demonstration_proves_that_parallel_is_equal(shown):
    assert shown.code == 0, shown.text
    assert shown.text.startswith("braid ")
    found = r"^  \d \w+ +[^\n]* loss ([\d.]+ -> [\d.]+) +[\d.]+ s"
    losses = re.findall(found, shown.text, re.MULTILINE)
    assert len(losses) >= 2
    assert losses[0] == losses[1]
    idle = re.findall(r"4 pipeline .* idle (\d+)%, by the schedule alone 20%", shown.text)
    assert 0 < int(idle[0]) < 100
    assert "weights equal to run 1: yes (max diff 0)" in shown.text
    bars = [len(row) for row in re.findall(r"rank \d +([#=.]+) ", shown.text)]
    assert bars == [demo.BAR_WIDTH] * 2
    assert f"braid report {shown.log_dir}/parallel" in shown.text


def test_a_proof_that_fails_is_said_and_is_the_exit_code(shown, tmp_path, monkeypatch):
    stages = iter(shown.stages)
    monkeypatch.setattr(demo, "_train", lambda *_, **__: next(stages))
    monkeypatch.setattr(
        demo, "compare", lambda *_: CheckpointComparison(60, ("model/norm.weight",), 1e-7)
    )
    code, text = demonstrate(str(tmp_path / "demo"))
    assert code == 1
    assert "weights equal to run 1: NO (max diff 1e-07)" in text
    assert "1 of 60 differ, first model/norm.weight" in text


def test_a_stage_that_fails_shows_the_error_block(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "LR", 1e30)
    code, text = demonstrate(str(tmp_path / "demo"), num_ranks=1)
    assert code == 1
    assert "  cause    rank 0 (pid " in text
    assert "TrainingDivergedError: loss is" in text
    assert "equal to run 1" not in text
