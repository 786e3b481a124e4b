"""Trainings: equal to one process, resumed to the bit, stopped together, clear when they cannot go on."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
import pytest
import torch

from braid.checkpoint import compare, load, ls, read_manifest, saving
from braid.cli import main
from braid.comm import Group
from braid.errors import CheckpointError, ConfigError
from braid.programs.schedule.pipeline import to_csv, v_min
from braid.train.config import TrainConfig
from braid.train.corpus import from_files
from braid.train.loop import Stopping, Trainer, TrainingDivergedError
from braid.train.reports import Reporter


class Curve(NamedTuple):
    """What a training reported: (step, loss) pairs, and the kind of every report."""

    losses: list[tuple[int, float]]
    kinds: list[str]
    signum: int


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    text = tmp_path / "text.txt"
    generator = torch.Generator().manual_seed(3)
    words = [f"word{i}" for i in range(40)]
    picks = torch.randint(0, 40, (1500,), generator=generator).tolist()
    text.write_text(" ".join(words[i] for i in picks))
    return TrainConfig(
        data=(str(text),),
        steps=9,
        batch=12,
        context=32,
        log_dir=str(tmp_path / "run"),
        eval_every=0,
        checkpoint_every=0,
        sample_bytes=8,
    )


def train(
    group: Group,
    config: TrainConfig,
    resume: str = "",
    stop_at: int = -1,
    poison_at: tuple[int, int] = (-1, -1),
) -> Curve:
    """Train; `stop_at` is the step in which rank 0 is told to stop; `poison_at` (rank, step) gets a NaN."""
    stopping = Stopping()

    def listener(kind: str, seq: int) -> None:
        if kind == "step" and seq == stop_at and group.rank == 0:
            stopping(signal.SIGTERM, None)
        if kind == "step" and (group.rank, seq) == poison_at:
            with torch.no_grad():
                trainer._model.token.weight[0] = float("nan")
                trainer._model.norm.weight[0] = float("nan")

    group.context.events.listener = listener
    path = Path(config.log_dir) / f"metrics-{group.size}-{config.reference_shards}-{resume != ''}"
    metrics = path if group.rank == 0 else None
    with Reporter(metrics, io.StringIO(), group.context.clock) as reporter:
        trainer = Trainer(config, from_files(config.data), group, reporter, stopping)
        if resume:
            trainer.resume(load(resume, group=group))
        signum = trainer.run()
    if metrics is None:
        return Curve([], [], signum)
    reports = [msgspec.json.decode(line) for line in metrics.read_bytes().splitlines()]
    losses = [(r["step"], r["loss"]) for r in reports if r["kind"] == "step"]
    return Curve(losses, [r["kind"] for r in reports if r["kind"] != "step"], signum)


def last(config: TrainConfig) -> str:
    return ls(config.checkpoints)[-1].path


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_compute_the_same_bits_as_one_process_that_runs_their_shards(world, config, size):
    alone = replace(config, reference_shards=size, log_dir=config.log_dir + "-alone")
    (expected,) = world(1, train, alone)
    curve, *others = world(size, train, config)
    assert curve == expected
    assert [other.signum for other in others] == [0] * (size - 1)
    assert curve.kinds == ["start", "eval", "checkpoint", "sample", "end"]
    assert compare(last(config), last(alone)).equal
    assert curve.losses[-1][1] < curve.losses[0][1]
    numerics = read_manifest(last(config)).numerics
    assert (numerics["sum_order"], numerics["algorithms"]["all_reduce"][0][0]) == ("rank", 0)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "plan.csv"])
def test_a_pipeline_trains_like_one_process_and_is_resumed_without_one(
    world, config, schedule, tmp_path
):
    if schedule == "plan.csv":
        schedule = str(tmp_path / "plan.csv")
        Path(schedule).write_text(to_csv(v_min(2, config.microbatches)))
    piped = replace(config, mesh="pp=2", schedule=schedule, model="mini", steps=4)
    alone = replace(piped, mesh="", schedule="1f1b", log_dir=config.log_dir + "-alone")
    (expected,) = world(1, train, alone)
    curve, other = world(2, train, piped)
    assert [step for step, _ in curve.losses] == [1, 2, 3, 4]
    losses = [loss for _, loss in expected.losses]
    assert [loss for _, loss in curve.losses] == pytest.approx(losses, rel=1e-4)
    assert (curve.kinds, other.signum) == (["start", "eval", "checkpoint", "sample", "end"], 0)
    more = replace(alone, steps=6)
    (longer,) = world(1, train, more, last(alone))
    begun = last(piped)
    (without,) = world(1, train, replace(more, log_dir=config.log_dir + "-on"), begun)
    resumed = world(2, train, replace(piped, steps=6), begun)[0]
    for continued in (resumed, without):
        assert [step for step, _ in continued.losses] == [5, 6]
        for (_, loss), (_, wanted) in zip(continued.losses, longer.losses, strict=True):
            assert loss == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize(
    ("mesh", "recompute"),
    [("pp=2,dp=2", "never"), ("dp=2,pp=1", "never"), ("pp=2,dp=1", "2"), ("pp=2,dp=1", "speed")],
)
def test_replicas_of_a_pipeline_train_like_one_process(world, config, mesh, recompute):
    piped = replace(config, mesh=mesh, recompute=recompute, model="mini", steps=3, microbatches=2)
    alone = replace(
        piped, mesh="", recompute="never", log_dir=config.log_dir + "-alone", reference_shards=2
    )
    (expected,) = world(1, train, alone)
    curves = world(4 if mesh == "pp=2,dp=2" else 2, train, piped)
    losses = [loss for _, loss in expected.losses]
    assert [loss for _, loss in curves[0].losses] == pytest.approx(losses, rel=1e-4)
    assert curves[0].kinds == ["start", "eval", "checkpoint", "sample", "end"]


@pytest.mark.parametrize(("recompute", "shard"), [("memory", 0), ("memory", 3), ("speed", 0)])
def test_recomputed_blocks_train_with_the_bits_of_a_plain_run(world, config, recompute, shard):
    plain = replace(config, model="mini", steps=3, shard=shard)
    expected, *_ = world(2, train, plain)
    again = replace(plain, recompute=recompute, log_dir=config.log_dir + "-again")
    found, *_ = world(2, train, again)
    assert found.losses == expected.losses
    assert found.kinds == expected.kinds


@pytest.mark.parametrize(
    ("mesh", "ranks", "shard"),
    [("tp=2,dp=1", 2, 0), ("cp=2", 2, 0), ("pp=2,tp=2", 4, 0), ("pp=2,dp=2", 4, 2)],
)
def test_divided_layers_and_sequences_train_like_one_process_and_are_resumed_without(
    world, config, mesh, ranks, shard
):
    divided = replace(config, mesh=mesh, model="mini", steps=4, shard=shard)
    alone = replace(divided, mesh="", shard=0, log_dir=config.log_dir + "-alone")
    (expected,) = world(1, train, alone)
    curve, *_ = world(ranks, train, divided)
    losses = [loss for _, loss in expected.losses]
    assert [loss for _, loss in curve.losses] == pytest.approx(losses, rel=1e-4)
    assert curve.kinds == ["start", "eval", "checkpoint", "sample", "end"]
    more = replace(alone, steps=6)
    (longer,) = world(1, train, more, last(alone))
    begun = last(divided)
    (without,) = world(1, train, replace(more, log_dir=config.log_dir + "-on"), begun)
    resumed = world(ranks, train, replace(divided, steps=6), begun)[0]
    elsewhere = replace(divided, mesh="cp=2", shard=0, steps=6, log_dir=config.log_dir + "-there")
    other = world(2, train, elsewhere, begun)[0]
    for continued in (resumed, without, other):
        assert [step for step, _ in continued.losses] == [5, 6]
        for (_, loss), (_, wanted) in zip(continued.losses, longer.losses, strict=True):
            assert loss == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize(
    ("mesh", "ranks", "text"),
    [
        ("pp=2", 3, "--mesh pp=2 has 2 ranks, got -n 3"),
        ("pp=2,dp=2", 2, "--mesh pp=2,dp=2 has 4 ranks, got -n 2"),
        ("ep=2", 2, "--mesh ep=2: ep is not supported"),
        ("cp=2,zz=2", 4, "--mesh cp=2,zz=2: zz is not supported: use pp=N for pipeline"),
        ("cp=3", 3, "cannot be divided into 6 equal chunks, two per rank: use --context"),
        ("tp=8", 8, "has . heads, which cannot be divided over 8 ranks; valid: 1, 2"),
        ("pp", 2, "a mesh is written as pp=2,dp=4"),
    ],
)
def test_a_mesh_that_cannot_be_trained_on_is_refused(config, mesh, ranks, text, tmp_path):
    with pytest.raises(ConfigError, match=text):
        replace(config, mesh=mesh).check_ranks(ranks)
    with pytest.raises(ConfigError, match="--schedule zbv needs a pipeline: add --mesh pp=2"):
        replace(config, schedule="zbv").check_ranks(2)
    with pytest.raises(ConfigError, match="--recompute always needs a pipeline"):
        replace(config, recompute="always").check_ranks(2)
    with pytest.raises(ConfigError, match=r"recompute must be one of always.*, memory, speed or a"):
        replace(config, recompute="often")
    with pytest.raises(ConfigError, match="--recompute memory is for training without --mesh"):
        replace(config, recompute="memory", mesh="pp=2").check_ranks(2)
    with pytest.raises(ConfigError, match="--recompute speed needs a pipeline"):
        replace(config, recompute="speed", mesh="tp=2").check_ranks(2)
    with pytest.raises(
        ConfigError, match=r"--versions stash needs --recompute always.*, got memory"
    ):
        replace(config, recompute="memory", versions="stash")
    with pytest.raises(ConfigError, match="--strategy ps cannot be combined with --recompute"):
        replace(config, recompute="memory", strategy="ps")
    with pytest.raises(ConfigError, match="zbv on 4 ranks has 8 stages, and tiny has 4 layers"):
        replace(config, schedule="zbv", mesh="pp=4").check_ranks(4)
    with pytest.raises(ConfigError, match="choose one of gpipe, 1f1b"):
        replace(config, schedule="nope")
    file = tmp_path / "plan.csv"
    file.write_text("0F0,0B0\n1F0,1B0\n")
    piped = replace(config, schedule=str(file), mesh="pp=2")
    with pytest.raises(ConfigError, match="is for 2 ranks and 1 micro-batches, got 2 and 4"):
        piped.check_ranks(2)
    assert replace(piped, microbatches=1).check_ranks(2) == 1
    file.write_text("0F0\n1F0,1B0\n")
    with pytest.raises(ConfigError, match=r"plan.csv, not a valid .*row 1: ends without B0.0"):
        piped.check_ranks(2)


@pytest.mark.parametrize("balance", ["3,1", "time", "size"])
def test_balanced_stages_train_like_even_ones(world, config, balance):
    even = replace(config, mesh="pp=2", steps=2, log_dir=config.log_dir + "-even")
    expected = world(2, train, even)[0]
    curve = world(2, train, replace(config, mesh="pp=2", steps=2, balance=balance))[0]
    assert [loss for _, loss in curve.losses] == pytest.approx(
        [loss for _, loss in expected.losses], rel=1e-5
    )
    start = json.loads((Path(config.log_dir) / "metrics-2-0-False").read_text().splitlines()[0])
    pictures = [note for note in start["notes"] if note.startswith("balance by")]
    assert len(pictures) == (balance != "3,1")
    for picture in pictures:
        assert picture.count("stage ") == 2
        assert picture.count(" TransformerBlock ") == 2


@pytest.mark.parametrize(
    ("balance", "text"),
    [
        (
            "even",
            "balance must be time, size or the layers of each stage such as 3,4,3, got 'even'",
        ),
        ("2,3", "has 2 stages and 5 layers: .* for each of 2 stages, 4 layers in all"),
        ("4,0", "at least 1 layer"),
        ("1,2,1", "has 3 stages and 4 layers"),
    ],
)
def test_a_balance_that_does_not_fit_is_refused(config, balance, text):
    with pytest.raises(ConfigError, match=text):
        replace(config, mesh="pp=2", balance=balance).check_ranks(2)
    with pytest.raises(ConfigError, match="--balance time needs a pipeline: add --mesh pp=2"):
        replace(config, balance="time").check_ranks(2)


@pytest.mark.parametrize("size", [1, 2])
def test_a_training_that_was_stopped_in_mid_epoch_continues_to_the_bit(world, config, size):
    whole = replace(config, log_dir=config.log_dir + "-whole")
    expected = world(size, train, whole)[0]
    first = world(size, train, config, "", 4)[0]
    assert first.signum == signal.SIGTERM
    assert first.losses == expected.losses[:4]
    assert first.kinds == ["start", "checkpoint", "end"]
    second = world(size, train, config, config.checkpoints)[0]
    assert first.losses + second.losses == expected.losses
    assert compare(last(config), last(whole)).equal
    assert read_manifest(last(config)).state == read_manifest(last(whole)).state


def test_a_signal_on_one_rank_stops_all_at_the_same_step(world, config):
    assert [c.signum for c in world(3, train, config, "", 3)] == [signal.SIGTERM] * 3
    assert [line.step for line in ls(config.checkpoints)] == [3]


def test_another_number_of_ranks_continues_with_the_same_samples(world, config):
    whole = replace(config, log_dir=config.log_dir + "-whole")
    expected = world(2, train, whole)[0]
    first = world(2, train, config, "", 4)[0]
    second = world(3, train, config, config.checkpoints)[0]
    found = first.losses + second.losses
    assert [step for step, _ in found] == [step for step, _ in expected.losses]
    # The same samples, summed in another order. A mean of 384 losses of about 5 in float32 is off by at most some
    # 384 eps = 2e-5 relative; five steps of at most lr = 3e-3 a weight amplify that by little. Other samples would
    # differ by the spread of losses between batches, which is above 1e-2 here.
    for (_, ours), (_, theirs) in zip(found, expected.losses, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4)
    state, other = (read_manifest(last(c)).state["sampler"] for c in (config, whole))
    assert state == other


def test_a_loss_that_is_no_number_names_rank_and_step(world, config):
    with pytest.raises(TrainingDivergedError, match="loss is nan on rank 1 at step 4") as e:
        world(2, train, config, "", -1, (1, 4))
    assert len({str(error) for error in e.value.rank_errors.values()}) == 1
    assert len(e.value.rank_errors) == 2


@pytest.mark.parametrize("failing", [(2, 4), (8, 9)])
def test_only_the_last_checkpoint_must_succeed(world, config, monkeypatch, failing):
    def save(*args: object, step: int, **options: object) -> Path:
        if step in failing:
            msg = f"cannot save step {step}: the disk is full"
            raise CheckpointError(msg)
        return saving.save(*args, step=step, **options)

    monkeypatch.setattr("braid.checkpoint.background.save", save)
    config = replace(config, checkpoint_every=2)
    if config.steps in failing:
        with pytest.raises(CheckpointError, match="cannot save step 9: the disk is full"):
            world(2, train, config)
    else:
        world(2, train, config)
    assert {entry.step for entry in ls(config.checkpoints)}.isdisjoint(failing)
    assert last(config).endswith("-00000009" if config.steps not in failing else "-00000006")


def test_a_checkpoint_of_other_data_is_refused(world, config, tmp_path):
    world(1, train, replace(config, steps=2))
    other = tmp_path / "other.txt"
    other.write_text("something else entirely\n" * 400)
    with pytest.raises(CheckpointError, match=r"was trained on other data .* than other.txt"):
        world(1, train, replace(config, data=(str(other),)), config.checkpoints)


def test_a_checkpoint_of_another_model_is_a_table(world, config):
    world(1, train, replace(config, steps=2))
    with pytest.raises(CheckpointError, match=r"tensors differ:\n  tensor +checkpoint +here\n"):
        world(2, train, replace(config, model="mini"), config.checkpoints)


def test_another_batch_is_refused_on_resume(world, config):
    world(1, train, replace(config, steps=2))
    with pytest.raises(CheckpointError, match=r"batch_size 12 \(here 6\)"):
        world(1, train, replace(config, batch=6), config.checkpoints)


def test_a_finished_training_has_nothing_to_resume(world, config):
    world(1, train, replace(config, steps=2))
    with pytest.raises(ConfigError, match=r"is at step 2 of 2. Ask for more --steps"):
        world(1, train, replace(config, steps=2), config.checkpoints)


def test_a_context_longer_than_the_text_is_refused(world, config):
    with pytest.raises(
        ConfigError, match=r"for this held-out text of 1014, got 2000: choose a shorter --context"
    ):
        world(1, train, replace(config, context=2000))


# Through the launcher, with real processes


def command(config: TrainConfig, *more: str, n: int = 2) -> list[str]:
    given = ["--data", *config.data, "--batch", "12", "--context", "32", "--sample-bytes", "8"]
    return ["train", "-n", str(n), "--log-dir", config.log_dir, "--threads", "1", *given, *more]


@pytest.mark.launcher
@pytest.mark.procs
def test_the_command_trains_stops_and_resumes(config, capfd):
    """SIGTERM to the parent: a checkpoint at the next step, exit code 143, a resume line that works."""
    words = command(config, "--steps", "100000", "--eval-every", "0", "--checkpoint-every", "0")
    process = subprocess.Popen(
        [sys.executable, "-m", "braid", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    timer = threading.Timer(60, process.kill)
    timer.start()
    assert process.stdout is not None
    for line in process.stdout:
        if "/100000" in line:
            process.terminate()
            break
    out, err = process.communicate()
    timer.cancel()
    timer.join()
    assert process.returncode == 143, out + err
    assert "interrupted" in err
    (saved,) = ls(config.checkpoints)
    assert f"  saved    checkpoint step {saved.step} (sha256 ok)" in err
    (resume,) = [line for line in err.splitlines() if line.startswith("  resume")]
    told = resume.split()
    assert told[1:5] == ["braid", "train", "--resume", "auto"]
    block = err[err.index("braid: run interrupted") :]
    assert main(["report", config.log_dir]) == 0
    assert capfd.readouterr().out.startswith(block)
    told[told.index("100000")] = str(saved.step + 2)
    assert main(told[2:]) == 0
    text = capfd.readouterr().out
    assert f"resumed  {saved.path}, step {saved.step}" in text
    assert f"finished at step {saved.step + 2}" in text


@pytest.mark.launcher
@pytest.mark.procs
@pytest.mark.proof
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_costs_the_steps_since_the_checkpoint_and_not_one_bit(config, capfd, victim):
    words = command(config, "--steps", "300", "--checkpoint-every", "20")
    process = subprocess.Popen(
        [sys.executable, "-m", "braid", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 40: saved"):
            workers = psutil.Process(process.pid).children()
            ranks = [w for w in workers if w.environ().get("RANK") == str(victim)]
            ranks[0].kill()
            break
    out, err = process.communicate(timeout=200)
    assert process.returncode == 137, out + err
    assert f"  cause    rank {victim} (pid {ranks[0].pid}): killed by signal 9 (SIGKILL)" in err
    assert main([*words, "--resume", "auto"]) == 0
    rows = map(
        msgspec.json.decode, (Path(config.log_dir) / "metrics.jsonl").read_bytes().splitlines()
    )
    assert [row["step"] for row in rows if row["kind"] == "step"] == [*range(1, 301)]
    whole = replace(config, log_dir=config.log_dir + "-whole")
    assert main(command(whole, "--steps", "300", "--checkpoint-every", "20")) == 0
    capfd.readouterr()
    assert compare(last(config), last(whole)).equal


@pytest.mark.launcher
@pytest.mark.procs
def test_bad_input_is_refused_before_anything_starts(config, capfd, tmp_path):
    cases = {
        "a batch of 8 samples cannot be divided equally among 3 ranks": command(
            config, "--batch", "8", n=3
        ),
        "model must be one of tiny": command(config, "--model", "huge"),
        "does not exist": command(config, "--data", str(tmp_path / "nothing.txt")),
        "nowhere is not a checkpoint or a run's directory": command(config, "--resume", "nowhere"),
        f"{tmp_path} is not a checkpoint (incomplete: no manifest.json) and contains none": command(
            config, "--resume", str(tmp_path)
        ),
    }
    for expected, words in cases.items():
        assert main(words) == 2
        err = capfd.readouterr().err
        assert "nothing was started" in err
        assert expected in err


@pytest.mark.launcher
@pytest.mark.procs
def test_a_rank_that_is_told_nonsense_says_so_in_the_error_block(config, capfd):
    assert main(command(config, "--context", "2000", "--steps", "2", n=1)) == 1
    err = capfd.readouterr().err
    assert "ConfigError: context must be 1 to" in err
    assert "Traceback" not in err


@pytest.mark.procs
def test_a_log_directory_that_cannot_be_written_is_refused(config, capfd):
    assert main(command(replace(config, log_dir=f"{config.data[0]}/run"))) == 2
    assert "choose another --log-dir" in capfd.readouterr().err


@pytest.mark.procs
def test_checkpoints_are_listed_and_verified(config, capfd, world):
    world(2, train, replace(config, steps=2))
    path = last(config)
    assert main(["checkpoint", "ls", config.log_dir]) == 0
    assert main(["checkpoint", "verify", path]) == 0
    (Path(path) / "rank-00000.safetensors").write_bytes(b"")
    assert main(["checkpoint", "verify", path]) == 1
    out = capfd.readouterr().out
    assert "2 ranks" in out
    assert f"{path}: ok, step 2, 2 files, sha256 ok" in out
    assert "rank-00000.safetensors is truncated" in out


@pytest.mark.parametrize(
    ("size", "versions", "stale_lr_steps"),
    [(2, "stash", 0), (3, "stash", 3), (2, "vertical_sync", 0), (2, "2bw", 0)],
)
def test_an_asynchronous_pipeline_trains_like_its_emulation_and_is_resumed(
    world, config, size, versions, stale_lr_steps
):
    config = replace(config, versions=versions, microbatches=3, model="tiny", eval_every=0)
    config = replace(config, stale_lr_steps=stale_lr_steps)
    alone = replace(config, reference_shards=size, log_dir=config.log_dir + "-alone")
    piped = replace(config, mesh=f"pp={size}")
    (expected,) = world(1, train, alone)
    curve, *_ = world(size, train, piped)
    assert curve == expected
    assert compare(last(piped), last(alone)).equal
    half = config.steps // 2  # checkpoints are flushes, which are a part of the training
    (whole,) = world(1, train, replace(alone, checkpoint_every=half, log_dir=config.log_dir + "-h"))
    again = replace(piped, checkpoint_every=half, log_dir=config.log_dir + "-again")
    world(size, train, again, "", 1)
    assert Path(last(again)).name == f"step-{half:08d}"
    resumed, *_ = world(size, train, again, last(again))
    assert resumed.losses == whole.losses[half:]
