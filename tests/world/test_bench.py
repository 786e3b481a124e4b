"""The benchmarks measure what they say, on rows small enough for a test; no figure is held against a limit here."""

from __future__ import annotations

import importlib.util
import random
import shutil

import msgspec
import pytest
from rich.console import Console

from benchmarks import pipeline, zero
from benchmarks.workers import pipeline as pipeline_worker
from benchmarks.workers import zero as zero_worker
from braid.cli.bench import comm, ddp
from braid.cli.bench.harness.options import read_fields, read_size
from braid.cli.bench.workers import ddp as ddp_worker
from braid.cli.bench.workers.ddp_models import MODEL_NAMES
from braid.errors import ConfigError

HAS_MPI = importlib.util.find_spec("mpi4py") is not None and shutil.which("mpiexec") is not None


@pytest.fixture
def quiet():
    return Console(quiet=True)


@pytest.mark.launcher
@pytest.mark.procs
def test_every_operation_is_measured_by_every_library(tmp_path, quiet, monkeypatch):
    monkeypatch.setattr(comm, "mpi_version", lambda: "")
    bench = comm.CommBench(
        sizes_bytes=(1 << 10,),
        dtypes=("float32",),
        rounds=1,
        budget_s=0.001,
        out=tmp_path,
        no_plot=True,
    )
    report = comm.BENCH.measure(bench, console=quiet)
    assert [row.operation for row in report.rows] == list(comm.OPERATIONS)
    for row in report.rows:
        registered = set() if row.operation in {"send_recv", "barrier"} else {"registered"}
        assert set(row.seconds) == {"gloo", "braid", "torch"} | registered
        assert set(row.ratio) == set(row.seconds) - {"gloo"}
        assert min(row.seconds.values()) > 0
    assert "all_reduce" in report.explained["2"]
    assert comm.table(report).row_count == len(report.rows)
    assert (tmp_path / "comm.json").exists()


@pytest.mark.procs
@pytest.mark.skipif(not HAS_MPI, reason="mpi4py or mpiexec is not installed")
def test_mpi_is_measured_where_it_is_installed(tmp_path, quiet):
    bench = comm.CommBench(
        operations=("all_reduce",),
        sizes_bytes=(1 << 10,),
        dtypes=("float32", "bfloat16"),
        rounds=1,
        budget_s=0.001,
        out=tmp_path,
        no_plot=True,
    )
    report = comm.BENCH.measure(bench, console=quiet)
    with_mpi = {row.dtype: "mpi" in row.seconds for row in report.rows}
    assert with_mpi == {"float32": True, "bfloat16": False}  # MPI has no such type
    assert set(report.rows[0].over_mpi) == {"gloo", "braid", "registered", "torch"}


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"operations": ("all_reduced",)}, "all_reduced"),
        ({"dtypes": ("float33",)}, "float33"),
        ({"ranks": (2, 1)}, "number of ranks must be at least 2, got 1"),
        ({"sizes_bytes": (0,)}, "size in bytes must be at least 1, got 0"),
    ],
)
def test_benches_that_make_no_sense_are_refused(wrong, word):
    with pytest.raises(ConfigError, match=word):
        comm.CommBench(**wrong)


def test_sizes_are_bytes_with_or_without_a_unit():
    assert [read_size(text) for text in ("512", "16KiB", "4 MiB")] == [512, 16 << 10, 4 << 20]
    for wrong in ("4GB", "KiB", "-1", "1.5MiB"):
        with pytest.raises(ConfigError, match="is not a size"):
            read_size(wrong)


def test_the_largest_figures_are_shown_whole(capsys, tmp_path):
    seconds = dict.fromkeys(comm.LIBRARIES, 0.987654321)
    row = comm.Row(
        operation="reduce_scatter",
        dtype="bfloat16",
        nbytes=256 << 20,
        ranks=4,
        seconds=seconds,
        ratio=dict.fromkeys(seconds, 1234.5),
        spread={},
    )
    other = msgspec.structs.replace(row, dtype="float32")
    report = comm.CommReport(
        braid="", torch="", machine="", mpi="an MPI", explained={}, rows=[row, other]
    )
    comm.BENCH.show(report, tmp_path)
    text = capsys.readouterr().out
    assert (text.count("987,654"), text.count("1,23"), "…" in text) == (10, 8, False)


