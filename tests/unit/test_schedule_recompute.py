"""Recomputation as a pass over programs."""

import pytest

from braid.errors import ConfigError
from braid.programs.schedule import from_text, to_text, validate
from braid.programs.schedule.known import RULES, VOCABULARIES
from braid.programs.schedule.pipeline import (
    RECOMPUTE_MODES,
    SCHEDULES,
    gpipe,
    most_held,
    one_f_one_b,
    with_recompute,
)

TRAINING = [name for name in SCHEDULES if name != "forward"]


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("mode", RECOMPUTE_MODES)
def test_programs_with_recomputation_are_valid_and_have_a_text(name, mode):
    program = with_recompute(SCHEDULES[name](4, 8), mode)
    assert not validate(program, RULES)
    assert from_text(to_text(program), VOCABULARIES) == program
    num_again = {"always": 8, "except_last": 7, "never": 0}[mode]
    stages = program.header.num_units
    assert sum(a.kind == "R" for own in program.ranks for a in own) == num_again * stages


def test_with_recomputation_a_rank_holds_the_activations_of_one_micro_batch():
    assert most_held(gpipe(3, 5)) == [5, 5, 5]
    assert most_held(with_recompute(gpipe(3, 5), "always")) == [1, 1, 1]
    assert most_held(with_recompute(gpipe(3, 5), "except_last")) == [2, 2, 2]
    assert most_held(with_recompute(one_f_one_b(3, 5), "always")) == [1, 1, 1]


def test_it_comes_before_the_gradient_is_received():
    kinds = [action.kind for action in with_recompute(gpipe(2, 1), "always").ranks[0]]
    assert kinds == ["F", "send_f", "R", "recv_b", "B"]


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="one of always, except_last, never, got 'often'"):
        with_recompute(gpipe(2, 2), "often")
