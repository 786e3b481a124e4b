"""The training loop on a parameter server: each worker takes its own steps.

    scheduler, servers    serve until the workers are done
    worker k              its share of each batch -> backward -> clip -> step: push, pull

Workers do not exchange losses: exchanging them would make every worker wait for the slowest,
whatever the staleness. Reports describe the first worker. A worker clips its gradient before it
pushes it. At staleness 0, and if the norm stays below the limit, workers compute the same as `braid
train` with collectives.
"""

from __future__ import annotations

import math
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from braid import ps
from braid.checkpoint import open_last, training_tensors
from braid.comm import Group
from braid.errors import CheckpointError, ConfigError
from braid.parallel.gradients.exact_norm import clip_whole_
from braid.programs.sampling import OrderedSampler, SampleOrder, share_of
from braid.runtime.metrics import memory_bytes
from braid.runtime.rendezvous import Loaded, Saved
from braid.runtime.rendezvous.membership import Membership
from braid.train.config import MODELS, TrainConfig, checkpoints_in
from braid.train.corpus import Corpus
from braid.train.device import RankDevice
from braid.train.gpt import GPT, flops_per_token, generate
from braid.train.loop import PROMPT, Stopping, TrainingDivergedError
from braid.train.reports import (
    Checkpointed,
    Evaluated,
    Reporter,
    Sampled,
    Stepped,
    TrainingFinished,
    TrainingStarted,
)
from braid.train.windows import Windows
from braid.types import Shares

__all__ = ["train_on_servers"]


def train_on_servers(
    config: TrainConfig,
    corpus: Corpus,
    group: Group,
    stopping: Stopping,
    member: Membership,
    place: RankDevice,
) -> int:
    """Train, or serve parameters, on this rank; return the signal that ended it early, or 0.

    Raises:
        ConfigError: There is too little data, or no steps remain.
        CheckpointError: The checkpoint has other data or no servers.
    """
    restored, state = _opened(config, corpus, member.environment.resume)
    options = ps.Options(replicas=config.replicas, restore=restored)
    model = GPT(MODELS[config.model], config.context, config.seed, dtype=config.dtype)
    with ps.join(group, config.servers, options) as node:
        if node.is_worker:  # servers keep tables in host memory
            model.to(place.device)
        served = ps.ParameterServer(
            model, node, _adamw(model, config), ps.Consistency(staleness=config.staleness)
        )
        if not node.is_worker:
            node.serve()
            return 0
        is_first = node.number == 0
        metrics = Path(config.log_dir) / "metrics.jsonl" if is_first else None
        with Reporter(metrics, sys.stdout, group.context.clock) as reporter:
            worker = _Worker(
                config,
                corpus,
                group,
                node=node,
                served=served,
                reporter=reporter,
                stopping=stopping,
                member=member,
                place=place,
            )
            return worker.run(restored, state)


def _opened(config: TrainConfig, corpus: Corpus, where: str) -> tuple[Path | None, dict[str, Any]]:
    """Return the checkpoint that `--resume` names, and the training state in it."""
    directory = checkpoints_in(config.checkpoints if where == "auto" else where)
    if not where or (where == "auto" and not directory.is_dir()):
        return None, {}
    checkpoint = open_last(directory)
    state = checkpoint.manifest.state
    if state.get("data") != corpus.digest or "tables" not in state:
        msg = (
            f"{checkpoint.path} cannot be resumed with --strategy ps: it was trained on other data "
            "or without servers. Give the same --data and --strategy, or start a new run in "
            "another --log-dir"
        )
        raise CheckpointError(msg)
    if checkpoint.manifest.step >= config.steps:
        msg = (
            f"no steps remain: {checkpoint.path} is at step {checkpoint.manifest.step} of "
            f"{config.steps}. Ask for more --steps"
        )
        raise ConfigError(msg)
    return checkpoint.path, {**state, "step": checkpoint.manifest.step}


