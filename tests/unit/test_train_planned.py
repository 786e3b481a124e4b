"""Options of `braid train` that contradict a plan are refused by the names that were typed."""

from __future__ import annotations

import pytest

from braid.errors import ConfigError
from braid.plan.plan_file import Plan
from braid.train.config import TrainConfig
from braid.train.planned import followed

PLAN = Plan(batch=8, context=128, ranks=2, model="mini")


def test_a_plan_sets_the_options():
    config = followed(TrainConfig(), PLAN)
    assert (config.batch, config.context, config.mesh) == (8, 128, "")


def test_versions_that_chose_a_mesh_are_named():
    config = TrainConfig(versions="stash", mesh="pp=2")
    with pytest.raises(
        ConfigError, match="--versions stash, which trains on --mesh pp=2"
    ) as caught:
        followed(config, PLAN)
    assert "(the plan has none)" in str(caught.value)


def test_all_contradictions_are_named():
    with pytest.raises(ConfigError, match=r"--batch 4 \(the plan has 8\), --mesh dp=2 \("):
        followed(TrainConfig(mesh="dp=2", batch=4), PLAN)
