"""What one rank does in a collective program, as slices of a buffer."""

from __future__ import annotations

import pytest

from braid.comm.algorithms.program_stages import ProgramStage, stages
from braid.errors import ConfigError
from braid.programs.schedule.collective import algorithm, program


def test_blocks_beside_each_other_travel_as_one_slice():
    made = program(algorithm("halving_doubling", "all_reduce", 4))
    sent = [move for stage in stages(made, 0, 64) for move in stage.sends]
    assert [(move.peer, move.parts) for move in sent] == [
        (2, (slice(32, 64),)),
        (1, (slice(16, 32),)),
        (1, (slice(0, 16),)),
        (2, (slice(0, 32),)),
    ]


def test_a_buffer_without_elements_sends_nothing():
    found = stages(program(algorithm("ring", "all_reduce", 3)), 0, 0)
    assert found == (ProgramStage((), (), ()),) * 4


def test_blocks_of_all_to_all_must_be_equal():
    made = program(algorithm("pairwise", "all_to_all", 3))
    with pytest.raises(ConfigError, match="pass a multiple of 6"):
        stages(made, 0, 10)
