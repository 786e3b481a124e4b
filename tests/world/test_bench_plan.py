"""`braid bench plan` measures what it says, at its smallest size."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from braid.bench.plan import PlanBench, plan_table, plan_verdicts, run_plan
from braid.bench.workers.plan_plan import Plan
from braid.errors import ConfigError


def test_all_pipelines_train_the_same_micro_batches(tmp_path):
    sizes = Plan(models=("tiny:1",), context=8, batches=1, rounds=2)
    bench = PlanBench(sizes=sizes, out=tmp_path)
    report = run_plan(bench, console=Console(file=io.StringIO()))
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


@pytest.mark.parametrize("model", ["nope:4", "mini", "mini:x"])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(ConfigError, match=f"NAME:ROWS.*: {model}"):
        PlanBench(sizes=Plan(models=(model,)))
