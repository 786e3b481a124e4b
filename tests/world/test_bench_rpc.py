"""`python -m benchmarks rpc` measures what it says, at its smallest size."""

from __future__ import annotations

import pytest
from rich.console import Console

from benchmarks import rpc
from benchmarks.workers.ps_plan import Measured
from benchmarks.workers.rpc_plan import BRAID, PARTS, TORCH, Plan
from braid.errors import ConfigError

SMALL = Plan(num_small=5, window=20, requests=3)


@pytest.mark.launcher
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's RPC
def test_both_systems_are_measured(tmp_path):
    bench = rpc.RpcBench(rounds=1, sizes=SMALL, out=tmp_path)
    report = rpc.BENCH.measure(bench, console=Console(quiet=True))
    assert [row.name for row in report.rows] == list(PARTS)
    for row in report.rows:
        assert [len(row.seconds[system]) for system in (BRAID, TORCH)] == [1, 1]
        assert min(min(own) for own in row.seconds.values()) > 0
    assert len(list(rpc.rpc_verdicts(report))) == len(PARTS)
    assert (tmp_path / "rpc.json").exists()


def test_verdicts_compare_round_by_round():
    rows = [
        Measured(name="small", amount=1, seconds={BRAID: [1.0, 9.0, 1.0], TORCH: [2.6, 2.0, 2.1]}),
        Measured(name="1 MiB", amount=2 << 20, seconds={BRAID: [1.0], TORCH: [1.9]}),
        Measured(name="autograd", amount=1, seconds={BRAID: [1.0]}),
    ]
    report = rpc.RpcReport(rows=rows)
    held, missed = rpc.rpc_verdicts(report)
    assert held.held
    assert "measured 2.10" in str(held)
    assert not missed.held
    assert "at least 2.5 times" in str(missed)
    assert rpc.rpc_table(report).row_count == 5


def test_wrong_options_are_refused():
    with pytest.raises(ConfigError, match="there is no part fast: choose one of small"):
        rpc.RpcBench(only=("fast",))
