"""A profile of two ranks, the plan that follows from it, and the training that follows the plan."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from braid.cli import main
from braid.errors import ConfigError
from braid.plan.plan_file import Plan, read_plan
from braid.plan.profiling import MeasuredModel, PerRows, Profile, read_profile
from braid.train.config import TrainConfig
from braid.train.planned import mesh_here
from braid.train.profile_request import ProfileRequest

SMALL = ("--model", "tiny", "--context", "16")
RUN = ("--steps", "4", "--eval-every", "0", "--eval-samples", "4", "--sample-bytes", "0")


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("profile") / "profile.json"
    options = ("--rows", "1", "4", "--seconds", "0.2", "--out", str(file))
    assert main(["profile", "-n", "2", *SMALL, *options]) == 0
    return file


def test_ranks_measure_layers_together_whole_and_shared(profile: Path) -> None:
    read = read_profile(profile)
    assert read.host is not None
    assert set(read.host.collectives) == {"all_reduce/2", "reduce_scatter/2", "all_gather/2"}
    assert read.host.ranks == 2
    assert read.host.action_s >= 0  # a difference of times
    assert set(read.shared) == {2}
    whole, half = read.layers[1], read.shared[2][1]
    assert half.flops_per_row == pytest.approx(whole.flops_per_row / 2, rel=0.1)
    assert half.reduced_bytes.per_row == 2 * 4 * 16 * 64
    assert half.workspace_bytes.of(4) > 0
    assert whole.kv_bytes.per_row == 2 * half.kv_bytes.per_row == 2 * 4 * 16 * 64
    assert MeasuredModel(read).sequence_sizes == [1, 2, 4, 8]
    # a profile that does not have these bytes
    older = msgspec.structs.replace(
        read, layers=[msgspec.structs.replace(x, kv_bytes=PerRows()) for x in read.layers]
    )
    assert MeasuredModel(older).sequence_sizes == (1,)
    assert "does not mark layers with attention" in MeasuredModel(older).left_out[0]


def test_each_number_of_ranks_has_its_fastest_mesh(
    profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = read_profile(profile)
    asked = []

    def cached(request: ProfileRequest) -> tuple[Profile, str]:
        asked.append((request.num_ranks, request.rows))
        return read, ""

    monkeypatch.setattr("braid.train.planned.cached_profile", cached)
    config = TrainConfig(model="tiny", context=16, batch=8, microbatches=4, min_ranks=1)
    assert mesh_here(config, 2, 2) in {"dp=2", "pp=2,dp=1"}
    assert mesh_here(config, 1, 2) == "dp=1"  # which needs no profile
    assert asked == [(2, (1, 4))]
    with pytest.raises(ConfigError, match="--batch 8 cannot be divided into 3 micro-batches"):
        mesh_here(config, 2, 3)
    assert main(["train", "-n", "2", "--min-ranks", "1", "--mesh", "dp=2", "--plan", "auto"]) == 2


def test_a_training_follows_a_plan_and_compares_itself_with_it(
    profile: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    command = ["plan", "--profile", str(profile), "--batch", "8"]
    assert main([*command, "--model", "mini"]) == 2
    assert "is a profile of tiny, got --model mini" in capfd.readouterr().err
    assert main([*command, "--plan", str(file)]) == 0
    words = capfd.readouterr().out.split()  # a narrow table has a title of two lines
    assert "2 ranks: layers measured, machines measured" in " ".join(words)
    plan = read_plan(file)
    assert isinstance(plan, Plan)
    assert plan.ranks == 2
    # two micro-batches on each of two replicas: a pipeline of one stage
    changed = msgspec.structs.replace(
        plan, mesh="pp=1,dp=2", microbatches=2, recompute="always", shard=0, balance=()
    )
    changed.write(file)
    log_dir = tmp_path / "run"
    assert (
        main(["train", "--plan", str(file), "--model", "tiny", *RUN, "--log-dir", str(log_dir)])
        == 0
    )
    shown = capfd.readouterr().out
    assert "ms a step, measured" in shown
    assert "waiting" in shown
    lines = (log_dir / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines if '"kind":"step"' in line]
    assert len(steps) == 4
    other = tmp_path / "other"
    options = ("-n", "2", "--batch", "8", *SMALL, *RUN, "--log-dir", str(other))
    assert main(["train", *options]) == 0
    lines = (other / "metrics.jsonl").read_text().splitlines()
    same = [json.loads(line)["loss"] for line in lines if '"kind":"step"' in line]
    # the same samples, whose gradients are added in another order
    assert [step["loss"] for step in steps] == pytest.approx(same, rel=1e-4)


def test_auto_needs_the_number_of_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--plan", "auto"]) == 2
    assert "add -n 2" in capfd.readouterr().err


@pytest.mark.proof
def test_a_parameter_server_is_planned_if_it_was_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "profile.json")
    options = ("--rows", "1", "4", "--seconds", "0.2", "--out", file)
    assert main(["profile", "-n", "2", "--servers", *SMALL, *options]) == 0
    host = read_profile(file).host
    assert host is not None
    assert host.collectives["push_pull/2"].of(1e5) > 0
    assert main(["plan", "--profile", file, "--batch", "8", "--top", "100"]) == 0
    assert "parameter server" in capfd.readouterr().out
