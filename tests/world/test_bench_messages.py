"""`python -m benchmarks messages` measures each path, and divides its time into parts."""

from __future__ import annotations

import pytest
from rich.console import Console

from benchmarks import messages
from benchmarks.workers.messages import PARTS, PATHS
from braid.errors import ConfigError


@pytest.mark.launcher
def test_every_path_is_measured(tmp_path):
    bench = messages.MessageBench(sizes=("1 KiB",), rounds=1, out=tmp_path)
    report = messages.BENCH.measure(bench, console=Console(quiet=True))
    assert [row.path for row in report.rows] == list(PATHS)
    for row in report.rows:
        assert row.seconds > 0
        assert row.calls > 10
        assert sum(row.shares.values()) == pytest.approx(1)
        assert set(row.shares) == {*PARTS, "other"}
    by_path = {row.path: row.system_calls for row in report.rows}
    assert by_path["group"].get("sendmsg", 0) == 0
    assert by_path["call"]["sendmsg"] >= 1
    claims = [verdict.claim for verdict in messages.message_verdicts(report)]
    assert [claim.split(",")[0] for claim in claims] == [
        "send and recv",
        "send and recv by torch.distributed over braid",
        "push",
    ]


def test_wrong_options_are_refused():
    with pytest.raises(ConfigError, match="there is no path mail: choose one of group"):
        messages.MessageBench(paths=("mail",))
