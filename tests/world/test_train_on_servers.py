"""`braid train --strategy ps`: the GPT job on a parameter server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from braid.checkpoint import open_last
from braid.errors import ConfigError
from braid.train.config import TrainConfig

QUICK = (
    "--threads",
    "1",
    "--eval-every",
    "0",
    "--sample-bytes",
    "0",
    "--clip",
    "1e9",
    "--batch",
    "4",
)


def train(log_dir: Path, *options: str) -> str:
    command = [sys.executable, "-m", "braid", "train", *options, *QUICK, "--log-dir", str(log_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def weights(log_dir: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_last(log_dir / "checkpoints")
    names = [name for name in checkpoint.manifest.tensors if name.startswith("model/")]
    return {name: checkpoint.read(name) for name in names}


@pytest.mark.launcher
def test_workers_train_like_shards_in_turn_and_resume_on_other_servers(tmp_path):
    said = train(tmp_path / "ps", "-n", "2", "--strategy", "ps", "--steps", "3")
    assert "parameter server: 1 server, staleness 0, replicas 0" in said
    train(tmp_path / "one", "-n", "1", "--reference-shards", "2", "--steps", "3")
    ours, reference = weights(tmp_path / "ps"), weights(tmp_path / "one")
    assert ours.keys() == reference.keys()
    assert all(torch.equal(ours[name], reference[name]) for name in reference)


@pytest.mark.launcher
@pytest.mark.proof
def test_stale_workers_resume_on_another_number_of_servers(tmp_path):
    options = ("-n", "2", "--strategy", "ps", "--staleness", "2")
    train(tmp_path / "ps", *options, "--steps", "3")
    said = train(
        tmp_path / "ps",
        *options,
        *("--servers", "2", "--replicas", "1", "--resume", "auto", "--steps", "6"),
    )
    assert "resumed " in said
    assert open_last(tmp_path / "ps" / "checkpoints").manifest.step == 6


def test_options_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="strategy must be ps or left out, got 'rpc'"):
        TrainConfig(strategy="rpc")
    with pytest.raises(ConfigError, match="staleness needs a parameter server: add --strategy ps"):
        TrainConfig(staleness=1)
    with pytest.raises(
        ConfigError, match="with --mesh: leave one out; --replicas 1 needs 2 servers, got"
    ):
        TrainConfig(strategy="ps", mesh="dp=2", replicas=1)
