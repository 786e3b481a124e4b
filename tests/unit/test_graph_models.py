"""Models of many kinds in plain torch are captured, and their replay in parts has their bits."""

from __future__ import annotations

import pytest

from capture_checks import check_replay
from plain_models import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_the_replay_in_parts_has_the_outputs_and_gradients_of_the_model(name):
    make, batch = MODELS[name]
    check_replay(make, batch)
