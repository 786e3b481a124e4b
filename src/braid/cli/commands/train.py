"""`braid train`: train a GPT, alone or in parallel."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from braid.cli.commands import NO_DEFAULT, Directory, NumRanks, Threads
from braid.errors import ConfigError

if TYPE_CHECKING:
    from braid.plan.pipedream import PipeDreamPlan
    from braid.plan.plan_file import Plan
    from braid.train.config import TrainConfig

__all__ = ["train"]

AUTO = "auto"


def train(
    *,
    n: NumRanks = None,
    data: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="FILE [FILE ...]", help_behavior_hint=NO_DEFAULT)
    ] = (),
    model: str = "tiny",
    steps: int = 200,
    batch: int = 16,
    context: int = 128,
    lr: float = 3e-3,
    warmup: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint=NO_DEFAULT)
    ] = None,
    weight_decay: float = 0.1,
    clip: float = 1.0,
    seed: int = 0,
    eval_every: int = 100,
    eval_samples: int = 64,
    checkpoint_every: int = 100,
    keep: int = 3,
    resume: Annotated[str, tyro.conf.arg(metavar="PATH", help_behavior_hint=NO_DEFAULT)] = "",
    log_dir: Directory = None,
    threads: Threads = None,
    reference_shards: int = 0,
    sample_bytes: int = 240,
    mesh: Annotated[str, tyro.conf.arg(metavar="AXES", help_behavior_hint=NO_DEFAULT)] = "",
    schedule: str = "1f1b",
    microbatches: int = 4,
    balance: Annotated[str, tyro.conf.arg(metavar="BY", help_behavior_hint=NO_DEFAULT)] = "",
    recompute: str = "never",
    versions: str = "",
    stage_replicas: Annotated[
        str, tyro.conf.arg(metavar="COUNTS", help_behavior_hint=NO_DEFAULT)
    ] = "",
    flush_every: int = 20,
    stale_lr_steps: int = 0,
    plan: Annotated[str, tyro.conf.arg(metavar="FILE", help_behavior_hint=NO_DEFAULT)] = "",
    shard: int = 0,
    strategy: Annotated[str, tyro.conf.arg(metavar="NAME", help_behavior_hint=NO_DEFAULT)] = "",
    servers: int = 1,
    replicas: int = 0,
    staleness: int = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtype: Literal["fp32", "bf16"] = "fp32",
) -> int:
    """Train a GPT on bytes, on N ranks of this host.

    Ctrl-C and SIGTERM save a checkpoint at the next step (or flush) and print the line that resumes
    from it.

    Args:
        n: Number of ranks (default: those of --mesh, else 1).
        data: Text files; Python's own standard library when there are none.
        model: tiny, mini, small, medium, gpt2, gpt2-medium or gpt2-large.
        steps: Number of optimizer steps in all.
        batch: Sequences of a global batch; a multiple of N.
        context: Bytes of a sequence.
        lr: Peak learning rate.
        warmup: Steps of linear warm-up (default: a twentieth of all).
        weight_decay: Weight decay of matrices.
        clip: Largest global norm of the gradient.
        seed: Seed of the initial weights and of the order of samples.
        eval_every: Steps between evaluations on held-out text; 0 for one at the end.
        eval_samples: Largest number of sequences of an evaluation.
        checkpoint_every: Steps between checkpoints; 0 for one at the end.
        keep: Number of checkpoints to keep.
        resume: Checkpoint or run to resume from; auto for the last complete one.
        log_dir: Directory for logs, metrics and checkpoints (default: ./runs/<date>_<hex>; with
            --resume auto the last run).
        threads: OMP_NUM_THREADS of each rank (default: your own, or physical cores / N).
        reference_shards: Run this many shards in turn on one rank: the same bits as that many
            ranks.
        sample_bytes: Length of the text that is generated at the end.
        mesh: Arrangement of the ranks: pp=2 for a pipeline, tp=2 for divided layers, with dp=2 for
            two of either (default: all data parallel).
        schedule: Schedule of a pipeline, such as gpipe, 1f1b, zbv or v_half; or a file with
            a program, also as CSV of torch's pipelining.
        microbatches: Micro-batches of a pipeline; of a step, with --versions 2bw.
        balance: Layers of the stages of a pipeline: by measured time or size, or their numbers,
            such as 3,4,3 (default: as even as possible).
        recompute: Micro-batches that are computed again in backward to save memory: always,
            except_last, never, or a number of layers between what is kept.
        versions: Train on an asynchronous pipeline, which steps without waiting, with the weights
            of stash, vertical_sync or 2bw (PipeDream). Without --mesh, each of -n ranks (default:
            2) is a stage.
        stage_replicas: Ranks of each stage of an asynchronous pipeline, such as 3,1 (default: 1).
        flush_every: Steps between flushes of an asynchronous pipeline, at which Ctrl-C is noticed;
            lower it if so many take longer than 30 s.
        stale_lr_steps: Steps of an asynchronous pipeline in which each stage's learning rate grows
            from 1 / (age of its gradients) of --lr to the whole (PipeMare); 0 for whole rates.
        plan: Plan of `braid plan` or `braid plan pipedream`, in place of all options of splitting;
            auto to profile the model on N ranks and to follow the fastest.
        shard: State that is divided over ranks instead of copied: 1 for states of the optimizer, 2
            for gradients, too, 3 for parameters, too; 0 for nothing.
        strategy: ps for a parameter server with N workers (default: collectives).
        servers: Servers of a parameter server.
        replicas: Copies of each shard of its tables on other servers.
        staleness: Steps that a worker may be ahead of the slowest one.
        device: Device of each rank: auto for the GPU of its local rank if torch sees one, else the
            CPU. Ranks share GPUs if there are fewer.
        dtype: Dtype of matrix products: fp32, or bf16 by autocast. Parameters are float32.
    """
    from rich.console import Console

    from braid.plan.plan_file import Plan
    from braid.programs.layout import Mesh
    from braid.train import command
    from braid.train.config import TrainConfig
    from braid.train.planned import comparison, followed

    config = TrainConfig(
        model=model,
        data=data,
        steps=steps,
        batch=batch,
        context=context,
        lr=lr,
        warmup=warmup,
        weight_decay=weight_decay,
        clip=clip,
        seed=seed,
        eval_every=eval_every,
        eval_samples=eval_samples,
        checkpoint_every=checkpoint_every,
        keep=keep,
        log_dir=log_dir or command.choose_log_dir(resume),
        reference_shards=reference_shards,
        sample_bytes=sample_bytes,
        mesh=mesh or (f"pp={n or 2}" if versions and not reference_shards else ""),
        schedule=schedule,
        microbatches=microbatches,
        balance=balance,
        recompute=recompute,
        versions=versions,
        stage_replicas=stage_replicas,
        flush_every=flush_every,
        stale_lr_steps=0 if plan else stale_lr_steps,  # the plan has the pipeline
        shard=shard,
        strategy=strategy,
        servers=servers,
        replicas=replicas,
        staleness=staleness,
        device=device,
        dtype=dtype,
    )
    planned = None
    if plan:
        planned = _planned(plan, config, n, threads)
        config = replace(followed(config, planned), stale_lr_steps=stale_lr_steps)
        n = planned.num_ranks if n is None else n
    num_ranks = (Mesh.parse(config.mesh).size if config.mesh else 1) if n is None else n
    outcome = command.train(
        config, num_ranks=num_ranks, out=Console(), resume=resume, threads=threads
    )
    if not outcome.ok:
        print(outcome, file=sys.stderr, flush=True)
    elif isinstance(planned, Plan):
        print("\n".join(comparison(planned, config.log_dir)))
    return outcome.exit_code


def _planned(
    plan: str, config: TrainConfig, n: int | None, threads: int | None
) -> Plan | PipeDreamPlan:
    """Return the plan of a file, or the one that is predicted to be the fastest here."""
    from rich.console import Console

    from braid.plan.plan_file import Plan, read_plan
    from braid.plan.tables import ranking_table
    from braid.train.planned import ranking_here

    if plan == AUTO and n is None:
        msg = "--plan auto needs the number of ranks: add -n 2, or another"
        raise ConfigError(msg)
    if plan == AUTO and n is not None:
        with Console(stderr=True).status(f"measuring {config.model} on {n} ranks"):
            ranking, note = ranking_here(config, n, threads=threads)
        Console().print(ranking_table(ranking, 5))
        print(note, end="\n" * bool(note))
        return Plan.of(ranking.estimator, ranking.best, context=config.context)
    read = read_plan(plan)
    if isinstance(read, Plan) and n not in {None, read.num_ranks}:
        msg = f"{plan} is for {read.num_ranks} ranks, got -n {n}: make one for as many"
        raise ConfigError(msg)
    return read
