"""Pipelines take the time and the memory that their closed forms say, for any ranks, micro-batches and stages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_schedule_plot import drawn, same_as_golden

from braid.errors import ConfigError
from braid.programs.schedule import Costs, Program, Timeline, from_text, simulate, to_text, validate
from braid.programs.schedule.known import RULES, VOCABULARIES
from braid.programs.schedule.pipeline import (
    SCHEDULES,
    StageCosts,
    breadth_first,
    bubble,
    forward_only,
    gpipe,
    interleaved,
    list_schedule,
    looped,
    measures_text,
    most_held,
    one_f_one_b,
    peak_activations,
    v_half,
    v_min,
    vee,
    zb_h1,
    zb_h2,
    zbv,
)
from braid.programs.schedule.plot import lanes, table
from braid.programs.topology import flat

SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def simulated(program: Program) -> Timeline:
    work = Costs(lambda _, __: 0.0, lambda _, action: SECONDS.get(action.kind, 0.0))
    return simulate(program, work, flat(program.num_ranks, 0.0, 1.0), buffered=True)


def overhead(program: Program) -> float:
    """Bubble over ideal compute, of equal costs f = i = w."""
    header = program.header
    ideal = 3 * header.num_indices * header.num_units / program.num_ranks
    return (simulated(program).seconds - ideal) / ideal


@pytest.mark.parametrize("make", [one_f_one_b, zbv, v_min, interleaved])
def test_the_measured_bubble_is_that_of_the_ideal_time(make: Callable[[int, int], Program]):
    program = make(4, 8)
    assert bubble(simulated(program)) == pytest.approx(overhead(program))


def test_measures_are_told_in_one_line():
    known = "bubble 37.5 % of the work, peak activations 4, 3, 2, 1 micro-batches on ranks 0 to 3"
    assert measures_text(one_f_one_b(4, 8), simulated(one_f_one_b(4, 8))) == known
    flat_one = "bubble 10.4 % of the work, peak activations 3 micro-batches on each rank"
    assert measures_text(v_half(4, 8), simulated(v_half(4, 8))) == flat_one
    many = measures_text(one_f_one_b(20, 20), simulated(one_f_one_b(20, 20)))
    assert many == "bubble 95.0 % of the work, peak activations 1 to 20 micro-batches"
    infers = forward_only(2, 4)
    assert peak_activations(infers) == [0.0, 0.0]
    assert measures_text(infers, simulated(infers)) == "bubble 25.0 % of the work"
    assert bubble(Timeline([], [0.0], {})) == 0.0


SIZES = [(p, m) for p in range(1, 6) for m in (1, 3, 5, 8, 10)]


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_one_stage_per_rank_has_a_bubble_of_p_minus_1_over_m(make: Callable[[int, int], Program]):
    found = {(p, m): overhead(make(p, m)) for p, m in SIZES}
    assert found == pytest.approx({(p, m): (p - 1) / m for p, m in SIZES})


@pytest.mark.parametrize("v", [1, 2, 3])
def test_v_stages_per_rank_divide_the_bubble_by_v(v: int):
    sizes = [(p, m) for p in range(1, 6) for m in (p, 2 * p, 4 * p)]
    expected = {(p, m): (p - 1) / (v * m) for p, m in sizes}
    assert {(p, m): overhead(breadth_first(p, m, v)) for p, m in sizes} == pytest.approx(expected)
    assert {(p, m): overhead(interleaved(p, m, v)) for p, m in sizes} == pytest.approx(expected)


def test_interleaved_holds_what_its_first_rank_needs_and_breadth_first_everything():
    for p, m, v in [(2, 8, 2), (4, 8, 2), (4, 16, 3)]:
        assert max(most_held(interleaved(p, m, v))) == (v - 1) * p + 2 * (p - 1) + 1
        assert most_held(breadth_first(p, m, v)) == [v * m] * p


def test_interleaved_may_have_longer_rounds_than_ranks():
    for p, m, v, n in [(2, 4, 2, 4), (2, 7, 3, 5), (3, 10, 2, 4), (4, 12, 2, 6)]:
        program = interleaved(p, m, v, round_size=n)
        assert validate(program, RULES) == []
        assert most_held(program)[0] == min((v - 1) * n + 2 * (p - 1) + 1, v * m)
    assert interleaved(2, 6, 2, round_size=2) == interleaved(2, 6, 2)
    with pytest.raises(ConfigError, match="at least the number of ranks, 3, got 2"):
        interleaved(3, 6, 2, round_size=2)


def test_zb_h1_has_a_third_of_the_bubble_for_the_memory_of_the_first_rank():
    for p, m in [(2, 4), (3, 6), (4, 8), (5, 12)]:
        assert overhead(zb_h1(p, m)) == pytest.approx(overhead(one_f_one_b(p, m)) / 3)
        assert most_held(zb_h1(p, m)) == [p] * p


def test_zb_h2_is_never_idle_between_a_ranks_first_and_last_work():
    for p, m in [(2, 4), (3, 8), (4, 8), (5, 12)]:
        program = zb_h2(p, m)
        work = [i for i in simulated(program).intervals if not i.is_message]
        for rank in range(p):
            own = [i for i in work if i.rank == rank]
            assert max(i.end_s for i in own) - min(i.start_s for i in own) == 3 * m
        assert max(most_held(program)) == 2 * p - 1


def test_zbv_has_the_published_bubble_and_holds_the_same_on_every_rank():
    assert overhead(zbv(4, 8)) == pytest.approx(0.0625)
    assert most_held(zbv(4, 8)) == [8] * 4


def test_v_half_and_v_min_hold_a_half_and_a_third_for_a_half_and_two_thirds_of_the_bubble():
    for p, m in [(2, 4), (3, 12), (4, 8), (5, 10), (6, 12), (7, 14), (8, 16), (9, 18), (12, 24)]:
        bubble = overhead(one_f_one_b(p, m))
        assert overhead(v_half(p, m)) <= bubble / 2
        assert overhead(v_min(p, m)) <= bubble * 2 / 3
        assert max(most_held(v_half(p, m))) == p + 2
        assert max(most_held(v_min(p, m))) == 2 * ((p + 1) // 3) + 2


def test_the_bubbles_of_v_half_and_v_min_are_those_in_their_docs():
    sizes = [(4, 8), (4, 16), (8, 16)]
    halves, mins = ([round(overhead(make(*s)), 3) for s in sizes] for make in (v_half, v_min))
    assert halves == [0.104, 0.052, 0.198]
    assert mins == [0.229, 0.115, 0.281]


@given(p=st.integers(1, 14), m=st.integers(1, 20))
def test_v_half_and_v_min_keep_their_limits_with_any_number_of_micro_batches(p: int, m: int):
    for make, limit in ((v_half, p + 2), (v_min, 2 * ((p + 1) // 3) + 2)):
        program = make(p, m)
        assert validate(program, RULES) == []
        assert max(most_held(program)) <= min(limit, 2 * m)


@pytest.mark.parametrize("name", SCHEDULES)
@given(p=st.integers(1, 7), m=st.integers(1, 15))
def test_any_schedule_of_any_size_is_valid_and_survives_its_text(name: str, p: int, m: int):
    program = SCHEDULES[name](p, m)
    assert validate(program, RULES) == []
    assert from_text(to_text(program), VOCABULARIES) == program


@given(data=st.data())
def test_list_schedules_are_valid_for_any_costs_and_keep_their_limits(data: st.DataObject):
    p, m = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 10))
    placement = data.draw(st.sampled_from([looped(p), looped(p, 2), looped(p, 3), vee(p)]))
    seconds = st.floats(0.1, 5.0)
    cost = st.builds(StageCosts, seconds, seconds, seconds, st.floats(0.0, 2.0))
    costs = data.draw(st.lists(cost, min_size=len(placement), max_size=len(placement)))
    least = len(placement) // p
    limit = st.integers(least, 2 * len(placement))
    limits = data.draw(st.lists(limit, min_size=p, max_size=p))
    program = list_schedule(placement, m, limits, costs)
    assert validate(program, RULES) == []
    assert all(held <= limit for held, limit in zip(most_held(program), limits, strict=True))


@given(p=st.integers(1, 6), v=st.integers(1, 4), m=st.integers(1, 14))
def test_any_number_of_stages_per_rank_is_valid_and_holds_no_more_than_its_form_says(
    p: int, v: int, m: int
):
    first, second = breadth_first(p, m, v), interleaved(p, m, v)
    assert validate(first, RULES) == validate(second, RULES) == []
    assert most_held(first) == [v * m] * p
    assert max(most_held(second)) <= min(v * m, (v - 1) * p + 2 * (p - 1) + 1)


@pytest.mark.parametrize("limit", [2, 3, 4, 6])
def test_the_first_stage_of_a_rank_leaves_memory_to_its_second_one(limit: int):
    """Greedy forwards of stage 0 fill rank 0, and neither its stage 7 nor a backward can start."""
    program = list_schedule(vee(4), 8, [limit] * 4)
    assert validate(program, RULES) == []
    assert max(most_held(program)) == limit


def test_fewer_micro_batches_under_way_are_tried_where_memory_is_short():
    found = [overhead(list_schedule(vee(4), 8, [limit] * 4)) for limit in (2, 4, 5, 6, 8)]
    assert found == sorted(found, reverse=True)
    assert found[1] == pytest.approx(0.2708, abs=1e-4)  # 0.65 with 4 micro-batches under way


def test_limits_that_no_schedule_keeps_are_refused_with_the_least_ones():
    least = r"limits \[1, 5\] are too small for any schedule: .* so use at least \[2, 2\]"
    with pytest.raises(ConfigError, match=least):
        list_schedule(vee(2), 3, [1, 5])
    assert list_schedule(vee(2), 3, [2, 2]).header.num_units == 4
    with pytest.raises(
        ConfigError, match=r"limits must be 2 numbers, one for each rank, got \[1\]"
    ):
        list_schedule(looped(2), 3, [1])
    with pytest.raises(ConfigError, match="costs must have one entry for each of 2 stages, got 1"):
        list_schedule(looped(2), 3, [2, 2], [StageCosts()])
    with pytest.raises(ConfigError, match="num_chunks must be at least 1 stage per rank, got 0"):
        interleaved(2, 2, 0)


@pytest.mark.parametrize(
    "name", ["breadth_first", "interleaved", "zb_h1", "zb_h2", "zbv", "v_half", "v_min"]
)
def test_the_grid_of_a_schedule_is_the_golden_one(name: str):
    program = SCHEDULES[name](3, 6)
    width = 4 * round(simulated(program).seconds)
    text = "\n".join(lanes(simulated(program), 3, width)) + "\n"
    same_as_golden(f"{name}_lanes", text)
    same_as_golden(f"{name}_table", drawn(table(SCHEDULES[name](2, 2))))
