"""The training loop: the same code for one rank and for many.

    batch of this step -> shards: forward, backward, average -> all ranks know all losses and
    whether to stop -> clip, optimizer -> when due: evaluate, checkpoint

Ranks decide together to stop, to write a checkpoint, or to raise because of NaN. Each decision
is computed from the same exchanged numbers, so all ranks take part in every collective.
"""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from braid.checkpoint import (
    BackgroundSaver,
    Checkpoint,
    OnSaved,
    Saving,
    restore_training,
)
from braid.comm import Group
from braid.comm.autograd import recompute_layers
from braid.comm.autograd.streams import current_stream, synchronize
from braid.errors import BraidError, CheckpointError, ConfigError
from braid.parallel.sharding import sharding_of
from braid.programs.sampling import OrderedSampler, SampleOrder
from braid.runtime.metrics import memory_bytes
from braid.train.asynchronous import AsynchronousStages
from braid.train.config import MODELS, TrainConfig
from braid.train.corpus import Corpus
from braid.train.device import CPU, RankDevice
from braid.train.gpt import GPT, flops_per_token, generate
from braid.train.mesh_shards import MeshShards
from braid.train.reports import (
    Checkpointed,
    Evaluated,
    Reporter,
    Sampled,
    Stepped,
    TrainingFinished,
    TrainingStarted,
)
from braid.train.shards import ParallelShards, ReferenceShards, Shards
from braid.train.stage_balance import stage_balance
from braid.train.windows import Windows
from braid.types import Shares

__all__ = ["PROMPT", "Stopping", "Trainer", "TrainingDivergedError", "adamw"]

LOG = logging.getLogger(__name__)

PROMPT = b"\0"  # the first byte of each document of a corpus


class TrainingDivergedError(BraidError, ArithmeticError):
    """Raised when the loss or a gradient is nonfinite."""


class Stopping:
    """Signal handler that records the signal that asked this rank to stop."""

    def __init__(self) -> None:
        self.signum = 0

    def __call__(self, signum: int, _frame: object) -> None:
        """Record the signal; the loop acts on it after the current step."""
        self.signum = signum


