"""`braid demo`: train a small GPT in one process and in parallel, and compare the results.

    1 reference   one process runs the shards of each batch in turn, in the order of ranks
    2 parallel    one process for each shard
    3 chaos       the same, but a rank is killed, and the training resumes from its last checkpoint
    4 pipeline    the layers are divided instead of the batch; measured and predicted idle time
    proof         the last checkpoints, weights and optimizer, are compared bit by bit

All printed figures are measured in this run. The data is Python's own standard library, so nothing
is downloaded.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from rich.console import Console
from rich.text import Text

from braid._version import __version__
from braid.checkpoint import CheckpointComparison, compare, verify
from braid.errors import CheckpointError
from braid.launch import Outcome
from braid.launch.observe import pipeline_views, read_run, read_timelines
from braid.train.command import launch
from braid.train.config import MODELS, TrainConfig
from braid.train.progress import TrainConsole
from braid.train.reports import Report, Stepped, TrainingFinished
from braid.types import Shares

__all__ = ["bar", "show"]

STEPS = 480  # about eight seconds for the reference on one core
CONTEXT = 64  # a small model learns more in many short steps than in few long ones
LR = 6e-3  # close to the highest stable rate of this model
SEQUENCES = 16  # sequences per batch, rounded down to a multiple of the number of ranks
BAR_WIDTH = 40
CHECKPOINTS = 5  # number of checkpoints of the run with a killed rank
PIPELINE_PART = 6  # the pipeline run has a sixth of the steps
KILLED_AFTER = 0.3  # fraction of the steps; the rest leaves time to kill the rank
PROOF_FAILED_EXIT_CODE = 1


class Assassin(TrainConsole):
    """Console that shows a training, and kills one of its ranks with SIGKILL after a step.

    Args:
        out: Console on which the training is drawn.
        title: Text before the progress bar.
        rank: Rank to kill.
        after: Step after which to kill it.

    Attributes:
        struck_at: Last reported step when the rank was killed; 0 before.
    """

    def __init__(self, out: Console, *, title: str, rank: int, after: int) -> None:
        super().__init__(out, title=title)
        self._rank = rank
        self._after = after
        self.struck_at = 0

    def _keep(self, report: Report) -> None:
        super()._keep(report)
        if isinstance(report, Stepped) and report.step >= self._after and not self.struck_at:
            self.struck_at = report.step
            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.Error, ProcessLookupError):
                    if child.environ().get("RANK") == str(self._rank):
                        os.kill(child.pid, signal.SIGKILL)


class _DemoStage(NamedTuple):
    """Outcome of one training."""

    outcome: Outcome
    finished: TrainingFinished | None
    console: TrainConsole


def show(
    out: Console,
    *,
    num_ranks: int | None = None,
    log_dir: str,
    steps: int = STEPS,
    chaos: bool = True,
) -> int:
    """Run the demonstration.

    Args:
        out: Console that shows the demonstration.
        num_ranks: Number of processes of the parallel training; when None, two, or one
            if there is only one core.
        log_dir: Directory of the runs.
        steps: Number of steps of each training.
        chaos: Whether to also run with a killed rank.

    Returns:
        0 if the proof holds; 1 if it does not; the exit code of a stage that failed.

    Raises:
        ConfigError: The configuration cannot work; nothing was started.
    """
    began_s = time.monotonic()
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    size = num_ranks or min(2, cores)
    config = TrainConfig(
        steps=steps,
        batch=size * max(1, SEQUENCES // size),
        context=CONTEXT,
        lr=LR,
        eval_every=0,
        checkpoint_every=0,
        log_dir=f"{log_dir}/parallel",
        device="cpu",  # on CPUs, sums over ranks have the same bits as in one process
    )
    config.check_ranks(size)
    _print(out, _header(size, cores), style="bold")

    reference = replace(config, log_dir=f"{log_dir}/reference", reference_shards=size)
    alone = _train(out, "1 reference", reference, 1)
    if alone.finished is None:
        return _failed(out, alone)
    _print_stage(out, "1 reference", f"1 process, {size} shards in turn", alone.finished)

    parallel = _train(out, "2 parallel", config, size)
    if parallel.finished is None:
        return _failed(out, parallel)
    proof = _prove(alone.finished, parallel.finished)
    noun = "process" if size == 1 else "processes"
    _print_stage(
        out, "2 parallel", f"{size} {noun}, data parallel", parallel.finished, _verdict(proof)
    )

    survived, code = True, 0
    if chaos:
        survived, code = _chaos(
            out, replace(config, log_dir=f"{log_dir}/chaos"), size, alone.finished
        )
    if code:
        return code

    if size > 1:
        code = _pipeline(out, replace(config, log_dir=f"{log_dir}/pipeline"), size)
    if code:
        return code

    _explain(out, alone.finished, parallel, proof, num_ranks=size)
    _next(out, log_dir, size, time.monotonic() - began_s)
    return 0 if proof.equal and survived else PROOF_FAILED_EXIT_CODE


def bar(shares: Shares, width: int = BAR_WIDTH) -> str:
    """Draw a rank's time as `width` characters: # compute, = wait, . transfer.

    The shares with the largest remainders are rounded up.
    """
    exact = [share * width for share in shares]
    counts = [int(x) for x in exact]
    by_rest = sorted(range(3), key=lambda i: counts[i] - exact[i])
    for i in by_rest[: width - sum(counts)]:
        counts[i] += 1
    return "".join(sign * count for sign, count in zip("#=.", counts, strict=True))


def _header(size: int, cores: int) -> str:
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    load = os.getloadavg()[0]  # cores that other programs use make the runs slower
    return (
        f"braid {__version__} | torch {torch.__version__} | {cores} "
        f"core{'s' if cores > 1 else ''} (load {load:.1f}), "
        f"{gpu} | "
        f"{size} worker{'s' if size > 1 else ''} on 127.0.0.1 (loopback only)"
    )


def _train(
    out: Console, name: str, config: TrainConfig, num_ranks: int, resume: str = ""
) -> _DemoStage:
    with TrainConsole(out, title=name) as console:
        # One thread a rank in all runs: the number of threads decides how products are split.
        outcome = launch(config, num_ranks=num_ranks, console=console, resume=resume, threads=1)
    return _DemoStage(outcome, console.finished if outcome.ok else None, console)


def _chaos(
    out: Console, config: TrainConfig, size: int, alone: TrainingFinished
) -> tuple[bool, int]:
    """Train with a killed rank, resume, and compare with the reference.

    Returns:
        Whether the proof holds, and the exit code of a failed training, otherwise 0.
    """
    config = replace(config, checkpoint_every=max(1, config.steps // CHECKPOINTS))
    victim, after = size - 1, max(1, int(config.steps * KILLED_AFTER))
    assassin = Assassin(out, title="3 chaos", rank=victim, after=after)
    with assassin:
        broken = launch(config, num_ranks=size, console=assassin, threads=1)
    if broken.ok:
        _print(
            out,
            f"  3 chaos       rank {victim} could not be killed: it had finished before",
            style="red",
        )
        return False, PROOF_FAILED_EXIT_CODE
    block = str(broken).splitlines()
    _print(
        out,
        f"  3 chaos       rank {victim} was killed (SIGKILL) after step {assassin.struck_at}; the "
        "launcher reported",
    )
    for row in block[:2]:
        _print(out, f"    | {row.strip()[:110]}", style="italic")
    stage = _train(out, "3 chaos, resumed", config, size, resume="auto")
    if stage.finished is None:
        return False, _failed(out, stage)
    proof = _prove(alone, stage.finished)
    started = stage.console.started
    first = f"from step {started.first_step}" if started is not None else "from its checkpoint"
    line = Text(
        f"  {'':<14}resumed {first:<24}loss ... -> "
        f"{stage.finished.last_loss:.3f}{stage.finished.seconds:9.1f} s   "
    )
    out.print(line + _verdict(proof), soft_wrap=True, highlight=False)
    return proof.equal, 0


def _pipeline(out: Console, config: TrainConfig, size: int) -> int:
    """Train with a pipeline, and show how long its ranks are idle; return the exit code."""
    size = min(size, MODELS[config.model].layers)
    config = replace(
        config,
        mesh=f"pp={size}",
        microbatches=2 * size,
        batch=2 * size * max(1, config.batch // (2 * size)),
        steps=max(2, config.steps // PIPELINE_PART),
        sample_bytes=0,
    )
    stage = _train(out, "4 pipeline", config, size)
    if stage.finished is None:
        return _failed(out, stage)
    views = pipeline_views(read_timelines(read_run(Path(stage.outcome.log_dir)).rings))
    rows = views[0].rows if views else ()
    formula = (size - 1) / (config.microbatches + size - 1)
    idle = sum(row.measured.bubble for row in rows) / len(rows) if rows else float("nan")
    what = f"{size} stages, 1F1B, {config.microbatches} micro-batches"
    verdict = Text(f"idle {idle:.0%}, by the schedule alone {formula:.0%}")
    _print_stage(out, "4 pipeline", what, stage.finished, verdict)
    return 0


def _print_stage(
    out: Console, name: str, what: str, finished: TrainingFinished, verdict: Text | None = None
) -> None:
    line = Text(
        f"  {name:<14}{what:<32}loss {finished.first_loss:.3f} -> {finished.last_loss:.3f}"
        f"{finished.seconds:8.1f} s"
    )
    out.print(line + Text("   ") + verdict if verdict else line, soft_wrap=True, highlight=False)


def _prove(alone: TrainingFinished, parallel: TrainingFinished) -> CheckpointComparison:
    """Verify both checkpoints and compare them."""
    try:
        for finished in (alone, parallel):
            verify(finished.checkpoint)
        return compare(alone.checkpoint, parallel.checkpoint)
    except CheckpointError as exc:
        return CheckpointComparison(0, (str(exc),), float("inf"))


def _verdict(proof: CheckpointComparison) -> Text:
    if proof.equal:
        return Text(
            f"weights equal to run 1: yes (max diff {proof.max_diff:g})", style="bold green"
        )
    return Text(f"weights equal to run 1: NO (max diff {proof.max_diff:g})", style="bold red")


def _explain(
    out: Console,
    alone: TrainingFinished,
    parallel: _DemoStage,
    proof: CheckpointComparison,
    *,
    num_ranks: int,
) -> None:
    finished, console = parallel.finished, parallel.console
    assert finished is not None
    if proof.equal:
        speedup = alone.seconds / max(finished.seconds, 1e-9)
        _print(
            out,
            f"  proof         {proof.num_tensors} tensors (weights and AdamW's moments) of both "
            "last checkpoints have "
            f"the same bits; {num_ranks} ranks were {speedup:.2f} times as fast",
        )
    else:
        first = proof.differing[0]
        _print(
            out,
            f"  no proof      {len(proof.differing)} of {proof.num_tensors} differ, first {first}",
        )
    if console.started is not None and console.evaluated is not None:
        start = console.started
        _print(
            out,
            f"  what was done {start.model} GPT, {start.num_params:,} parameters, {start.steps} "
            "steps of "
            f"{start.tokens_per_step:,} bytes of {start.data}; loss on held-out text "
            f"{console.evaluated.eval_loss:.3f} nats/byte",
        )
    _print(out, "  where the time went     # compute  = wait  . transfer")
    for rank, shares in enumerate(finished.shares):
        figures = "  ".join(f"{name} {share:.0%}" for name, share in shares._asdict().items())
        _print(out, f"    rank {rank:<4}{bar(shares)}  {figures}")


def _next(out: Console, log_dir: str, size: int, took_s: float) -> None:
    _print(
        out,
        f"  next          open the timeline   braid report {log_dir}/parallel\n"
        f"                train for longer    braid train -n {size} --model mini --steps 2000\n"
        f"                run your own        braid run -n {size} train.py",
    )
    _print(out, f"  all in all    {took_s:.0f} s")


def _print(out: Console, text: str, style: str = "") -> None:
    out.print(Text(text, style=style), soft_wrap=True, highlight=False)


def _failed(out: Console, stage: _DemoStage) -> int:
    _print(out, str(stage.outcome))
    return stage.outcome.exit_code or PROOF_FAILED_EXIT_CODE
