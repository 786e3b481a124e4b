"""What `python -m benchmarks hooks` says about its figures."""

from __future__ import annotations

import pytest

from benchmarks.hooks import HooksReport, hooks_verdicts
from benchmarks.workers.hooks import EXACT, Way


def _report(first: float, exact: float, topk: float) -> HooksReport:
    losses = {EXACT: exact, "topk:0.01": topk}
    ways = [
        Way(name=name, step_s=1.0, speedup=4.0, spread=(4.0, 4.0), first_loss=first, last_loss=last)
        for name, last in losses.items()
    ]
    return HooksReport(
        braid="", torch="", machine="", load=0.0, gbit=1.0, hosts=2, batch=16, rounds=9, ways=ways
    )


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ((0.4, 0.04, 0.04), ["held", "held", "held"]),
        ((0.4, 0.04, 0.08), ["held", "held", "missed"]),
        ((0.4, 0.4, 0.4), ["missed", "held", "held"]),  # nobody has learned anything
    ],
)
def test_losses_are_compared_where_something_has_been_learned(losses, words):
    assert [str(line).split()[0] for line in hooks_verdicts(_report(*losses))] == words
