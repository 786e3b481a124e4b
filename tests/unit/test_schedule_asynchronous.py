"""Programs of asynchronous pipelines: valid, as old as the papers say, and checked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import ConfigError
from braid.programs.schedule import from_text, to_text, validate
from braid.programs.schedule.known import RULES, VOCABULARIES
from braid.programs.schedule.pipeline import (
    asynchronous,
    most_held,
    num_of_step,
    pipedream,
    staleness,
)

SMALL = """program asynchronous own train units 2 indices 2
rank 0
  F0.0~0 send_f0.0>1
  F0.1~0 send_f0.1>1
  recv_b0.0<1 B0.0~0 STEP0.0~1
  recv_b0.1<1 B0.1~0 STEP0.1~2
rank 1
  recv_f1.0<0 F1.0~0 B1.0~0 send_b1.0>0 STEP1.0~1
  recv_f1.1<0 F1.1~1 B1.1~1 send_b1.1>0 STEP1.1~2
"""


def test_the_small_program_is_the_documented_one():
    assert to_text(pipedream(2, 2)._replace()).replace(" pipedream ", " own ") == SMALL
    assert not validate(from_text(SMALL, VOCABULARIES), RULES)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(1, 20),
    st.sampled_from(["stash", "vertical_sync", "2bw"]),
    st.integers(1, 5),
)
def test_programs_are_valid_and_use_each_gradient_once(replicas, count, versions, every):
    try:
        program = asynchronous(replicas, count, versions=versions, every=every)
    except ConfigError:
        assert versions != "stash"
        return
    assert not validate(program, RULES)
    assert from_text(to_text(program), VOCABULARIES) == program
    used = dict.fromkeys(range(len(replicas)), 0)
    for stage, own in enumerate(replicas):
        rank = sum(replicas[:stage])
        steps = [a for a in program.ranks[rank] if a.kind == "STEP"]
        used[stage] = sum(num_of_step(step, own, every, count) for step in steps)
    assert set(used.values()) == {count}
    assert [sum(ages.values()) for ages in staleness(program).values()] == [count] * len(replicas)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_gradients_are_as_old_as_the_papers_say(num_stages):
    count = 4 * num_stages
    stash = pipedream(num_stages, count)
    for stage, ages in staleness(stash).items():
        assert max(ages) == num_stages - 1 - stage  # w_s, so w_s + 1 versions
        assert most_held(stash)[stage] == num_stages - stage
    same = asynchronous((1,) * num_stages, count, versions="vertical_sync")
    for ages in staleness(same).values():
        assert max(ages) == num_stages - 1
    two = asynchronous((1,) * num_stages, count, versions="2bw", every=num_stages)
    for ages in staleness(two).values():
        assert ages == {0: num_stages, 1: count - num_stages}


def test_replicas_need_fewer_versions():
    program = asynchronous((3, 1), 12)
    assert {stage: max(ages) for stage, ages in staleness(program).items()} == {0: 1, 1: 0}


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("F0.1~0", "F0.1~1", "uses version 1, and 0 steps were made"),
        ("B0.1~0", "B0.1~1", "uses version 1, and its forward used 0"),
        ("STEP0.1~2", "STEP0.1~3", "makes version 3, and version 2 is next"),
        (" STEP0.1~2", "", "ends with gradients of stage 0 that no STEP has used"),
        ("B1.1~1 send_b1.1>0 STEP1.1~2", "send_b1.1>0", "no rank does B1.1"),
        ("F1.1~1", "F1.1~1 F1.1~1", "a second time"),
        ("recv_b0.1<1 B0.1~0", "B0.1~0 recv_b0.1<1", "comes before recv_b"),
        ("STEP0.1~2", "STEP0.1~2 STEP0.1~3 STEP0.1~4", "which can only be this rank's last"),
        ("train units", "infer units", "the header must name train"),
        ("F0.1~0", "F0.2~0", "is not of a stage below 2 and a micro-batch below 2"),
        ("recv_f1.1<0 F1.1~1 B1.1~1 send_b1.1>0 STEP1.1~2", "B1.1~0", "has no forward before it"),
    ],
)
def test_each_rule_is_broken_by_a_small_program(old, new, text):
    assert old in SMALL
    violations = validate(from_text(SMALL.replace(old, new), VOCABULARIES), RULES)
    assert text in "; ".join(map(str, violations))


def test_ranks_of_a_stage_must_make_the_same_steps():
    text = (
        to_text(asynchronous((2,), 4)).replace("STEP0.2~2", "F0.0~0").replace("  F0.0~0\n", "", 1)
    )
    violations = validate(from_text(text, VOCABULARIES), RULES)
    assert "ranks of stage 0 make [1, 2] steps" in "; ".join(map(str, violations))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (((0, 1), 4, "stash", 1), "must be at least 1"),
        (((1, 1), 0, "stash", 1), "at least 1 stage and 1 micro-batch"),
        (((2, 1), 4, "vertical_sync", 1), "the same number of replicas"),
        (((1, 1), 4, "2bw", 1), "every to be at least 2 micro-batches"),
        (((1, 1), 4, "latest", 1), "must be one of stash, vertical_sync, 2bw"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, text):
    replicas, count, versions, every = arguments
    with pytest.raises(ConfigError, match=text):
        asynchronous(replicas, count, versions=versions, every=every)