@pytest.mark.launcher
@pytest.mark.procs
@pytest.mark.proof
def test_every_wrapper_trains(tmp_path, quiet):
    cases = tuple(ddp_worker.Case(name, 1 + (name == "conv")) for name in MODEL_NAMES)
    bench = ddp.DdpBench(cases=cases, rounds=2, budget_s=1.0, busy=1, out=tmp_path)
    report = ddp.BENCH.measure(bench, console=quiet)
    assert [found.model for found in report.models] == ["mlp", "gpt", "conv"]
    for found in report.models:
        assert set(found.step_s) == set(ddp_worker.VARIANTS)
        assert 11e6 < found.num_params < 26e6
    assert ddp.ddp_table(report).row_count == 15
    assert len(ddp.ddp_verdicts(report)) == 6


@pytest.mark.launcher
@pytest.mark.procs
@pytest.mark.proof
def test_every_engine_of_sharding_trains_and_is_measured(tmp_path, quiet):
    bench = zero.ZeroBench(
        cases=(zero_worker.Case("tiny", 1),),
        rounds=2,
        budget_s=1.0,
        save_mib=64,
        save_rounds=1,
        out=tmp_path,
    )
    report = zero.BENCH.measure(bench, console=quiet)
    (row,) = report.rows
    assert report.saves is not None
    assert 0 < report.saves.stall_s < report.saves.write_s
    assert "a background save of 64 MiB" in str(zero.zero_verdicts(report)[-1])
    assert not (tmp_path / "saves").exists()
    assert set(row.step_s) == set(row.speedup) == set(zero_worker.VARIANTS)
    assert row.num_params == 4 * 32 * 32
    sent = {stage: live.sent for stage, live in row.live.items()}
    expected = {"stage1": 2.0, "stage2": 2.0, "stage3": 2.75}  # the last layer is kept
    assert sent == pytest.approx(expected, abs=1e-3)  # and bytes that say who had gradients
    held = {stage: live.peak - live.slots for stage, live in row.live.items()}
    states = 8 * 32 * 32 * 4 // 2 + 4 * 4  # and four numbers of steps
    assert held == {
        "stage1": 8 * 4096 + states,
        "stage2": 6 * 4096 + states,
        "stage3": 4 * 4096 + states,
    }


def test_reports_of_sharding_are_judged_and_shown(tmp_path, capsys):
    live = zero_worker.Live(peak=120, slots=20, formula=100.0, sent=2.0)
    seconds = dict.fromkeys(zero_worker.VARIANTS, 0.1)
    row = zero_worker.Measured(
        case=zero_worker.Case("gpt", 4),
        num_params=10,
        ranks=2,
        step_s=seconds,
        speedup=seconds,
        live=dict.fromkeys(zero_worker.STAGES, live),
        rounds_s={},
    )
    report = zero.ZeroReport(braid="1", torch="2", machine="one", rows=[row])
    held = [verdict.held for verdict in zero.zero_verdicts(report)]
    assert held == [False, *[True] * 6]
    zero.BENCH.show(report, tmp_path)
    assert "braid, stage 3" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="'gpt' does not have the form model:batch"):
        read_fields(zero_worker.Case, "gpt")
    with pytest.raises(ConfigError, match="there is no model rnn"):
        zero.ZeroBench(cases=(zero_worker.Case("rnn", 1),))


def measured(alone_s):
    return ddp_worker.MeasuredCase(
        model="mlp",
        num_params=1,
        batch=4,
        ranks=2,
        step_s={"gloo": 1.0, "silent": 1.0},
        speedup={},
        gone={},
        gone_between={},
        exposed_s={},
        spread={},
        rounds_s={"alone": alone_s, "torch": [1.0], "braid": [1.0]},
    )