class _Worker:
    """Trains on one worker."""

    def __init__(
        self,
        config: TrainConfig,
        corpus: Corpus,
        group: Group,
        *,
        node: ps.Node,
        served: ps.ParameterServer,
        reporter: Reporter,
        stopping: Stopping,
        member: Membership,
        place: RankDevice,
    ) -> None:
        self._config, self._corpus, self._group = config, corpus, group
        self._node, self._served, self._reporter = node, served, reporter
        self._stopping, self._member, self._place = stopping, member, place
        self._windows = Windows(
            corpus.train, config.context, name="training text", device=place.device
        )
        self._sampler = OrderedSampler(
            SampleOrder(num_samples=len(self._windows), batch_size=config.batch, seed=config.seed)
        )
        self._flops = flops_per_token(MODELS[config.model], config.context)
        self._losses: list[float] = []
        self._step = self._saved_step = self._first_step = 0
        self._peak = 0.0, ""

    @property
    def _is_first(self) -> bool:
        return self._node.number == 0

    def run(self, restored: Path | None, state: dict[str, Any]) -> int:
        """Train to the end, or until asked to stop; return the signal, or 0."""
        config, clock = self._config, self._group.context.clock
        if restored is not None:
            self._sampler.load_state_dict(state.get("sampler", {}))
            self._step = self._saved_step = self._first_step = state["step"]
            if self._member.control is not None and self._is_first:
                where = self._member.environment.resume
                self._member.control.send(Loaded(self._step, str(restored), where))
        self._peak = self._place.peak(config.dtype, clock)
        self._reporter.rewind(self._step)
        self._reporter.write(self._started(str(restored or "")))
        start_ns = clock.now_ns()
        asked = False
        while self._step < self._end:
            if self._stopping.signum and not asked:
                asked = True  # stop later: other workers may be ahead by the staleness
                self._node.request_stop(self._step - self._first_step + config.staleness + 2)
            with self._group.context.events.span("step", seq=self._step + 1):
                self._one_step()
            last = self._step == config.steps
            if self._is_first and (last or _is_due(config.eval_every, self._step)):
                self._reporter.write(Evaluated(step=self._step, eval_loss=self._evaluate()))
            if last or _is_due(config.checkpoint_every, self._step):
                self._checkpoint()
        stopped = self._step < config.steps
        signum = (self._stopping.signum or signal.SIGTERM) if stopped else 0
        if signum and self._saved_step != self._step:
            self._checkpoint()
        if self._is_first and not signum and config.sample_bytes:
            text = generate(self._model, PROMPT, config.sample_bytes, seed=config.seed)
            self._reporter.write(Sampled(step=self._step, text=text))
        self._reporter.write(
            TrainingFinished(
                step=self._step,
                first_loss=self._losses[0] if self._losses else math.nan,
                last_loss=self._losses[-1] if self._losses else math.nan,
                seconds=(clock.now_ns() - start_ns) / 1e9,
                checkpoint=str(Path(config.checkpoints) / f"step-{self._step:08d}"),
                shares=(Shares(1.0, 0.0, 0.0),),
                stopped_by=signal.Signals(signum).name if signum else "",
            )
        )
        return signum

    @property
    def _end(self) -> int:
        """Step at which the training ends: the configured one, or the one agreed by workers."""
        stop_at = self._node.stop_at
        steps = self._config.steps
        return steps if stop_at is None else min(steps, self._first_step + stop_at)

    @property
    def _model(self) -> GPT:
        model = self._served.module
        assert isinstance(model, GPT), "the served module is the model"
        return model

    def _one_step(self) -> None:
        config, clock = self._config, self._group.context.clock
        start_ns = clock.now_ns()
        lr = config.lr_at(self._step)
        self._served.set_lr(lr)
        indices = share_of(self._sampler.next_batch(), self._node.number, self._node.num_workers)
        with self._served.accumulate():  # clip before the push
            loss = self._served(*self._windows.batch(indices))
            loss.backward()
        if not math.isfinite(loss.item()):
            msg = (
                f"loss is {loss.item()} on worker {self._node.number} at step {self._step + 1} "
                f"(learning rate {lr:.2g}): lower --lr, or resume from the last checkpoint"
            )
            raise TrainingDivergedError(msg)
        norm = clip_whole_(self._model.parameters(), config.clip)
        computed_ns = clock.now_ns()
        self._served.step()
        self._step += 1
        self._losses.append(loss.item())
        wall_ns = max(clock.now_ns() - start_ns, 1)
        waited = (clock.now_ns() - computed_ns) / wall_ns
        tokens = config.batch * config.context
        share = tokens / self._node.num_workers
        self._reporter.write(
            Stepped(
                step=self._step,
                loss=loss.item(),
                lr=lr,
                grad_norm=norm,
                step_s=wall_ns / 1e9,
                tokens_per_s=tokens / wall_ns * 1e9,
                compute=1 - waited,
                wait=waited,
                transfer=0.0,
                mfu=self._flops * share / wall_ns * 1e9 / self._peak[0],
                **memory_bytes(),
            )
        )

    def _evaluate(self) -> float:
        windows = Windows(
            self._corpus.held_out,
            self._config.context,
            name="held-out text",
            device=self._place.device,
        )
        count = min(self._config.eval_samples, len(windows))
        indices = [i * len(windows) // count for i in range(count)]
        self._served.wait()
        with torch.no_grad(), self._group.context.events.span("evaluate", seq=self._step):
            loss: torch.Tensor = self._model(*windows.batch(indices))
        return loss.item()

    def _checkpoint(self) -> None:
        clock, config = self._group.context.clock, self._config
        start_ns = clock.now_ns()
        self._served.wait()
        state = {
            "sampler": self._sampler.state_dict(),
            "data": self._corpus.digest,
            "model": config.model,
            "seed": config.seed,
            "tables": self._served.num_partitions,
        }
        with self._group.context.events.span("checkpoint", seq=self._step):
            extra = {name: x.detach().cpu() for name, x in training_tensors(self._model).items()}
            self._node.save(
                config.checkpoints, self._step, extra=extra, state=state, keep=config.keep
            )
        self._saved_step = self._step
        if not self._is_first:
            return
        path = Path(config.checkpoints) / f"step-{self._step:08d}"
        seconds = (clock.now_ns() - start_ns) / 1e9
        self._reporter.write(Checkpointed(step=self._step, path=str(path), stall_s=seconds))
        if self._member.control is not None:
            self._member.control.send(Saved(self._step, str(path), True))

    def _started(self, resumed_from: str) -> TrainingStarted:
        config = self._config
        servers = f"{config.servers} server{'s' * (config.servers > 1)}"
        return TrainingStarted.of(
            *(config, self._corpus, self._place, self._model.parameters(), self._peak),
            first_step=self._step,
            num_ranks=self._node.num_workers,
            shards=self._node.num_workers,
            threads=torch.get_num_threads(),
            flops_per_step=self._flops * config.batch * config.context,
            torch=str(torch.__version__),
            resumed_from=resumed_from,
            notes=(
                (
                    f"parameter server: {servers}, staleness {config.staleness}, replicas "
                    f"{config.replicas}; reports describe worker 0"
                ),
            ),
        )


def _is_due(every: int, step: int) -> bool:
    return bool(every) and step % every == 0


def _adamw(model: GPT, config: TrainConfig) -> list[ps.ParamGroup]:
    """Return AdamW for servers, with weight decay for matrices only."""
    make = partial(torch.optim.AdamW, lr=config.lr, betas=(0.9, 0.95), fused=True)
    params = list(model.parameters())
    return [
        ([p for p in params if p.dim() > 1], partial(make, weight_decay=config.weight_decay)),
        ([p for p in params if p.dim() == 1], partial(make, weight_decay=0.0)),
    ]
