"""fit: a whole training in one call, without a loop in the program.

    history = braid.fit(
        model,
        loader,                                    batches (input, ..., target)
        optimizer=optimizer,
        loss=functional.cross_entropy,
        strategy=MirroredStrategy(["cpu", "cpu"]), or none
        validation=other_loader,
        callbacks=[EarlyStop("validation_loss")],
        checkpoints="runs/model",                  goes on there when it is called again
    )

    epoch ──> strategy.run(step) for each batch ──> means over all samples ──> callbacks
                    └─ every `save_every` steps: braid.save, with the place in the data

The loop does nothing that a program cannot do with `Strategy`, `braid.save` and `braid.load`.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

from braid.comm.autograd.nested import map_tensors
from braid.context import init
from braid.errors import ConfigError
from braid.parallel.resume import load, save
from braid.strategies.callbacks import Callback
from braid.strategies.datasets import num_samples, on_device
from braid.strategies.kinds import OneDeviceStrategy
from braid.strategies.strategy import Strategy
from braid.strategies.values import SyncOnRead

__all__ = ["fit"]

LOG = logging.getLogger(__name__)

KEPT = ("epoch", "batch", "has_ended", "history", "sums")
Measure = Callable[..., torch.Tensor]


def fit(
    model: nn.Module,
    data: Iterable[Any],
    *,
    optimizer: torch.optim.Optimizer,
    loss: Measure | None = None,
    epochs: int = 1,
    strategy: Strategy | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    validation: Iterable[Any] | None = None,
    metrics: Mapping[str, Measure] | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoints: str | os.PathLike[str] | None = None,
    save_every: int = 0,
    console: Console | None = None,
) -> list[dict[str, float]]:
    """Train a model, and return the results of each epoch; all processes of the strategy call it.

    Args:
        model: Model, made in the strategy's scope or before.
        data: Batches of all replicas together, equal in all processes, such as a `DataLoader`: the
            inputs of the model and the target. The same batches in each epoch, up to shuffling.
        optimizer: Optimizer of the model's parameters.
        loss: Function of the model's output and the target, a mean over samples; when None, the
            model returns the loss of a whole batch.
        epochs: Number of passes over the data.
        strategy: Replicas; this thread alone when None.
        scheduler: Learning rate scheduler, which steps after each epoch.
        validation: Batches that the model is evaluated on after each epoch.
        metrics: Functions of the output and the target, means over samples, by name.
        callbacks: Actions after each epoch; the training ends if one returns True in any process.
        checkpoints: Directory of checkpoints. The training resumes from the last one. The result is
            bitwise equal to an uninterrupted training if the order of data is drawn from torch's
            default generator or the loader's generator.
        save_every: Number of steps between checkpoints; 0 for one after each epoch.
        console: Console for the progress of rank 0; standard error when None, if it is a terminal.

    Returns:
        Results of each epoch, see `Callback`.

    Raises:
        ConfigError: An argument is not valid, or data have no batch.
        CheckpointError: A checkpoint is of another training, or saving failed.
    """
    problems = {
        f"epochs must be at least 1, got {epochs}": epochs < 1,
        f"save_every must be at least 0, got {save_every}": save_every < 0,
        "save_every needs checkpoints=, a directory": bool(save_every) and checkpoints is None,
        "metrics need loss=, so that the model returns outputs": bool(metrics) and loss is None,
        "data can be iterated once only: pass a list or a DataLoader": isinstance(data, Iterator),
        "callbacks need a method on_epoch_end": not all(isinstance(c, Callback) for c in callbacks),
    }
    if any(problems.values()):
        raise ConfigError("; ".join(text for text, is_wrong in problems.items() if is_wrong))
    with ExitStack() as stack:
        if strategy is None:
            strategy = OneDeviceStrategy(next(model.parameters()).device)
            stack.callback(strategy.close)
        strategy.adopt(model, optimizer)
        steps = _Steps(strategy, model, optimizer, loss, metrics or {})
        place = _DataPlace(data, [c for c in callbacks if hasattr(c, "state_dict")])
        group = strategy.across or (None if checkpoints is None else init())
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "group": group}
        state |= {"place": place} | ({} if scheduler is None else {"scheduler": scheduler})
        number = 0 if checkpoints is None else load(checkpoints, **state)
        console = console or Console(stderr=True)
        is_shown = (group is None or group.rank == 0) and console.is_terminal
        progress = stack.enter_context(Progress(console=console, disable=not is_shown))
        bar = progress.add_task("", total=len(data) if isinstance(data, Sized) else None)
        while place.epoch < epochs and not place.has_ended:
            progress.reset(bar, completed=place.batch, description=f"epoch {place.epoch}")
            totals = steps.totals()
            for batch in strategy.experimental_distribute_dataset(place.rest_of_data()):
                strategy.run(steps.train, args=(batch, totals))
                place.batch += 1
                number += 1
                progress.advance(bar)
                if save_every and checkpoints is not None and place.batch % save_every == 0:
                    place.sums = steps.sums(totals, place.sums)
                    totals = steps.totals()
                    save(checkpoints, step=number, **state)
            results = _means(steps.sums(totals, place.sums), "data")
            if validation is not None:
                evaluated = _means(steps.evaluate(validation), "validation")
                results["validation_loss"] = evaluated.pop("loss")
                results |= evaluated
            if scheduler is not None:
                scheduler.step()
            ends = [bool(callback.on_epoch_end(place.epoch, results)) for callback in callbacks]
            text = ", ".join(f"{name} {value:.4g}" for name, value in results.items())
            LOG.info("epoch %d: %s", place.epoch, text)
            if is_shown:
                progress.console.print(f"epoch {place.epoch}: {text}")
            place.end_epoch(results, is_last=strategy.reduce("sum", float(any(ends))) > 0)
            number += 1  # the end of an epoch counts as a step, with a separate checkpoint
            if checkpoints is not None:
                save(checkpoints, step=number, **state)
        strategy.check_replicas()
    return place.history


class _DataPlace:
    """Position of a training in its data, with all state that a resumed training needs."""

    def __init__(self, data: Iterable[Any], callbacks: Sequence[Any]) -> None:
        self.epoch, self.batch, self.has_ended = 0, 0, False
        self.history: list[dict[str, float]] = []
        self.sums: dict[str, float] = {}
        self._data, self._callbacks = data, callbacks
        generator = getattr(data, "generator", None)
        self._generators = [torch.default_generator, *([] if generator is None else [generator])]
        self._states = self._get()  # at the begin of the epoch

    def rest_of_data(self) -> Iterator[Any]:
        """Yield the remaining batches of this epoch, beginning with the current one.

        The order of an epoch is drawn when it begins. A resumed epoch draws the same order, from
        the generator states that were saved at its beginning.
        """
        now = self._get()
        if self.batch:
            self._set(self._states)
        else:
            self._states = now
        batches = iter(self._data)
        if self.batch:
            deque(islice(batches, self.batch), maxlen=0)
            self._set(now[:1])
        yield from batches

    def end_epoch(self, results: dict[str, float], *, is_last: bool) -> None:
        """Record the results of an epoch, and go on to the next one."""
        self.history.append(results)
        self.epoch, self.batch, self.has_ended, self.sums = self.epoch + 1, 0, is_last, {}

    def _get(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set(self, states: Sequence[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=False):
            generator.set_state(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed training needs."""
        callbacks = [callback.state_dict() for callback in self._callbacks]
        kept = {name: getattr(self, name) for name in KEPT}
        return {**kept, "states": self._states, "now": self._get(), "callbacks": callbacks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state that `state_dict` returned."""
        for name in KEPT:
            setattr(self, name, state[name])
        self._states = state["states"]
        self._set(state["now"])
        for callback, callback_state in zip(self._callbacks, state["callbacks"], strict=True):
            callback.load_state_dict(callback_state)


class _Steps:
    """Steps of training and evaluation, and sums of their values over samples."""

    def __init__(
        self,
        strategy: Strategy,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Measure | None,
        metrics: Mapping[str, Measure],
    ) -> None:
        self._strategy, self._model, self._optimizer = strategy, model, optimizer
        self._loss, self._metrics = loss, metrics

    def totals(self) -> dict[str, SyncOnRead]:
        """Return a zero for each result, to which each replica adds its values."""
        zero = torch.zeros((), dtype=torch.float64)
        names = ("loss", *self._metrics, "samples")
        return {name: self._strategy.sync_on_read(zero) for name in names}

    def sums(
        self, totals: Mapping[str, SyncOnRead], before: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the sums of `totals` over all replicas, added to the sums in `before`."""
        sums = {k: self._strategy.reduce("sum", total).item() for k, total in totals.items()}
        return {name: before.get(name, 0.0) + value for name, value in sums.items()}

    def train(self, share: Any, totals: Mapping[str, SyncOnRead]) -> None:
        """Run one training step in a replica, on its share of the batch."""
        self._optimizer.zero_grad()
        values, count = self._values(share, {})
        values["loss"].backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        _add(values, count, {name: total.value for name, total in totals.items()})

    @torch.no_grad()
    def evaluate(self, data: Iterable[Any]) -> dict[str, float]:
        """Return sums over all samples, also of batches with fewer samples than replicas."""
        totals, small = self.totals(), list[Any]()
        size, was_training = self._strategy.num_replicas_in_sync, self._model.training

        def large() -> Iterator[Any]:
            for batch in data:
                if num_samples(batch) >= size:
                    yield batch
                else:
                    small.append(map_tensors(batch, partial(on_device, self._strategy.devices[0])))

        def step(share: Any) -> None:
            values, count = self._values(share, self._metrics)
            _add(values, count, {name: total.value for name, total in totals.items()})

        self._model.eval()
        for batch in self._strategy.experimental_distribute_dataset(large()):
            self._strategy.run(step, args=(batch,))
        for batch in small:  # each process has the whole batch, and adds its part
            values, count = self._values(batch, self._metrics)
            part = count * len(self._strategy.devices) / size
            _add(values, part, {name: total.values[0] for name, total in totals.items()})
        self._model.train(was_training)
        return self.sums(totals, {})

    def _values(
        self, batch: Any, metrics: Mapping[str, Measure]
    ) -> tuple[dict[str, torch.Tensor], int]:
        """Return the loss and the metrics, and the number of samples."""
        parts = list(batch) if isinstance(batch, (tuple, list)) else [batch]
        if self._loss is None:
            return {"loss": self._model(*parts)}, num_samples(batch)
        if len(parts) < 2:
            msg = "with loss=, a batch must be a tuple of inputs and a target"
            raise ConfigError(msg)
        output, target = self._model(*parts[:-1]), parts[-1]
        values = {name: metric(output, target) for name, metric in metrics.items()}
        return {"loss": self._loss(output, target), **values}, num_samples(batch)


def _add(
    values: Mapping[str, torch.Tensor], count: float, totals: Mapping[str, torch.Tensor]
) -> None:
    for name, value in values.items():
        totals[name].add_(value.detach() * count)
    totals["samples"].add_(count)


def _means(sums: dict[str, float], what: str) -> dict[str, float]:
    """Return means over samples.

    Raises:
        ConfigError: The number of samples is 0.
    """
    count = sums.pop("samples")
    if not count:
        msg = (
            f"{what} contains no batches: pass a list of batches or a DataLoader that is not empty"
        )
        raise ConfigError(msg)
    return {name: value / count for name, value in sums.items()}
