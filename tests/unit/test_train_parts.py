"""Parts of a training: configuration, learning rate, initial values, reports, what is drawn."""

from __future__ import annotations

import io
import math
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from braid.errors import ConfigError
from braid.runtime.clock import VirtualClock
from braid.train.command import last_run
from braid.train.config import MODELS, ModelSize, TrainConfig
from braid.train.demo.show import bar
from braid.train.gpt import GPT, flops_per_token, generate
from braid.train.progress import LeftTime, TrainConsole, describe_step
from braid.train.reports import Checkpointed, Reporter, Stepped, TrainingStarted, parse_report
from braid.types import Shares

SMALL = ModelSize(2, 16, 2)


def stepped(step: int = 3, **changes: float) -> Stepped:
    values = {"loss": 2.5, "lr": 0.1, "grad_norm": 1.0, "step_s": 0.5, "tokens_per_s": 4096.0}
    shares = {"compute": 0.75, "wait": 0.2, "transfer": 0.05, "mfu": 0.4}
    return Stepped(step=step, **{**values, **shares, **changes})


def started(**changes: object) -> TrainingStarted:
    values = {
        "first_step": 0,
        "steps": 10,
        "num_ranks": 2,
        "shards": 2,
        "threads": 1,
        "model": "tiny",
        "num_params": 123_200,
        "data": "text",
        "num_files": 3,
        "data_bytes": 4000,
        "tokens_per_step": 2048,
        "flops_per_step": 10**9,
        "peak_flops_per_s": 5e10,
        "peak_source": "measured with matrix products on all of them",
        "torch": "2",
    }
    return TrainingStarted(**{**values, **changes})


def test_a_configuration_survives_the_command_line():
    config = TrainConfig(data=("a b", "c"), steps=7, warmup=0, lr=0.1 + 0.2)
    assert TrainConfig.from_json(config.to_json()) == config


def test_every_bad_number_is_listed():
    with pytest.raises(ConfigError) as caught:
        TrainConfig(model="huge", steps=0, keep=0, lr=math.nan)
    parts = str(caught.value).split("; ")
    assert parts[0] == f"model must be one of {', '.join(MODELS)}, got 'huge'"
    assert parts[1:3] == ["steps must be at least 1, got 0", "keep must be at least 1, got 0"]
    assert parts[3].startswith("lr, clip and weight_decay must be positive numbers, got nan")


def test_a_bad_configuration_of_a_rank_says_what_is_wrong():
    with pytest.raises(ConfigError, match="steps must be at least 1, got 0"):
        TrainConfig.from_json('{"steps": 0}')
    with pytest.raises(ConfigError, match="is not valid JSON"):
        TrainConfig.from_json("nonsense")


def test_a_batch_is_shared_by_ranks_or_shards():
    assert TrainConfig(batch=8).check_ranks(4) == 4
    assert TrainConfig(batch=8, reference_shards=2).check_ranks(1) == 2
    with pytest.raises(
        ConfigError, match="a batch of 8 samples cannot be divided equally among 3 ranks"
    ):
        TrainConfig(batch=8).check_ranks(3)
    with pytest.raises(ConfigError, match="the number of ranks must be at least 1, got 0"):
        TrainConfig(batch=8).check_ranks(0)
    with pytest.raises(ConfigError, match="use -n 1"):
        TrainConfig(batch=8, reference_shards=2).check_ranks(2)


def test_the_learning_rate_rises_then_falls_to_a_tenth():
    config = TrainConfig(steps=100, lr=1.0, warmup=10)
    rates = [config.lr_at(step) for step in range(101)]
    assert rates[:11] == pytest.approx([*(k / 10 for k in range(1, 11)), 1.0])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)
    assert config.lr_at(500) == pytest.approx(0.1)


def test_initial_values_depend_on_seed_and_name_only():
    before = torch.random.get_rng_state()
    one, same, other = GPT(SMALL, 8, 1), GPT(SMALL, 8, 1), GPT(SMALL, 8, 2)
    deeper = dict(GPT(SMALL._replace(layers=3), 8, 1).named_parameters())
    assert torch.equal(before, torch.random.get_rng_state())
    for name, value in one.named_parameters():
        assert torch.equal(value, dict(same.named_parameters())[name])
        if value.dim() > 1:
            assert not torch.equal(value, dict(other.named_parameters())[name])
        if not name.endswith(("project.weight", "down.weight")):
            assert torch.equal(value, deeper[name])


def test_the_model_sees_no_later_token():
    model = GPT(SMALL, 8)
    tokens = torch.arange(8).view(1, 8)
    changed = tokens.clone()
    changed[0, 5:] += 100
    ours, theirs = model(tokens), model(changed)
    assert torch.allclose(ours[0, :5], theirs[0, :5], atol=1e-6)
    assert not torch.allclose(ours[0, 5:], theirs[0, 5:], atol=1e-3)


