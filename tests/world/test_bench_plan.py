"""`python -m benchmarks plan` measures what it says, at its smallest size."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks.plan import BENCH, PlanBench, plan_table, plan_verdicts, steps_table
from benchmarks.workers.plan_plan import Plan
from braid.errors import ConfigError


def test_all_pipelines_train_the_same_micro_batches(tmp_path):
    sizes = Plan(models=("tiny:1",), context=8, batches=1, rounds=2)
    bench = PlanBench(only=("asynchronous",), sizes=sizes, out=tmp_path)
    report = BENCH.measure(bench, console=Console(file=io.StringIO()))
    (row,) = report.asynchronous
    assert row.amount == 4
    assert {way: len(own) for way, own in row.seconds.items()} == {
        "1f1b": 2,
        "stash": 2,
        "vertical_sync": 2,
        "2bw": 2,
    }
    assert plan_table(report).row_count == 4
    assert [verdict.claim[:6] for verdict in plan_verdicts(report)] == ["tiny:1"]
    assert (tmp_path / "plan.json").is_file()


def test_every_split_of_a_training_is_predicted_and_measured(tmp_path):
    sizes = Plan(steps=("tiny:8:8",), rounds=1)
    bench = PlanBench(only=("steps",), sizes=sizes, out=tmp_path)
    report = BENCH.measure(bench, console=Console(file=io.StringIO()))
    kinds = {row.split.partition(" ")[0] for row in report.steps}
    assert kinds == {"dp=2", "tp=2", "pp=2"}
    assert all(row.predicted_s > 0 and row.measured_s > 0 for row in report.steps)
    assert all(abs(row.bytes_error) < 0.45 for row in report.steps)
    assert steps_table(report.steps).row_count == len(report.steps) == 9
    assert len(list(plan_verdicts(report))) == 5


@pytest.mark.parametrize("steps", ["tiny", "tiny:8", "tiny:8:x", "nope:8:8"])
def test_what_is_no_training_is_refused(steps):
    with pytest.raises(ConfigError, match=f"MODEL:BATCH:CONTEXT.* got {steps}"):
        PlanBench(sizes=Plan(steps=(steps,)))


@pytest.mark.parametrize("model", ["nope:4", "mini", "mini:x"])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(ConfigError, match=f"NAME:ROWS.*: {model}"):
        PlanBench(sizes=Plan(models=(model,)))
