"""Plans for recomputation: formulas, and the best choice within a budget."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.comm.autograd.recompute_plan import (
    LayerCost,
    RecomputePlan,
    Segment,
    by_budget,
    equal_segments,
    least_budget,
    sqrt_segments,
)
from braid.errors import ConfigError

UNIT = LayerCost(1, 1, 1.0)

layer_costs = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 5).map(float)).map(
    lambda t: LayerCost(t[0] + t[1], t[1], t[2])
)
chains = st.lists(layer_costs, min_size=1, max_size=6)


def _every_plan(num_layers: int) -> list[RecomputePlan]:
    found = []
    for cut in itertools.product((False, True), repeat=num_layers - 1):
        cuts = [0, *(i + 1 for i, here in enumerate(cut) if here), num_layers]
        spans = list(itertools.pairwise(cuts))
        found += [
            RecomputePlan(
                tuple(Segment(*s, recomputed=c) for s, c in zip(spans, choice, strict=True))
            )
            for choice in itertools.product((False, True), repeat=len(spans))
        ]
    return found


def _simulated_peak(plan: RecomputePlan, layers: list[LayerCost]) -> int:
    """Forward and backward as a set of tensors: ("in", i) the output that layer i gets, ("saved", i) what else i saves."""
    sizes = {("saved", i): cost.saved_bytes - cost.output_bytes for i, cost in enumerate(layers)}
    sizes |= {("in", i + 1): cost.output_bytes for i, cost in enumerate(layers)} | {("in", 0): 0}
    alive: set[tuple[str, int]] = set()

    def all_of(segment: Segment) -> set[tuple[str, int]]:
        span = range(segment.start, segment.stop)
        return {("saved", i) for i in span} | {("in", i) for i in (*span, segment.stop)}

    for segment in plan.segments:
        alive |= {("in", segment.start)} if segment.recomputed else all_of(segment)
    peak = sum(sizes[x] for x in alive)
    for number, segment in reversed(list(enumerate(plan.segments))):
        before: set[tuple[str, int]] = set()
        for earlier in plan.segments[:number]:
            before |= {("in", earlier.start)} if earlier.recomputed else all_of(earlier)
        peak = max(peak, sum(sizes[x] for x in before | all_of(segment)))
    return peak


@given(chains)
def test_the_formula_of_the_peak_counts_what_a_simulation_holds(layers):
    for plan in _every_plan(len(layers)):
        assert plan.peak_bytes(layers) == _simulated_peak(plan, layers)


@given(chains, st.integers(0, 60))
def test_the_plan_within_a_budget_is_the_best_of_all(layers, budget):
    fitting = [p for p in _every_plan(len(layers)) if p.peak_bytes(layers) <= budget]
    if not fitting:
        with pytest.raises(ConfigError, match=str(least_budget(layers))):
            by_budget(layers, budget)
        return
    plan = by_budget(layers, budget)
    plan.check(len(layers))
    assert plan.peak_bytes(layers) <= budget
    assert plan.recomputed_s(layers) == min(p.recomputed_s(layers) for p in fitting)


@given(chains)
def test_the_least_budget_is_the_least_peak_of_all(layers):
    assert least_budget(layers) == min(p.peak_bytes(layers) for p in _every_plan(len(layers)))


@given(chains, st.integers(1, 7))
def test_a_plan_in_grains_keeps_within_the_budget(layers, grain):
    budget = sum(layer.saved_bytes for layer in layers) * 3 // 4
    try:
        plan = by_budget(layers, budget, grain_bytes=grain)
    except ConfigError:
        return
    assert plan.peak_bytes(layers) <= budget


@pytest.mark.parametrize("root", range(1, 9))
def test_square_roots_keep_two_roots_less_one(root):
    n = root * root
    plan = sqrt_segments(n)
    assert plan.peak_bytes([UNIT] * n) == 2 * root - 1
    assert plan.num_recomputed == n - root
    assert plan.recomputed_s([UNIT] * n) == n - root
    assert least_budget([UNIT] * n) <= 2 * root - 1


def test_a_large_budget_recomputes_nothing_and_half_of_it_some():
    layers = [LayerCost(3 + i % 5, 1 + i % 3, 1.0 + i % 7) for i in range(40)]
    total = sum(layer.saved_bytes for layer in layers)
    assert by_budget(layers, total).num_recomputed == 0
    plan = by_budget(layers, total // 2)
    assert plan.peak_bytes(layers) <= total // 2
    assert plan.num_recomputed < 40


def test_plans_are_told_as_text():
    assert str(equal_segments(7, 3)) == "(0 1) (2 3) 4 5 6"
    assert str(equal_segments(0, 1)) == "no layers"
    assert equal_segments(0, 1).peak_bytes([]) == 0


def test_impossible_plans_are_refused():
    for segments, layers in ((0, 3), (4, 3)):
        with pytest.raises(ConfigError, match=str(segments)):
            equal_segments(layers, segments)
    gap = RecomputePlan((Segment(0, 1, True), Segment(2, 3, True)))
    with pytest.raises(ConfigError, match="in order without gaps"):
        gap.check(3)
    with pytest.raises(ConfigError, match="need at least 3"):
        by_budget([LayerCost(3, 1, 1.0)], 2)


def test_the_peak_of_equal_layers_is_never_below_the_root_bound():
    for n in range(1, 40):
        best = min(equal_segments(n, k).peak_bytes([UNIT] * n) for k in range(1, n + 1))
        assert best >= 2 * math.sqrt(n) - 1