def test_an_untrained_model_knows_nothing():
    model = GPT(MODELS["tiny"], 64)
    tokens = torch.randint(0, 256, (4, 65), generator=torch.Generator().manual_seed(0))
    loss = model(tokens[:, :-1], tokens[:, 1:]).item()
    assert abs(loss - math.log(256)) < 0.3


@pytest.mark.parametrize("size", [SMALL, ModelSize(3, 32, 4)])
def test_flops_are_those_of_the_matrix_products(size):
    context = 16
    model = GPT(size, context)
    products = sum(
        p.numel() for n, p in model.named_parameters() if p.dim() == 2 and n != "position.weight"
    )
    attention = 2 * 2 * context * size.width * size.layers  # scores and weighted sum, forward
    assert flops_per_token(size, context) == 3 * (2 * products + attention)


def test_a_sample_is_the_same_each_time_and_harmless_to_a_terminal():
    model = GPT(SMALL, 8)
    text = generate(model, b"\0", 20, seed=1)
    assert text == generate(model, b"\0", 20, seed=1)
    assert all(c.isprintable() or c == "\n" for c in text)


def test_shares_add_up_to_one():
    assert Shares.of(100, 40, 30) == (0.6, 0.3, 0.1)
    assert sum(Shares.of(10, 40, 90)) == pytest.approx(1.0)
    assert Shares.of(0, 0, 0) == (1.0, 0.0, 0.0)


def test_a_bar_is_as_long_as_its_width():
    assert bar(Shares(0.6, 0.3, 0.1), 10) == "######===."
    assert bar(Shares(1 / 3, 1 / 3, 1 / 3), 10) == "####===..."
    assert bar(Shares(1.0, 0.0, 0.0), 4) == "####"


def test_a_report_is_recognised_among_other_lines(tmp_path):
    out = io.StringIO()
    with Reporter(tmp_path / "a" / "metrics.jsonl", out, VirtualClock(10**12)) as reporter:
        reporter.write(started())
        reporter.write(stepped())
    line = out.getvalue().splitlines()[0].encode()
    assert parse_report(line) == started()
    for other in (b"", b"hello", b'{"kind":"unknown"}', b'{"kind":"step"', b'{"a": 1}'):
        assert parse_report(other) is None


def test_every_step_is_recorded_and_few_are_told(tmp_path):
    out, clock = io.StringIO(), VirtualClock(10**12)
    path = tmp_path / "metrics.jsonl"
    with Reporter(path, out, clock) as reporter:
        for step in range(100):
            reporter.write(stepped(step))
            clock.advance(10**7)
    recorded = [parse_report(line) for line in path.read_bytes().splitlines()]
    assert recorded == [stepped(step) for step in range(100)]
    assert [parse_report(line.encode()).step for line in out.getvalue().splitlines()] == [
        0,
        20,
        40,
        60,
        80,
    ]


def test_half_a_line_of_a_killed_rank_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind":"st')
    for _ in range(2):
        with Reporter(path, io.StringIO(), VirtualClock()) as reporter:
            reporter.write(stepped())
    recorded = [parse_report(line) for line in path.read_bytes().splitlines()]
    assert recorded == [None, stepped(), stepped()]


@pytest.mark.parametrize(
    ("step", "kept"),
    [(0, []), (2, [started(), stepped(1), stepped(2)]), (9, [started(), *map(stepped, (1, 2, 3))])],
)
def test_steps_that_will_come_again_are_dropped(tmp_path, step, kept):
    path = tmp_path / "metrics.jsonl"
    with Reporter(path, io.StringIO(), VirtualClock()) as reporter:
        for report in (started(), stepped(1), stepped(2), stepped(3)):
            reporter.write(report)
        reporter.rewind(step)
        reporter.write(stepped(step + 1))
    recorded = [parse_report(line) for line in path.read_bytes().splitlines()]
    assert (recorded, list(tmp_path.iterdir())) == ([*kept, stepped(step + 1)], [path])


def test_a_late_report_of_an_earlier_step_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    saved = Checkpointed(step=1, path="x")
    with Reporter(path, io.StringIO(), VirtualClock()) as reporter:
        for report in (stepped(1), stepped(2), saved, stepped(3)):
            reporter.write(report)
        reporter.rewind(1)
        reporter.write(stepped(2))
    recorded = [parse_report(line) for line in path.read_bytes().splitlines()]
    assert recorded == [stepped(1), saved, stepped(2)]


@pytest.mark.parametrize(
    ("step", "written", "following", "expected"),
    [
        (2, 1, stepped(3), [1, 2, 3]),  # the last report is missing
        (2, 2, stepped(3), [1, 2, 3]),
        (1, 1, stepped(2), [1, 2]),  # the step is repeated
        (2, 1, stepped(2), [1, 2]),
    ],
)
def test_a_report_that_a_lost_rank_0_has_not_written_comes_from_the_next_one(
    tmp_path, step, written, following, expected
):
    path = tmp_path / "metrics.jsonl"
    with Reporter(path, io.StringIO(), VirtualClock()) as lost:
        for number in range(1, written + 1):
            lost.write(stepped(number))
    with Reporter(path, io.StringIO(), VirtualClock()) as reporter:
        reporter.write_missing([stepped(1), stepped(2)], step, following=following)
        reporter.write(following)
    recorded = [parse_report(line) for line in path.read_bytes().splitlines()]
    assert recorded == [stepped(number) for number in expected]


