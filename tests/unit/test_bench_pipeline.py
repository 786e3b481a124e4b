"""Verdicts, tables and pictures of `python -m benchmarks pipeline`, from figures that are made up."""

from __future__ import annotations

import pytest

from benchmarks import pipeline
from benchmarks.pipeline_formulas import plot_sweep
from benchmarks.workers.pipeline import Case, Figures, Measured
from benchmarks.workers.pipeline_models import closed_form
from benchmarks.workers.pipeline_parts import Held, Swept
from braid.errors import ConfigError
from braid.programs.schedule import Costs, simulate
from braid.programs.schedule.pipeline import SCHEDULES, bubble
from braid.programs.schedule.simulate import Route


def measured(model, *, speedup=1.2, gloo=0.7, braid=0.95, action_s=50e-6):
    return Measured(
        case=Case(model, "1f1b", 8),
        ranks=2,
        overhead=1 / 8,
        num_actions=32,
        boundary_bytes=4 << 20,
        step_s={"compute": 0.1, "gloo": 0.2, "torch": 0.19, "braid": 0.15},
        speedup={"torch": 1.05, "braid": speedup},
        efficiency={"gloo": gloo, "torch": 0.75, "braid": braid},
        action_s=action_s,
        rounds_s={},
    )


def held(measured_bytes):
    return Held(
        schedule="gpipe",
        recompute="always",
        measured_bytes=measured_bytes,
        formula_bytes=[100, 100],
        num_held=[1, 1],
    )


def swept(num_microbatches, measured_s, simulated_s):
    return Swept(
        num_microbatches=num_microbatches,
        rows=64 // num_microbatches,
        measured_s=measured_s,
        simulated_s=simulated_s,
        forward_s=0.01,
        backward_s=0.02,
        message_s=0.001,
    )


def report_of(*, measured=(), held=(), swept=()):
    figures = Figures(measured=list(measured), held=list(held), swept=list(swept))
    return pipeline.PipelineReport(braid="", torch="2", machine="a machine", figures=figures)


@pytest.mark.parametrize(
    ("row", "verdicts"),
    [
        (measured("wide"), [True]),
        (measured("wide", speedup=1.14), [False]),
        (measured("wide", gloo=0.81), [None]),  # too little is exposed to show anything
        (measured("compute", speedup=0.99, braid=0.9), [True, True]),
        (measured("compute", speedup=0.98, braid=0.89), [False, False]),
        (measured("tiny", action_s=40e-6), [True]),
        (measured("tiny", action_s=41e-6), [False]),
    ],
)
def test_each_promise_is_held_up_to_its_limit(row, verdicts):
    shown = pipeline.pipeline_verdicts(report_of(measured=[row]))
    assert [verdict.held for verdict in shown] == verdicts


@pytest.mark.parametrize(
    ("work_s", "text"),
    [
        ([0.1] * 12, ""),
        ([0.1, 0.13] * 8, ""),
        ([0.1, 0.2] * 8, "unsteady  wide, 1f1b: work without messages took 100 to 200 ms"),
        ([0.1, 0.2] * 2, ""),  # too few to tell
    ],
)
def test_work_that_lasts_differently_casts_doubt_on_the_figures(work_s, text):
    row = measured("wide")
    row.rounds_s["compute"] = work_s
    lines = map(str, pipeline.pipeline_lines(report_of(measured=[row])))
    doubts = [line for line in lines if line.startswith("unsteady")]
    assert "".join(doubts).startswith(text)
    assert bool(doubts) is bool(text)


@pytest.mark.parametrize(
    ("nbytes", "is_held"), [([100, 109], True), ([89, 100], False), ([100, 111], False)]
)
def test_live_bytes_may_differ_from_the_formula_in_either_direction(nbytes, is_held):
    (verdict,) = pipeline.pipeline_verdicts(report_of(held=[held(nbytes)]))
    assert verdict.held is is_held
    assert verdict.claim.startswith("gpipe, recomputed: live bytes within 10%")


def test_the_simulated_optimum_is_judged_by_the_time_that_is_lost():
    good = [swept(4, 0.104, 0.09), swept(8, 0.1, 0.1)]
    bad = [swept(4, 0.106, 0.09), swept(8, 0.1, 0.1)]
    texts = [str(*pipeline.pipeline_verdicts(report_of(swept=rows))) for rows in (good, bad)]
    assert texts[0].startswith("held    the simulated optimum of 4 micro-batches")
    assert texts[0].endswith("measured 4.0%")
    assert texts[1].startswith("missed")


def test_tables_show_the_bubble_of_the_step_and_the_optimum(capsys, tmp_path):
    report = report_of(
        measured=[measured("wide")],
        held=[held([100, 109])],
        swept=[swept(4, 0.12, 0.09), swept(8, 0.1, 0.11)],
    )
    pipeline.BENCH.show(report, tmp_path)
    text = capsys.readouterr().out
    assert "11.1%" in text  # 1/8 of the work is 1/9 of the step
    assert "…" not in text
    lines = [line.split() for line in text.splitlines()]
    assert next(line for line in lines if line[:2] == ["4", "16"])[-1] == "simulated"
    assert next(line for line in lines if line[:2] == ["8", "8"])[-1] == "measured"


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_sweep_is_a_picture(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    rows = [swept(4, 0.12, 0.09), swept(8, 0.1, 0.11)]
    assert plot_sweep(rows, "a sweep", tmp_path / f"m.{suffix}").stat().st_size > 5000


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize(("ranks", "num_microbatches"), [(2, 8), (4, 8), (4, 16)])
def test_the_closed_form_is_the_bubble_of_the_simulator(name, ranks, num_microbatches):
    class Nothing:
        bytes_per_s = ()
        burst_bytes = ()

        def route(self, *_):
            return Route(0.0, ())

    program = SCHEDULES[name](ranks, num_microbatches)
    costs = Costs(lambda *_: 0.0, lambda _, action: {"F": 1.0, "B": 2.0}.get(action.kind, 0.0))
    simulated = bubble(simulate(program, costs, Nothing(), buffered=True))
    assert closed_form(program) == pytest.approx(simulated)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cases": (Case("deep", "1f1b", 8),)}, "no model deep: choose one of wide, compute, tiny"),
        ({"cases": (Case("wide", "zbv", 8),)}, "zbv cannot be compared"),
        ({"cases": (Case("wide", "1f1b", 0),)}, "micro-batches of wide must be at least 1"),
        ({"cases": (Case("wide", "interleaved", 7),)}, "7 micro-batches are not a multiple of 2"),
        ({"ranks": 3}, "has 3 stages, among which the 4 blocks"),
        ({"ranks": 4, "cases": (Case("wide", "interleaved", 8),)}, "has 8 stages"),
        ({"sweep": "rows"}, "sweep must be microbatches, got 'rows'"),
    ],
)
def test_measurements_that_make_no_sense_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        pipeline.PipelineBench(**options)
