"""`braid train --shard` has the bits of one process, and its checkpoints fit any number of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_train import Curve, last, train

from braid.checkpoint import compare
from braid.errors import ConfigError
from braid.train.config import TrainConfig


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    text = tmp_path / "text.txt"
    picks = torch.randint(0, 40, (1500,), generator=torch.Generator().manual_seed(3)).tolist()
    text.write_text(" ".join(f"word{i}" for i in picks))
    return TrainConfig(
        data=(str(text),),
        steps=5,
        batch=12,
        context=32,
        log_dir=str(tmp_path / "run"),
        eval_every=0,
        checkpoint_every=0,
        sample_bytes=8,
    )


@pytest.mark.parametrize(("stage", "size"), [(1, 2), (2, 2), (3, 2), (3, 3), (3, 1)])
def test_ranks_compute_the_bits_of_one_process(world, config, stage, size):
    alone = replace(config, reference_shards=size, log_dir=config.log_dir + "-alone")
    (expected,) = world(1, train, alone)
    curve: Curve = world(size, train, replace(config, shard=stage))[0]
    assert curve == expected
    assert compare(last(config), last(alone)).equal


@pytest.mark.parametrize(("stage", "then", "size"), [(3, 0, 3), (0, 3, 3), (3, 1, 1)])
def test_a_run_is_resumed_with_another_division(world, config, stage, then, size):
    """On as many shards as before, continuing has the bits of not stopping."""
    world(2, train, replace(config, shard=stage, steps=3))
    begun = last(config)
    straight = replace(config, reference_shards=size, log_dir=config.log_dir + "-alone")
    (expected,) = world(1, train, straight, begun)
    resumed = replace(config, shard=then, log_dir=config.log_dir + "-on")
    assert world(size, train, resumed, begun)[0].losses == expected.losses
    assert [step for step, _ in expected.losses] == [4, 5]


def test_what_cannot_be_combined_is_refused(config):
    with pytest.raises(ConfigError, match="shard must be 0, 1, 2 or 3"):
        replace(config, shard=4)
    with pytest.raises(ConfigError, match="leave one of them out"):
        replace(config, shard=3, reference_shards=2)
    assert replace(config, shard=3, mesh="pp=2,dp=2").check_ranks(4) == 2
