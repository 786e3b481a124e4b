"""What `python -m benchmarks horovod` says of its figures, and a thousand ranks in one process."""

from __future__ import annotations

import pytest

from benchmarks.horovod import FusionBench, FusionReport, fusion_verdicts
from benchmarks.workers.horovod import Exchange, Small, Step
from benchmarks.workers.many_ranks import Thousand, many_ranks
from braid.cli.bench.workers.ddp import Case
from braid.errors import ConfigError


def test_the_first_of_many_ranks_does_what_the_others_do_and_is_never_asked():
    found = many_ranks(50, 20, 3)
    assert found.lists == 0
    assert found.first_calls <= 1.5 * found.most_calls


def _report(longer: float, seconds: float, calls: int) -> FusionReport:
    return FusionReport(
        braid="0",
        torch="2",
        machine="here",
        ranks=2,
        small=Small(seconds={"gloo": 2.0, "engine": 1.0}, speedup=2.0, between=(1.9, 2.1)),
        steps=[
            Step(model="m", batch=1, seconds={"ddp": s}, longer=longer, between=(0.0, 0.1))
            for s in (0.06, 0.04)
        ],
        exchanges=[Exchange(tensors=1, seconds=seconds, state_s=1e-5)],
        thousand=Thousand(
            ranks=9, first_s=1.0, median_s=1.0, first_calls=calls, most_calls=10, lists=0
        ),
    )


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (_report(0.09, 1e-4, 12), ["held"] * 6),
        (_report(0.2, 1e-4, 12), ["held", "missed", "held", "held", "held", "held"]),
        (_report(0.3, 3e-4, 16), ["held", "missed", "missed", "missed", "held", "missed"]),
    ],
)
def test_each_promise_is_held_or_missed(report, words):
    assert [str(line).split()[0] for line in fusion_verdicts(report)] == words


@pytest.mark.parametrize(
    "wrong", [{"ranks": 1}, {"cases": (Case("x", 1),)}, {"cases": (Case("mlp", 0),)}]
)
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(ConfigError):
        FusionBench(**wrong)
