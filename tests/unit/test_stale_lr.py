"""Learning rates of stages with old gradients begin divided by their age, and become whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import ConfigError
from braid.parallel.pipeline.asynchronous import stale_lr_scale
from braid.train.config import TrainConfig


def test_the_rate_grows_from_a_part_by_age_to_the_whole():
    scales = [stale_lr_scale(9, step, 100) for step in (0, 50, 100, 1000)]
    assert scales == [1 / 9, pytest.approx(1 / 3), 1, 1]
    assert stale_lr_scale(9, 0, 0) == 1


@given(st.integers(0, 64), st.integers(0, 300), st.integers(0, 200))
def test_old_gradients_never_have_a_larger_rate_than_later_or_younger_ones(age, step, anneal_steps):
    scale = stale_lr_scale(age, step, anneal_steps)
    assert 1 / max(1, age) <= scale <= 1
    assert scale <= stale_lr_scale(age, step + 1, anneal_steps)
    assert scale >= stale_lr_scale(age + 1, step, anneal_steps)
    assert scale == 1 or age > 1


@pytest.mark.parametrize("numbers", [(-1, 0, 1), (1, -1, 1), (1, 0, -1)])
def test_negative_numbers_are_refused(numbers):
    with pytest.raises(ConfigError, match=r"must be at least 0, got -?\d, -?\d and -?\d"):
        stale_lr_scale(*numbers)


def test_a_training_without_versions_refuses_it():
    with pytest.raises(ConfigError, match="stale_lr_steps=5 needs an asynchronous pipeline: add"):
        TrainConfig(mesh="pp=2", stale_lr_steps=5)
    with pytest.raises(ConfigError, match="stale_lr_steps must be at least 0, got -1"):
        TrainConfig(mesh="pp=2", versions="stash", stale_lr_steps=-1)