class Trainer:
    """Trains on one rank.

    Args:
        config: Configuration of the training.
        corpus: Text; the same on all ranks.
        group: Group of all ranks that train.
        reporter: Writer of the training's reports.
        stopping: Signal handler that records requests to stop.
        place: Device of model, optimizer and batches.

    Raises:
        ConfigError: The data does not suffice for the configuration.
    """

    def __init__(
        self,
        config: TrainConfig,
        corpus: Corpus,
        group: Group,
        reporter: Reporter,
        stopping: Stopping,
        place: RankDevice = CPU,
    ) -> None:
        self._config, self._place = config, place
        self._corpus = corpus
        self._group = group
        self._reporter = reporter
        self._stopping = stopping
        self._num_shards = config.check_ranks(group.size)
        device = place.device
        train = Windows(corpus.train, config.context, name="training text", device=device)
        self._held_out = Windows(
            corpus.held_out, config.context, name="held-out text", device=device
        )
        self._eval_indices = self._choose_eval(len(self._held_out))
        self._sampler = OrderedSampler(
            SampleOrder(num_samples=len(train), batch_size=config.batch, seed=config.seed)
        )
        tied = not config.versions  # stages that step at different times cannot share a weight
        self._model = GPT(
            MODELS[config.model], config.context, config.seed, tied=tied, dtype=config.dtype
        ).to(device)
        self._optimizer = adamw(self._model, config)
        self._notes: tuple[str, ...] = ()
        self._shards = self._make_shards(train)
        self._flops_per_step = (
            flops_per_token(MODELS[config.model], config.context) * config.batch * config.context
        )
        self._step = 0
        self._saved_step = -1
        self._saver = BackgroundSaver(group)
        self._saving: Saving | None = None
        self._peak = math.inf, ""  # until `run` finds it, with its source
        self._losses: list[float] = []  # of this run
        self.on_saved: OnSaved | None = None

    def _make_shards(self, windows: Windows) -> Shards | AsynchronousStages:
        config = self._config
        if config.versions:
            stages = AsynchronousStages(self._model, self._optimizer, windows, self._group, config)
            note = "each stage clips its own gradients, and steps are reported at each flush"
            self._notes += (f"asynchronous pipeline ({config.versions}): {note}", *stages.ages)
            self._notes += (stages.note,) if stages.note else ()
            return stages
        if config.has_segments:
            layers = recompute_layers(self._model, config.recompute)
            self._notes += (f"blocks in parentheses run again in backward: {layers.plan}",)
        if config.reference_shards:
            return ReferenceShards(self._model, windows, self._group, self._num_shards)
        if not config.is_on_mesh:
            return ParallelShards(self._model, self._optimizer, windows, self._group, config.shard)
        balance, picture = stage_balance(
            config, self._group, self._model.layers(), lambda rows: windows.batch(range(rows))[0]
        )
        self._notes += (picture,) if picture else ()
        return MeshShards(
            self._model, self._optimizer, windows, self._group, config, balance=balance
        )

    def resume(self, loaded: Checkpoint) -> None:
        """Continue from a checkpoint.

        Raises:
            CheckpointError: The checkpoint has another model, other data or another order of
                samples.
        """
        state = loaded.manifest.state
        if state.get("data") != self._corpus.digest:
            msg = (
                f"{loaded.path} was trained on other data (sha256 "
                f"{str(state.get('data'))[:12]}) than {self._corpus.name} (sha256 "
                f"{self._corpus.digest[:12]}): give the same --data, or start a new run in another "
                "--log-dir"
            )
            raise CheckpointError(msg)
        restore_training(loaded, self._model, self._optimizer)
        self._sampler.load_state_dict(state.get("sampler", {}))
        self._step = self._saved_step = loaded.manifest.step
        if self._step >= self._config.steps:
            msg = (
                f"no steps remain: {loaded.path} is at step {self._step} of "
                f"{self._config.steps}. Ask for more --steps"
            )
            raise ConfigError(msg)

    def run(self, *, resumed_from: str = "", notes: tuple[str, ...] = ()) -> int:
        """Train to the end, or until asked to stop.

        Args:
            resumed_from: Checkpoint from which the training continues, for the report; else empty.
            notes: Texts for the report of the start.

        Returns:
            The signal that ended the training early, or 0.

        Raises:
            TrainingDivergedError: The loss or a gradient is nonfinite. The message names rank and
                step and is the same on every rank.
            CheckpointError: The last checkpoint could not be written; of others, it is a warning.
        """
        config, clock = self._config, self._group.context.clock
        self._group.barrier()  # all ranks measure at the same time
        self._peak = self._place.peak(config.dtype, clock)
        self._group.barrier()
        self._reporter.rewind(self._step)
        self._reporter.write(self._started(resumed_from, (*notes, *self._notes)))
        start_ns, before = clock.now_ns(), self._group.statistics()
        signum = 0
        while self._step < config.steps and not signum:
            with self._group.context.events.span("step", seq=self._step + 1):
                signum = self.one_step()
            last = self._step == config.steps
            if last or (config.eval_every and self._step % config.eval_every == 0):
                self._evaluate()
            self._report_saved(wait=False)
            every = config.checkpoint_every
            if last or signum or (every and self._step % every == 0):
                self._checkpoint()
            if last or signum:
                self._report_saved(wait=True, is_last=True)
        after = self._group.statistics()
        shares = self._shares_of_all(clock.now_ns() - start_ns, before, after)
        if not signum and config.sample_bytes:
            self._sample()
        self._reporter.write(
            TrainingFinished(
                step=self._step,
                first_loss=self._losses[0],
                last_loss=self._losses[-1],
                seconds=(clock.now_ns() - start_ns) / 1e9,
                checkpoint=str(Path(config.checkpoints) / f"step-{self._step:08d}"),
                shares=shares,
                stopped_by=signal.Signals(signum).name if signum else "",
            )
        )
        return signum

    def tensors(self) -> list[torch.Tensor]:
        """Return this rank's parameters, gradients and optimizer states, after its first step."""
        states = self._optimizer.state
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        trained = [p for p in params if p in states]
        kept = [v for p in trained for v in states[p].values() if isinstance(v, torch.Tensor)]
        # with ZeRO, the optimizer has shards of parameters besides the model's parameters
        whole = list(self._model.parameters()) if self._config.shard else []
        grads = [] if whole else [p.grad for p in params if p.grad is not None]
        memory = self._shards.memory() if isinstance(self._shards, ParallelShards) else []
        return [*trained, *grads, *kept, *whole, *memory]

    def numerics(self) -> dict[str, Any]:
        """Return settings that affect the bits of the result, besides configuration and data."""
        return {
            "world_size": self._group.size,
            "shards": self._num_shards,
            "threads": torch.get_num_threads(),
            "sum_order": "rank" if self._group.engine.capabilities.rank_order else "any",
            "algorithms": self._group.engine.record(),
            "torch": str(torch.__version__),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "device": self._place.name,
            "dtype": self._config.dtype,
        }

    def one_step(self) -> int:
        """Take one optimizer step, and return the signal that asks to stop, or 0.

        On an asynchronous pipeline, take all steps up to the next flush.
        """
        if isinstance(self._shards, AsynchronousStages):
            return self._steps_to_flush(self._shards)
        config, events, clock = self._config, self._group.context.events, self._group.context.clock
        start_ns, before = clock.now_ns(), self._group.statistics()
        lr = config.lr_at(self._step)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.zero_grad()
        batch = self._sampler.next_batch()
        answers = self._shards.backward(batch, stop=bool(self._stopping.signum))
        self._refuse_not_finite(answers.losses)
        with events.span("optimizer"):
            norm = self._shards.clip(config.clip)
            self._refuse_gradient(norm, self._step)
            self._optimizer.step()
            synchronize(current_stream(self._place.device))  # so that the time includes GPU work
        wall_ns = clock.now_ns() - start_ns
        shares = _shares(wall_ns, before, self._group.statistics())
        self._report_step(answers.loss, norm, wall_ns / 1e9, shares)
        # Use the exchanged flag, because this rank may have received a signal after the exchange.
        return (self._stopping.signum or signal.SIGTERM) if answers.stop else 0

    def _steps_to_flush(self, stages: AsynchronousStages) -> int:
        """Take steps up to the next flush, evaluation or checkpoint; see `one_step`."""
        config, clock = self._config, self._group.context.clock
        start_ns, before = clock.now_ns(), self._group.statistics()
        ends = [config.steps]
        every = filter(None, (config.flush_every, config.eval_every, config.checkpoint_every))
        ends += [self._step - self._step % k + k for k in every]
        count = min(ends) - self._step
        batches = [self._sampler.next_batch() for _ in range(count)]
        losses, norms = stages.train_on(self._step, batches, self._refuse_gradient)
        synchronize(current_stream(self._place.device))
        wall_ns = clock.now_ns() - start_ns
        shares = _shares(wall_ns, before, self._group.statistics())
        for loss, norm in zip(losses, norms, strict=True):
            self._refuse_not_finite([loss])
            self._report_step(loss, norm, wall_ns / count / 1e9, shares)
        stops = self._group.all_gather(torch.tensor([int(bool(self._stopping.signum))]))
        return (self._stopping.signum or signal.SIGTERM) if stops.any() else 0

    def _report_step(self, loss: float, norm: float, seconds: float, shares: Shares) -> None:
        """Count a step, and report it."""
        config, wall_s = self._config, max(seconds, 1e-9)
        lr = config.lr_at(self._step)
        self._step += 1
        self._losses.append(loss)
        self._reporter.write(
            Stepped(
                step=self._step,
                loss=loss,
                lr=lr,
                grad_norm=norm,
                step_s=wall_s,
                tokens_per_s=config.batch * config.context / wall_s,
                **shares._asdict(),
                mfu=self._flops_per_step / self._group.size / wall_s / self._peak[0],
                **memory_bytes(),
            )
        )

    def _refuse_not_finite(self, losses: Sequence[float]) -> None:
        bad = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        if not bad:
            return
        values = ", ".join(f"{losses[rank]} on rank {rank}" for rank in bad)
        msg = (
            f"loss is {values} at step {self._step + 1} (learning rate "
            f"{self._config.lr_at(self._step):.2g}): lower --lr, or resume from the last "
            "checkpoint"
        )
        raise TrainingDivergedError(msg)

    def _refuse_gradient(self, norm: float, num_steps: int) -> None:
        if math.isfinite(norm):
            return
        engine = sharding_of(self._model)
        pieces = [] if engine is None else [(r.name, piece) for r, piece in engine.owned()]
        name = next(
            (
                name
                for name, param in pieces or self._model.named_parameters()
                if param.grad is not None and not param.grad.isfinite().all()
            ),
            "(all parameters together)",
        )
        msg = (
            f"gradient has the norm {norm} at step {num_steps + 1}, first in {name}: lower "
            "--lr, or resume from the last checkpoint"
        )
        raise TrainingDivergedError(msg)

    # Evaluation, checkpoints, samples

    def _evaluate(self) -> None:
        with self._group.context.events.span("evaluate", seq=self._step):
            loss = self._shards.evaluate(self._held_out, self._eval_indices)
        self._reporter.write(Evaluated(step=self._step, eval_loss=loss))

    def _checkpoint(self) -> None:
        if self._saved_step == self._step:
            return
        group = self._group
        snapshot, numbers = self._shards.checkpoint(self._optimizer)
        state = {
            "sampler": self._sampler.state_dict(),
            "data": self._corpus.digest,
            "model": self._config.model,
            "seed": self._config.seed,
            **numbers,
        }
        self._report_saved(wait=True)  # the previous save
        with group.context.events.span("checkpoint", seq=self._step):
            self._saving = self._saver.save(
                self._config.checkpoints,
                snapshot,
                step=self._step,
                state=state,
                numerics=self.numerics(),
                keep=self._config.keep,
                on_saved=self.on_saved,
            )
        self._saved_step = self._step

    def _report_saved(self, *, wait: bool, is_last: bool = False) -> None:
        """Report the pending save if it is complete; with `wait`, wait for it first.

        Raises:
            CheckpointError: The last save has failed. A failure before it is a warning.
        """
        saving = self._saving
        if saving is None or not (wait or saving.done()):
            return
        self._saving = None
        try:
            path = self._saver.wait()
        except CheckpointError as error:
            if is_last:
                raise
            if self._group.rank == 0:
                LOG.warning("the training goes on without a checkpoint: %s", error)
            return
        self._reporter.write(
            Checkpointed(
                step=saving.step,
                path=str(path),
                stall_s=saving.stall_s,
                write_s=saving.write_s,
            )
        )

    def _sample(self) -> None:
        self._shards.share_weights()
        if self._group.rank == 0:
            text = generate(self._model, PROMPT, self._config.sample_bytes, seed=self._config.seed)
            self._reporter.write(Sampled(step=self._step, text=text))
        self._group.barrier()

    # Reported values

    def _choose_eval(self, available: int) -> list[int]:
        """Choose evenly spread samples for evaluations, a multiple of the number of shards."""
        count = min(self._config.eval_samples, available) // self._num_shards * self._num_shards
        if not count:
            msg = (
                f"the held-out text has {available} sequences (eval_samples is "
                f"{self._config.eval_samples}), and an evaluation needs {self._num_shards}, one "
                "per shard: give more --data, or a shorter --context"
            )
            raise ConfigError(msg)
        return [i * available // count for i in range(count)]

    def _shares_of_all(
        self, wall_ns: int, before: dict[str, int], after: dict[str, int]
    ) -> tuple[Shares, ...]:
        mine = torch.tensor([_shares(wall_ns, before, after)], dtype=torch.float64)
        return tuple(Shares(*row) for row in self._group.all_gather(mine).tolist())

    def _started(self, resumed_from: str, notes: tuple[str, ...]) -> TrainingStarted:
        config = self._config
        return TrainingStarted.of(
            *(config, self._corpus, self._place, self._model.parameters(), self._peak),
            first_step=self._step,
            num_ranks=self._group.size,
            shards=self._num_shards,
            threads=torch.get_num_threads(),
            flops_per_step=self._flops_per_step,
            torch=str(torch.__version__),
            resumed_from=resumed_from,
            notes=notes,
        )


def adamw(model: GPT, config: TrainConfig) -> torch.optim.Optimizer:
    """Make an AdamW that decays matrices only.

    Source: I. Loshchilov, F. Hutter, ICLR 2019; betas of GPT-3.
    """
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)


def _shares(wall_ns: int, before: dict[str, int], after: dict[str, int]) -> Shares:
    spent, waited = (after[name] - before[name] for name in ("spent_ns", "waited_ns"))
    return Shares.of(wall_ns, spent, waited)
