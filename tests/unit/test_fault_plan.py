"""Plans of faults for an elastic training reach every point."""

from __future__ import annotations

from itertools import chain

from elastic_faults import CHANGE_POINTS, MOST_SPARED, NUM_SEEDS, STEP_POINTS, plan

RUNS = [faults for seed in range(NUM_SEEDS) for faults in plan(seed)]


def test_at_least_500_faults_strike():
    assert sum(len(faults) - MOST_SPARED for faults in RUNS) >= 500


def test_the_first_500_faults_reach_all_points():
    first = list(chain(*RUNS))[:500]
    assert {fault.point for fault in first} == {*STEP_POINTS, *CHANGE_POINTS}
    assert {fault.kind for fault in first} == {"kill", "alarm", "notice", "launcher"}
    killed = {(fault.point, fault.place) for fault in first if fault.kind == "kill"}
    assert killed >= {(point, 0) for point in STEP_POINTS}  # rank 0
    assert killed >= {(point, 1) for point in CHANGE_POINTS if point != "send"}  # a new process
    pairs = {(one.point, other.point) for one, other in zip(first[::2], first[1::2], strict=True)}
    assert {point for _, point in pairs if point in STEP_POINTS} == {
        *STEP_POINTS
    }  # two in one step