@contextmanager
def _full_disk(num_bytes: int) -> Iterator[None]:
    """Refuse writes that would make a file longer than this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_one_warning_and_no_line_once_there_is_space(tmp_path, messages):
    path = tmp_path / "metrics.jsonl"
    with Reporter(path, io.StringIO(), VirtualClock()) as reporter:
        reporter.write(stepped(0))
        with _full_disk(path.stat().st_size + 10):
            for step in range(1, 5):
                reporter.write(stepped(step))
            part_of_a_line = path.read_bytes().splitlines()[1]
            reporter.rewind(2)
            refusals = messages.copy()
        reporter.write(stepped(3))
    recorded = [parse_report(line) for line in path.read_bytes().splitlines()]
    assert (len(part_of_a_line), recorded) == (10, [stepped(step) for step in range(4)])
    (refusal,) = refusals
    assert refusal.startswith(f"metrics cannot be written to {path}: File too large; the training")


def test_a_rank_that_goes_on_with_the_metrics_needs_no_space_on_the_disk(tmp_path, messages):
    path = tmp_path / "metrics.jsonl"
    with Reporter(path, io.StringIO(), VirtualClock()) as reporter:
        for step in range(4):
            reporter.write(stepped(step))
    path.write_bytes(path.read_bytes()[:-5])
    with _full_disk(0), Reporter(path, io.StringIO(), VirtualClock()) as reporter:
        reporter.rewind(1)
        reporter.write(stepped(2))
    recorded = [parse_report(line) for line in path.read_bytes().splitlines()]
    assert recorded == [stepped(0), stepped(1)]
    assert messages[1:] == [f"lines that could not be written to {path} are lost: 1"]


def test_metrics_that_cannot_be_written_are_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"metrics cannot be written to .*: (Not a directory|File exists); choose"
    ):
        Reporter(tmp_path / "file" / "metrics.jsonl", io.StringIO(), VirtualClock())


def test_other_ranks_report_nothing():
    out = io.StringIO()
    with Reporter(None, out, VirtualClock()) as reporter:
        reporter.write(stepped())
    assert not out.getvalue()


def test_a_step_is_one_short_line():
    assert describe_step(stepped(), 12.4) == (
        "loss 2.500  4.1k tok/s  12 s left  compute 75% wait 20% transfer 5%  MFU 40%"
    )


def test_the_time_left_is_that_of_the_steps_so_far():
    left = LeftTime()
    assert left.after(10, 110, 0) is None
    assert left.after(20, 110, 5 * 10**9) == 45.0


def _lines(reports: list[bytes], **options: object) -> list[str]:
    out = io.StringIO()
    with TrainConsole(Console(file=out, width=200), **options) as console:
        for line in reports:
            console.line(0, 1, line)
        console.line(1, 1, b"hello [from] a rank")
        console.line(1, 2, b"Traceback (most recent call last):")
        console.line(1, 2, b'  File "x.py", line 1')
    return out.getvalue().splitlines()


def _encoded(*reports: object) -> list[bytes]:
    out = io.StringIO()
    clock = VirtualClock(10**12)
    with Reporter(Path("/dev/null"), out, clock) as reporter:
        for report in reports:
            reporter.write(report)
            clock.advance(10**9)
    return out.getvalue().encode().splitlines()


def test_plain_progress_says_what_is_trained_and_how_it_goes():
    lines = _lines(_encoded(started(notes=("starting anew",)), stepped()))
    assert lines == [
        "model    tiny, 123k parameters, torch 2",
        "data     text: 3 files, 4k bytes to train on",
        "ranks    2, 1 thread each, on cpu in fp32",
        "step     2,048 tokens, 1 GFLOP",
        "MFU      of 50 GFLOP/s a rank, measured with matrix products on all of them",
        "note     starting anew",
        "  step  3/10  loss 2.500  4.1k tok/s  compute 75% wait 20% transfer 5%  MFU 40%",
        "[rank 1] hello [from] a rank",
    ]


def test_a_titled_progress_leaves_the_rest_to_its_caller():
    lines = _lines(_encoded(started(), stepped()), title="1 reference")
    assert [re.sub(r"  loss.*", "", line) for line in lines] == [
        "  1 reference ...",
        "      step  3/10",
        "[rank 1] hello [from] a rank",
    ]


def test_the_last_run_is_the_one_with_the_latest_checkpoint(tmp_path):
    assert last_run(tmp_path) == ""
    (tmp_path / "a" / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert last_run(tmp_path) == ""  # incomplete


def test_models_have_heads_that_divide_their_width():
    assert all(size.width % size.heads == 0 for size in MODELS.values())
    assert replace(TrainConfig(), model="gpt2-large").model == "gpt2-large"
