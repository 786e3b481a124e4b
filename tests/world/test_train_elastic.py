"""`braid train --min-ranks`: a rank that is killed costs no step and no bit."""

from __future__ import annotations

import io
import signal
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from braid.checkpoint import compare
from braid.errors import ConfigError
from braid.launch import Outcome
from braid.train.command import launch, option_words
from braid.train.config import TrainConfig
from braid.train.progress import TrainConsole
from braid.train.reports import Evaluated, Stepped, parse_report

STEPS = 50  # the training still runs when a rank is killed after five steps


class KillingConsole(TrainConsole):
    """Console that kills a rank once it has seen some steps."""

    def __init__(self, victim: int, step: int) -> None:
        super().__init__(Console(file=io.StringIO()))
        self.victim, self.kills_at = victim, step

    def line(self, rank: int, stream: int, text: bytes, end: bytes = b"\n") -> None:
        report = parse_report(text)
        if isinstance(report, Stepped) and 0 < self.kills_at <= report.step:
            self.kills_at = 0
            for child in psutil.Process().children():
                if child.environ().get("RANK") == str(self.victim):
                    child.send_signal(signal.SIGKILL)
        super().line(rank, stream, text, end)


def _train(directory: Path, victim: int, kills_at: int, **options: object) -> Outcome:
    values = {"checkpoint_every": 0, "min_ranks": 2, "restarts": 0, **options}
    config = TrainConfig(
        steps=STEPS, batch=12, context=32, eval_every=25, eval_samples=9, log_dir=str(directory),
        **values,
    )  # fmt: skip
    with KillingConsole(victim, kills_at) as console:
        return launch(config, num_ranks=3, console=console, threads=1)


@pytest.mark.procs
@pytest.mark.launcher
@pytest.mark.parametrize(
    ("victim", "options"),
    [
        (1, {"shard": 3}),
        pytest.param(0, {}, marks=pytest.mark.proof),
        pytest.param(2, {"mesh": "pp=3"}, marks=pytest.mark.proof),
    ],
)
def test_a_killed_rank_costs_no_step_and_no_bit(tmp_path, victim, options):
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    assert _train(alone, 0, 0, **options).ok
    outcome = _train(killed, victim, 5, **options)
    assert outcome.ok, str(outcome)
    assert [end.rank for end in outcome.verdict.survived] == [victim]
    last = f"checkpoints/step-{STEPS:08}"
    for prefix in ("model/", "optimizer/"):
        compared = compare(alone / last, killed / last, prefix=prefix)
        assert compared.num_tensors
        assert not compared.differing
    reports = [
        [parse_report(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
        for run in (alone, killed)
    ]
    for kind in (Stepped, Evaluated):
        steps = [[r.step for r in own if isinstance(r, kind)] for own in reports]
        assert steps[0] == steps[1] == sorted(set(steps[1]))
    losses = [[r.loss for r in own if isinstance(r, Stepped)] for own in reports]
    assert losses[0] == losses[1]


@pytest.mark.procs
@pytest.mark.launcher
@pytest.mark.proof
def test_a_part_without_a_copy_is_trained_again_from_the_checkpoint(tmp_path):
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    options = {"mesh": "pp=3", "copies": False, "checkpoint_every": 20}
    assert _train(alone, 0, 0, **options).ok
    assert _train(killed, 1, 25, **options).ok
    last = f"checkpoints/step-{STEPS:08}"
    assert not compare(alone / last, killed / last, prefix="model/").differing
    assert "ranks keep no copies: the training goes back from step" in "".join(
        (killed / f"rank{rank}.log").read_text() for rank in (0, 2)
    )


@pytest.mark.procs
@pytest.mark.launcher
def test_a_last_checkpoint_that_cannot_be_saved_is_not_named(tmp_path):
    (tmp_path / "checkpoints").touch()
    config = TrainConfig(
        steps=2, batch=2, context=32, eval_samples=2, log_dir=str(tmp_path), min_ranks=1
    )
    out = io.StringIO()
    with TrainConsole(Console(file=out, width=200)) as console:
        assert launch(config, num_ranks=1, console=console, threads=1).ok
    assert console.finished.checkpoint == ""
    assert "the last checkpoint could not be saved\n" in out.getvalue()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"spares": 1}, "--spares needs --min-ranks"),
        ({"min_ranks": 1, "strategy": "ps"}, "--min-ranks cannot be combined with --strategy"),
        ({"batch_per_rank": "sqrt"}, "--batch-per-rank needs --min-ranks"),
        ({"copies": False, "mesh": "pp=2"}, "--no-copies needs --min-ranks"),
        ({"copies": False, "min_ranks": 1}, "--no-copies needs --mesh or --shard"),
        (
            {"copies": False, "min_ranks": 1, "shard": 1, "verify": 5},
            "--verify replaces ranks, whose parts are lost without copies: leave out --no-copies",
        ),
        ({"mesh": "pp=2; dp=3"}, "several meshes need --min-ranks"),
        ({"min_ranks": 1, "batch_per_rank": "log"}, "must be one of linear, sqrt, constant, got"),
        ({"min_ranks": 1, "mesh": "cp=2"}, "does not support axis cp of cp=2: leave it out"),
    ],
)
def test_options_that_do_not_fit_are_named(options, words):
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**options)
    assert words in str(caught.value)


def test_options_are_written_as_on_the_command_line():
    config = TrainConfig(copies=False, min_ranks=2, shard=1, data=("a.txt", "b.txt"))
    assert [option_words(config, name) for name in ("copies", "min_ranks", "data")] == [
        ("--no-copies",),
        ("--min-ranks", "2"),
        ("--data", "a.txt", "b.txt"),
    ]


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("dp=4; dp=9", "dp=9 must have 2 to 3 ranks"),
        ("dp=4; pp=2,dp=2", "pp=2,dp=2 must have 2 to 3 ranks"),
        ("dp=4; ep=3", "ep is not supported"),
        ("dp=4; tp=3", "which cannot be divided over 3 ranks"),
    ],
)
def test_a_mesh_that_fewer_ranks_cannot_use_is_refused_before_the_start(mesh, words):
    with pytest.raises(ConfigError) as caught:
        TrainConfig(min_ranks=2, mesh=mesh, batch=8).check_ranks(4)
    assert words in str(caught.value)


def test_a_schedule_is_for_the_meshes_with_stages():
    config = TrainConfig(min_ranks=2, mesh="dp=4; pp=3; dp=2", schedule="gpipe", batch=8)
    assert config.check_ranks(4) == 4


def test_a_batch_that_ranks_cannot_share_is_refused():
    with pytest.raises(ConfigError, match="--batch 16 cannot be divided into 3 micro-batches"):
        TrainConfig(min_ranks=2).check_ranks(3)


def test_all_that_the_number_of_ranks_contradicts_is_named():
    words = r"--min-ranks 4 needs at least 4 ranks, got -n 3; --batch 16 cannot be divided"
    with pytest.raises(ConfigError, match=words):
        TrainConfig(min_ranks=4).check_ranks(3)
