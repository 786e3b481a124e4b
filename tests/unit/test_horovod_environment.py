"""Claims of braid.compat.horovod.environment and variables."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.compat.horovod.environment import HorovodEnvironment
from braid.compat.horovod.fusion import FusionOptions, StateOptions, TuneOptions
from braid.compat.horovod.variables import LEVELS, VARIABLES, WITHOUT_MEANING
from braid.errors import ConfigError


def test_an_empty_environment_means_the_engines_own_defaults():
    assert (
        HorovodEnvironment.of({"HOME": "/root", "HOROVOD_CYCLE_TIME": ""}) == HorovodEnvironment()
    )
    assert HorovodEnvironment().options() == FusionOptions()


def test_every_variable_has_a_field_and_every_field_a_variable():
    named = [field.name for field in fields(HorovodEnvironment) if field.name != "notes"]
    assert sorted(variable.field for variable in VARIABLES.values()) == sorted(named)
    assert not set(VARIABLES) & set(WITHOUT_MEANING)


def test_variables_become_options_of_the_engine():
    environment = HorovodEnvironment.of(
        {
            "HOROVOD_FUSION_THRESHOLD": "33554432",
            "HOROVOD_CYCLE_TIME": "3.5",
            "HOROVOD_CACHE_CAPACITY": "0",
            "HOROVOD_DISABLE_GROUP_FUSION": "1",
            "HOROVOD_STALL_CHECK_TIME_SECONDS": "5",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "60",
            "HOROVOD_HIERARCHICAL_ALLREDUCE": "1",
        }
    )
    state = StateOptions(
        threshold_bytes=32 << 20,
        cache_capacity=0,
        split_groups=True,
        stall_check_s=5.0,
        stall_shutdown_s=60.0,
    )
    assert environment.options() == FusionOptions(state=state, cycle_time_s=0.0035)
    assert environment.options(spans_hosts=True).algorithm == "hierarchical"


def test_a_stall_check_that_is_switched_off_neither_tells_nor_ends():
    environment = HorovodEnvironment.of(
        {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9"}
    )
    assert environment.options().state == StateOptions(stall_check_s=0.0, stall_shutdown_s=0.0)


def test_a_timeline_that_the_program_starts_is_none_yet():
    assert HorovodEnvironment.of({"HOROVOD_TIMELINE": "DYNAMIC"}) == HorovodEnvironment()


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ConfigError) as caught:
        HorovodEnvironment.of(
            {
                "HOROVOD_FUSION_THRESHOLD": "64MB",
                "HOROVOD_CYCLE_TIME": "-1",
                "HOROVOD_LOG_LEVEL": "loud",
                "HOROVOD_AUTOTUNE": "maybe",
            }
        )
    assert str(caught.value) == (
        "HOROVOD_AUTOTUNE must be 0 or 1, got 'maybe'; HOROVOD_CYCLE_TIME must be milliseconds, 0 or more, got '-1'; "
        "HOROVOD_FUSION_THRESHOLD must be a number of bytes, 0 or more, got '64MB'; "
        "HOROVOD_LOG_LEVEL must be one of trace, debug, info, warning, error, fatal, got 'loud'"
    )


def test_a_negative_field_is_refused():
    with pytest.raises(ConfigError, match="cycle_time_ms must be 0 or more, got -1"):
        HorovodEnvironment(cycle_time_ms=-1)


def test_a_name_that_is_not_known_is_noted_with_the_closest_one():
    found = HorovodEnvironment.of({"HOROVOD_FUSION_TRESHOLD": "1", "HOROVOD_XYZZY": "1"})
    assert found.notes == (
        "HOROVOD_FUSION_TRESHOLD is not a variable of Horovod and has no effect: did you mean HOROVOD_FUSION_THRESHOLD?",
        "HOROVOD_XYZZY is not a variable of Horovod and has no effect",
    )


def test_autotune_is_a_search_with_horovods_numbers_unless_others_are_said():
    assert HorovodEnvironment.of({"HOROVOD_AUTOTUNE": "0"}).options().autotune is None
    assert HorovodEnvironment.of({"HOROVOD_AUTOTUNE": "1"}).options().autotune == TuneOptions()
    found = HorovodEnvironment.of(
        {"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "7"}
    )
    assert found.options().autotune == TuneOptions(max_samples=7)


def test_autotune_leaves_alone_what_is_said():
    said = {"HOROVOD_AUTOTUNE": "1", "HOROVOD_FUSION_THRESHOLD": "5"}
    assert HorovodEnvironment.of(said).options().autotune == TuneOptions(threshold=False)
    said["HOROVOD_CYCLE_TIME"] = "2"
    assert HorovodEnvironment.of(said).options().autotune is None
    del said["HOROVOD_FUSION_THRESHOLD"]
    assert HorovodEnvironment.of(said).options().autotune == TuneOptions(cycle_time=False)


def test_variables_without_meaning_are_known():
    environ = dict.fromkeys([*WITHOUT_MEANING, "HOROVOD_WITH_PYTORCH"], "1")
    assert HorovodEnvironment.of(environ) == HorovodEnvironment()


def test_the_first_rank_alone_warns_of_notes(monkeypatch):
    monkeypatch.setenv("HOROVOD_XYZZY", "1")
    monkeypatch.setenv("RANK", "1")
    HorovodEnvironment.from_os()
    monkeypatch.setenv("RANK", "0")
    with pytest.warns(UserWarning, match="HOROVOD_XYZZY is not a variable"):
        HorovodEnvironment.from_os()


@given(
    st.integers(0, 1 << 40),
    st.floats(0, 1e6),
    st.booleans(),
    st.sampled_from(LEVELS),
    st.booleans(),
)
def test_what_is_written_is_read_back(size, time_ms, mark, level, by_hosts):
    environ = {
        "HOROVOD_FUSION_THRESHOLD": str(size),
        "HOROVOD_CYCLE_TIME": repr(time_ms),
        "HOROVOD_TIMELINE_MARK_CYCLES": str(int(mark)),
        "HOROVOD_LOG_LEVEL": level.upper(),
        "HOROVOD_HIERARCHICAL_ALLREDUCE": str(by_hosts),
    }
    assert HorovodEnvironment.of(environ) == HorovodEnvironment(
        fusion_threshold_bytes=size,
        cycle_time_ms=time_ms,
        timeline_mark_cycles=mark,
        log_level=level,
        hierarchical_allreduce=by_hosts,
    )


@given(st.dictionaries(st.sampled_from([*VARIABLES]), st.text(max_size=12)))
def test_any_text_is_read_or_refused_by_name(environ):
    try:
        HorovodEnvironment.of(environ)
    except ConfigError as exc:
        assert any(name in str(exc) for name in environ)  # noqa: PT017 - both ways are right


@pytest.mark.parametrize(
    ("variables", "spans_hosts", "free_cores", "seconds"),
    [
        ({}, False, True, 0.001),
        ({}, True, False, 0.001),
        ({}, False, False, 0.25),
        ({"HOROVOD_CYCLE_TIME": "2"}, False, False, 0.002),
    ],
)
def test_operations_are_collected_until_waited_for_where_all_cores_compute(
    variables, spans_hosts, free_cores, seconds
):
    environment = HorovodEnvironment.of(variables)
    options = environment.options(spans_hosts=spans_hosts, free_cores=free_cores)
    assert options.cycle_time_s == seconds