@pytest.mark.parametrize(
    ("alone_s", "busy", "doubts"),
    [
        ([0.1, 0.101, 0.102] * 10, 0, 0),
        ([0.1] * 29 + [0.9], 0, 0),  # one round tells little
        ([0.1] * 20 + [0.14] * 10, 0, 1),
        ([0.1] * 20 + [0.14] * 10, 1, 0),  # asked for
        ([0.1, 0.9], 0, 0),
    ],
)
def test_figures_of_a_machine_that_was_not_quiet_are_doubted(alone_s, busy, doubts):
    report = ddp.DdpReport(braid="", torch="", machine="", models=[measured(alone_s)], busy=busy)
    found = [line for line in map(str, ddp.ddp_lines(report)) if line.startswith("unsteady")]
    assert len(found) == doubts
    for line in found:
        assert "mlp, batch 4: steps without communication took 100 to 140 ms" in line


def test_shares_of_exposed_communication_are_quotients_of_means():
    times = {"silent": [1.0] * 4, "gloo": [1.5, 2.0, 2.0, 2.5]}
    slow_once = [1.0, 1.0, 1.0, 2.0]  # who waits for a peer in one step of four has waited
    found = ddp_worker.shares_gone({**times, "torch": [1.5] * 4, "braid": slow_once})
    assert found == {"torch": 0.5, "braid": 0.75}
    assert ddp_worker.shares_gone({**times, "gloo": [0.9] * 4, "torch": [1.0] * 4}) == {}


def test_what_is_gone_and_what_is_left_of_exposed_communication_add_up_to_all_of_it():
    numbers = random.Random(3)
    times = {
        variant: [numbers.expovariate(1 / mean) for _ in range(37)]
        for variant, mean in {"silent": 1.0, "gloo": 9.0, "torch": 2.0, "braid": 4.0}.items()
    }
    gone = ddp_worker.shares_gone(times)["braid"]
    swapped = {**times, "gloo": times["braid"], "braid": times["gloo"]}
    left = 1 / (1 - ddp_worker.shares_gone(swapped)["braid"])  # what braid adds over what Gloo adds
    assert gone + left == pytest.approx(1.0)


def test_shares_of_steps_that_never_vary_are_certain():
    times = {"silent": [1.0] * 5, "gloo": [2.0] * 5, "torch": [1.25] * 5, "braid": [1.5] * 5}
    assert ddp_worker.shares_between(times) == {"torch": (0.75, 0.75), "braid": (0.5, 0.5)}


def test_shares_of_steps_that_vary_lie_between_bounds():
    gloo, torchs = [2.0, 2.2, 1.8, 2.1, 1.9] * 4, [1.2, 1.4, 1.1, 1.6, 1.3] * 4
    times = {"silent": [1.0] * 20, "gloo": gloo, "torch": torchs, "braid": gloo}
    low, high = ddp_worker.shares_between(times)["torch"]
    assert low < ddp_worker.shares_gone(times)["torch"] < high


def test_unknown_models_are_refused():
    with pytest.raises(ConfigError, match="resnet"):
        ddp.DdpBench(cases=(ddp_worker.Case("resnet", 1),))


@pytest.mark.launcher
@pytest.mark.procs
@pytest.mark.proof
def test_every_engine_of_pipelines_trains_and_is_measured(tmp_path, quiet):
    cases = (
        pipeline_worker.Case("tiny", "1f1b", 4),
        pipeline_worker.Case("tiny", "interleaved", 4),
    )
    options = {"cases": cases, "rounds": 2, "budget_s": 0.1, "out": tmp_path}
    report = pipeline.BENCH.measure(pipeline.PipelineBench(**options), console=quiet)
    assert [row.case for row in report.figures.measured] == list(cases)
    assert len(report.figures.held) == 5
    assert msgspec.json.decode((tmp_path / "pipeline.json").read_bytes())["figures"]["swept"] == []
    sweep = pipeline.BENCH.measure(
        pipeline.PipelineBench(**options, sweep="microbatches", swept=cases[0]), console=quiet
    )
    assert [row.num_microbatches for row in sweep.figures.swept] == [1, 2, 4, 8, 16, 32]
    # with recomputation, outputs whose receiver is late are alive besides
    assert all(verdict.held for verdict in pipeline.pipeline_verdicts(report)[-5:-2])
