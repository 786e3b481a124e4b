"""Each part of `python -m benchmarks ps` measures what it says, at its smallest size."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
from rich.console import Console

from benchmarks import ps
from benchmarks.workers.ps_plan import PARTS, Failover, Measured, Plan, Ratio
from benchmarks.workers.ps_stragglers import CLEAN, REGIMES, straggle
from benchmarks.workers.ps_training import train
from benchmarks.workers.ps_transfer import SHARED, SOCKETS, UNIX, transfer
from braid.errors import ConfigError

SMALL = Plan(
    rounds=1,
    dense_bytes=4096,
    num_small=2,
    num_pairs=1000,
    batch=64,
    vocabulary=1000,
    model="tiny",
    kills=1,
    count_bytes=4096,
    clock_s=0.001,
    clocks=10,
    with_rpc=False,
)


def test_transfers_are_measured_both_ways(world):
    plan = msgspec.structs.replace(SMALL, parts=("dense", "small", "pairs", "rows"))
    rows = world(3, transfer, plan)[2]
    assert [row.name for row in rows] == ["dense", "small", "push", "pull", "rows"]
    ways = [list(row.seconds) for row in rows]
    assert ways == [[SOCKETS, SHARED, UNIX]] * 2 + [[SOCKETS, SHARED]] * 3
    assert min(min(own) for row in rows for own in row.seconds.values()) > 0
    assert rows[-1].amount == 2 * 64
    assert "distinct ids" in rows[-1].note


def test_every_engine_takes_a_step(world):
    results = world(4, train, SMALL)
    (row,) = results[2]
    assert results[:2] == [None, None]
    assert list(row.seconds) == ["all-reduce", "servers step", "workers step"]
    assert [len(own) for own in row.seconds.values()] == [1, 1, 1]


def test_every_regime_is_measured(world):
    rates = world(6, straggle, SMALL)[2].rates
    assert list(rates) == [regime.name for regime in REGIMES]
    assert min(rate for own in rates.values() for rate in own) > 0


FAIL_OVER = """
import sys, msgspec
from benchmarks.workers.ps_failover import fail_over
from benchmarks.workers.ps_plan import Plan

if __name__ == "__main__":
    print(msgspec.json.encode(fail_over(msgspec.json.decode(sys.argv[1], type=Plan))).decode())
"""


def test_a_killed_server_costs_no_push(tmp_path):
    script = tmp_path / "fail_over.py"  # forked servers read the program again
    script.write_text(FAIL_OVER)
    done = subprocess.run(
        [sys.executable, str(script), msgspec.json.encode(SMALL).decode()],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = msgspec.json.decode(done.stdout, type=Failover)
    assert (figures.lost, figures.wrong) == (0, 0)
    assert len(figures.slowest_s) == len(figures.repaired_s) == 1
    assert figures.steps > 30


@pytest.mark.launcher
@pytest.mark.procs
@pytest.mark.proof
def test_all_parts_are_measured_by_the_command(tmp_path):
    sizes = msgspec.structs.replace(SMALL, with_rpc=True)
    bench = ps.PsBench(rounds=1, kills=1, sizes=sizes, out=tmp_path)
    report = ps.BENCH.measure(bench, console=Console(quiet=True))
    assert "torch's RPC" in report.rows[0].seconds
    assert len(ps.ps_verdicts(report)) == 17
    assert msgspec.json.decode((tmp_path / "ps.json").read_bytes())["failover"]["lost"] == 0


def test_reports_are_judged_and_shown(tmp_path, capsys):
    rows = [
        Measured(
            name="dense", amount=32e6, seconds={SOCKETS: [0.01, 0.02], SHARED: [0.002, 0.002]}
        ),
        Measured(name="small", amount=1, seconds={SOCKETS: [1e-4], SHARED: [1e-4]}),
        Measured(name="push", amount=1e7, seconds={SOCKETS: [0.2], SHARED: [0.1]}),
        Measured(name="rows", amount=1e6, seconds={SOCKETS: [0.9], SHARED: [1.1]}, note="few"),
        Measured(
            name="step",
            amount=1,
            seconds={
                "all-reduce": [1.0, 2.0],
                "servers step": [2.0, 2.0],
                "workers step": [1.0, 2.0],
            },
            note="a model",
        ),
    ]
    rates = {regime.name: [0.7, 0.7] for regime in REGIMES} | {CLEAN: [1.0, 1.0]}
    failover = Failover(
        slowest_s=[0.1, 2.0, 0.2], repaired_s=[1.0], step_s=0.01, steps=9, lost=0, wrong=1
    )
    report = ps.PsReport(
        braid="1",
        torch="2",
        machine="one",
        rows=rows,
        failover=failover,
        stragglers=Ratio(rates=rates),
    )
    held = [verdict.held for verdict in ps.ps_verdicts(report)]
    transfers = [False, True, True, False, False, True, False]
    assert held == [*transfers, True, True, True, False, False, False, False, True]
    ps.BENCH.show(report, tmp_path)
    text = capsys.readouterr().out
    assert "2.13 GB/s" in text
    assert "steps: a model; 4 processes" in text


def test_parts_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError, match="there is no part steps: choose one of dense"):
        ps.PsBench(only=("steps",))
    with pytest.raises(ConfigError, match="kills must be at least 1, got 0"):
        ps.PsBench(kills=0)
    assert ps.PsBench().only == PARTS
