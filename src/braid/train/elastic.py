"""`braid train --min-ranks`: the same training on ranks that may be lost, replaced or added.

Without `batch_per_rank`, samples, learning rate and random numbers of a step are the same as in
`loop`: a step has one micro-batch for each rank at the start, on any later number of ranks
(`braid.elastic`), also on a mesh (`braid.elastic_mesh`). The current rank 0 writes the reports.
"""

from __future__ import annotations

import math
import signal
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from braid import context
from braid.elasticity import ElasticTraining, elastic, elastic_mesh
from braid.elasticity.learning_rate import rate_factor
from braid.errors import ConfigError
from braid.parallel.gradients.exact_norm import clip_whole_
from braid.runtime.clock import Clock
from braid.runtime.metrics import memory_bytes
from braid.train.config import MODELS, TrainConfig
from braid.train.corpus import Corpus
from braid.train.device import RankDevice
from braid.train.gpt import GPT, flops_per_token, generate, mean_loss
from braid.train.loop import PROMPT, TrainingDivergedError, adamw
from braid.train.reports import (
    Evaluated,
    Report,
    Reporter,
    Sampled,
    Stepped,
    TrainingFinished,
    TrainingStarted,
)
from braid.train.windows import Windows
from braid.types import Shares

__all__ = ["train_elastically"]

NUM_KEPT = 2  # reports of one step: of the step itself and of its evaluation


def _layers(model: nn.Module) -> list[nn.Module]:
    assert isinstance(model, GPT)
    return list(model.layers())


class _Samples(Dataset[tuple[Tensor, Tensor]]):
    """Data set that returns the window with a given index."""

    def __init__(self, windows: Windows) -> None:
        self._windows = windows

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self._windows.batch([index])
        return inputs[0], targets[0]


class _Reports:
    """Writes reports on the rank that currently is rank 0.

    Rank 0 may be lost between the end of a step and its report. The other ranks keep their last
    reports, and the next rank 0 writes those that the file lacks.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._reporter: Reporter | None = None
        self._last = 0  # step of the last report
        self._kept: deque[Report] = deque(maxlen=NUM_KEPT)

    def write(self, report: Report, step: int) -> None:
        """Write a report of `step` on rank 0; close the file and keep it on any other rank."""
        if context.world().rank:
            self.close()
            self._kept.append(report)
            return
        if self._reporter is None:
            self._reporter = Reporter(self._path, sys.stdout, self._clock)
            self._last = step + 1
        if step < self._last:  # steps are repeated
            self._reporter.rewind(step)
        if self._kept:
            self._reporter.write_missing(self._kept, step, following=report)
            self._kept.clear()
        self._last = step
        self._reporter.write(report)

    def close(self) -> None:
        """Close the file."""
        if self._reporter is not None:
            self._reporter.__exit__()
            self._reporter = None


class _Elastic:
    """Trains on one rank of an elastic training.

    Args:
        config: Configuration of the training.
        corpus: Text; the same on all ranks.
        place: Device of this rank.
        clock: Time source.
    """

    def __init__(
        self, config: TrainConfig, corpus: Corpus, place: RankDevice, clock: Clock
    ) -> None:
        self._config = config
        self._corpus = corpus
        self._place = place
        self._clock = clock
        self._reports = _Reports(Path(config.log_dir) / "metrics.jsonl", clock)
        self._windows = Windows(corpus.train, config.context, name="training text")
        self._held_out = Windows(corpus.held_out, config.context, name="held-out text")
        self._on_mesh = bool(config.mesh or config.shard)
        self._norm = 0.0  # norm of the last gradient, before clipping
        self._before = context.world(), context.world().statistics()
        self._training: ElasticTraining
        self._peak = place.peak(config.dtype, clock)

    def run(self) -> None:
        """Train to the end."""
        config, step = self._config, 0
        with self._made() as training:
            self._training = training
            per_rank = bool(config.batch_per_rank)
            num_shards = training.num_at_first if per_rank else training.num_shards
            if config.batch % num_shards:
                msg = (
                    f"--batch {config.batch} cannot be divided into {num_shards} micro-batches, "
                    "one for each rank at the start of the training: use a multiple of "
                    f"{num_shards}"
                )
                raise ConfigError(msg)
            size = config.batch // num_shards
            samples = _Samples(self._windows)
            loader = DataLoader(
                samples, size, shuffle=True, drop_last=True
            )  # same order as in `loop`
            if training.num_changes == 0:
                self._reports.write(self._started(), training.num_steps)
            began_ns = step_ns = self._clock.now_ns()
            first_loss = math.nan
            while training.num_steps < config.steps:
                for inputs, targets in training.batches(loader):
                    step = training.num_steps
                    with training.step():
                        self._backward(inputs.to(self._place.device), targets)
                    if training.num_steps > step:
                        first_loss = training.loss if math.isnan(first_loss) else first_loss
                        now_ns = self._clock.now_ns()
                        self._reports.write(self._stepped((now_ns - step_ns) / 1e9), step)
                        step_ns = now_ns
                    if training.num_steps >= config.steps:
                        break
        seconds = (self._clock.now_ns() - began_ns) / 1e9
        if config.sample_bytes:
            self._sample()
        saved = Path(config.checkpoints) / f"step-{training.num_steps:08d}"
        self._reports.write(
            TrainingFinished(
                step=training.num_steps,
                first_loss=first_loss,
                last_loss=training.loss,
                seconds=seconds,
                checkpoint=str(saved) if saved.exists() else "",
                shares=(),
            ),
            training.num_steps,
        )
        self._reports.close()

    def _sample(self) -> None:
        """Report text that the trained model generates."""
        config, training = self._config, self._training
        model = training.model
        if self._on_mesh:
            model.make_whole()
            model = model.model
        if context.world().rank == 0:
            text = generate(model, PROMPT, config.sample_bytes, seed=config.seed)
            self._reports.write(Sampled(step=training.num_steps, text=text), training.num_steps)

    def _made(self) -> ElasticTraining:
        config, world_size = self._config, context.membership().environment.world_size
        options: dict[str, Any] = {
            "shards": None if config.batch_per_rank else world_size,
            "seed": config.seed,
            "batch_per_rank": config.batch_per_rank or None,
            "update": self._update,
            "checkpoints": config.checkpoints,
            "checkpoint_every": config.checkpoint_every or config.steps,
            "verify": config.verify,
            "replace_slow": config.replace_slow,
        }
        options |= {"evaluate": self._evaluate, "evaluate_every": config.eval_every or config.steps}
        if not self._on_mesh:
            model, optimizer = self._build()
            return elastic(model, optimizer, **options)
        is_piped = "pp" in config.mesh  # in any of them
        return elastic_mesh(
            self._build,
            config.mesh or f"dp={context.world().size}",
            layers=_layers,
            clip=config.clip,
            copies=config.copies,
            shard=config.shard,
            num_microbatches=config.microbatches if is_piped else 1,
            schedule=config.schedule,
            **options,
        )

    def _build(self) -> tuple[GPT, Optimizer]:
        config = self._config
        model = GPT(MODELS[config.model], config.context, config.seed, dtype=config.dtype)
        model = model.to(self._place.device)
        return model, adamw(model, config)

    def _backward(self, inputs: Tensor, targets: Tensor) -> None:
        training, targets = self._training, targets.to(self._place.device)
        if self._on_mesh:
            training.add_loss(training.model.step(inputs, targets, loss=mean_loss))
            return
        loss: Tensor = training.model(inputs, targets)
        training.add_loss(loss)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's signature is untyped

    def _update(self) -> None:
        training = self._training
        if not math.isfinite(training.loss):
            msg = (
                f"loss is {training.loss} at step {training.num_steps + 1}: lower --lr, or resume "
                "from the last checkpoint"
            )
            raise TrainingDivergedError(msg)
        for group in training.optimizer.param_groups:
            group["lr"] = self._config.lr_at(training.num_steps)
        if not self._on_mesh:
            self._norm = clip_whole_(training.model.parameters(), self._config.clip)
        training.optimizer.step()

    def _evaluate(self) -> None:
        """Report the loss on held-out text."""
        group, training = context.world(), self._training
        count = min(self._config.eval_samples, len(self._held_out))
        indices = [i * len(self._held_out) // count for i in range(count)]
        batches = [indices[k : k + 4] for k in range(0, count, 4)]
        total = torch.zeros(1, dtype=torch.float64)
        for number, batch in enumerate(batches):
            inputs, targets = (x.to(self._place.device) for x in self._held_out.batch(batch))
            if self._on_mesh:
                loss = training.model.evaluate(inputs, targets, loss=mean_loss)
            elif number % group.size == group.rank:
                with torch.no_grad():
                    loss = training.model(inputs, targets)
            else:
                continue
            total += loss.double().cpu() * len(batch) / count
        if not self._on_mesh:
            group.all_reduce(total)
        step = training.num_steps
        self._reports.write(Evaluated(step=step, eval_loss=total.item()), step)

    def _started(self) -> TrainingStarted:
        config, training = self._config, self._training
        params = self._build()[0].parameters() if self._on_mesh else training.model.parameters()
        return TrainingStarted.of(
            *(config, self._corpus, self._place, params, self._peak),
            first_step=training.num_steps,
            num_ranks=context.world().size,
            shards=training.num_shards,
            threads=torch.get_num_threads(),
            flops_per_step=self._flops,
            torch=str(torch.__version__),
            notes=(f"elastic: continues with {config.min_ranks} ranks or more",),
        )

    @property
    def _flops(self) -> int:
        config = self._config
        per_token = flops_per_token(MODELS[config.model], config.context)
        return round(per_token * config.batch * config.context)

    def _stepped(self, seconds: float) -> Stepped:
        config, training, size = self._config, self._training, context.world().size
        wall_s = max(seconds, 1e-9)
        rule = config.batch_per_rank or None
        factor = rate_factor(rule, training.num_shards, training.num_at_first)
        memory: Mapping[str, int] = memory_bytes()
        return Stepped(
            step=training.num_steps,
            loss=training.loss,
            lr=config.lr_at(training.num_steps - 1) * factor,
            grad_norm=training.grad_norm if self._on_mesh else self._norm,
            step_s=wall_s,
            tokens_per_s=training.num_samples * config.context / wall_s,
            **self._shares(seconds)._asdict(),
            mfu=self._flops * training.num_samples / config.batch / size / wall_s / self._peak[0],
            **memory,
        )

    def _shares(self, seconds: float) -> Shares:
        """Return how this rank spent a step; zeros if the members changed during the step."""
        before, now = self._before, (context.world(), context.world().statistics())
        self._before = now
        if before[0] is not now[0]:
            return Shares(0.0, 0.0, 0.0)
        spent, waited = (now[1][name] - before[1][name] for name in ("spent_ns", "waited_ns"))
        return Shares.of(round(seconds * 1e9), spent, waited)


def train_elastically(config: TrainConfig, corpus: Corpus, place: RankDevice, clock: Clock) -> None:
    """Train on this rank; after Ctrl-C or SIGTERM the rank leaves at the end of its step.

    Raises:
        ConfigError: The data does not suffice.
        TrainingDivergedError: The loss is not finite.
    """
    signal.signal(signal.SIGINT, lambda *_: signal.raise_signal(signal.SIGTERM))
    _Elastic(config, corpus, place, clock).run()
