"""fit: means over samples, callbacks, and a resumed training with the bits of one that ran on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from braid.errors import ConfigError
from braid.strategies import EarlyStop, fit, fitting
from braid.strategies.replicas import ThreadReplicas


@pytest.fixture
def single(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let checkpoints be those of a group of one that this test owns."""
    replicas = ThreadReplicas([torch.device("cpu")])
    (group,) = replicas.run(lambda _, group: group)
    monkeypatch.setattr(fitting, "init", lambda: group)
    yield
    replicas.close()


def pairs(*sizes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(size, 3, generator=generator) for size in sizes]
    return [(x, x.sum(1, keepdim=True)) for x in xs]


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.0), nn.Linear(8, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).abs().mean()


@pytest.mark.parametrize("where", ["alone", "mirrored"])
def test_results_are_means_over_all_samples(mirrored, where):
    strategy = mirrored if where == "mirrored" else None
    model, optimizer = made()
    data, others = pairs(6, 4), pairs(5, 1, 7)
    history = fit(
        model,
        data,
        optimizer=optimizer,
        loss=functional.mse_loss,
        epochs=2,
        strategy=strategy,
        validation=others,
        metrics={"error": error},
    )
    x, y = (torch.cat(parts) for parts in zip(*others, strict=True))
    with torch.no_grad():
        expected = functional.mse_loss(model(x), y).item(), error(model(x), y).item()
    found = history[-1]
    assert (found["validation_loss"], found["error"]) == pytest.approx(expected, rel=1e-5)
    assert history[1]["loss"] < history[0]["loss"]
    assert model.training


def test_a_model_that_returns_its_loss_needs_none():
    class Itself(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = made()[0]

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return functional.mse_loss(self.layer(x), y)

    model = Itself()
    (results,) = fit(model, pairs(4), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert results.keys() == {"loss"}


class Interrupts:
    """Raises in an epoch, once."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def on_epoch_end(self, epoch: int, results: Mapping[str, float]) -> None:
        if epoch == self._epoch:
            self._epoch = -1
            raise InterruptedError(str(results))


class Breaks(TensorDataset):
    """Raises at a sample, once."""

    at = -1

    def __getitem__(self, number: int) -> Any:
        if number == self.at:
            self.at = -1
            raise InterruptedError
        return super().__getitem__(number)


@pytest.mark.parametrize("moment", ["between", "inside"])
@pytest.mark.parametrize("own", [False, True])
def test_a_resumed_training_has_the_bits_of_one_that_ran_on(single, tmp_path, moment, own):
    x, y = pairs(24)[0]

    def train(where: Path, moment: str = "") -> tuple[list, list]:
        for attempt in range(2):
            model, optimizer = made()
            model[1].p = 0.5
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            data = Breaks(x, y)
            data.at = 13 if (moment, attempt) == ("inside", 0) else -1
            generator = torch.Generator().manual_seed(3) if own else None
            torch.manual_seed(5)
            callbacks = [EarlyStop("loss", 5)]
            if (moment, attempt) == ("between", 0):
                callbacks.append(Interrupts(1))
            try:
                history = fit(
                    model,
                    DataLoader(data, 4, shuffle=True, generator=generator),
                    optimizer=optimizer,
                    loss=functional.mse_loss,
                    epochs=3,
                    scheduler=scheduler,
                    callbacks=callbacks,
                    checkpoints=where,
                    save_every=1,
                )
            except InterruptedError:
                continue
            break
        assert attempt == bool(moment)
        return history, [param.detach() for param in model.parameters()]

    expected, weights = train(tmp_path / "whole")
    found, others = train(tmp_path / "resumed", moment)
    assert found == expected
    assert all(torch.equal(a, b) for a, b in zip(others, weights, strict=True))


def test_early_stop_ends_a_training_that_does_not_improve():
    model, optimizer = made()
    optimizer.param_groups[0]["lr"] = 0.0
    args = {"optimizer": optimizer, "loss": functional.mse_loss, "epochs": 9}
    assert len(fit(model, pairs(4), callbacks=[EarlyStop("loss", patience=2)], **args)) == 3
    with pytest.raises(ConfigError, match="watches 'validation_loss', but the results are loss"):
        fit(model, pairs(4), callbacks=[EarlyStop()], **args)
    with pytest.raises(ConfigError, match="patience must be at least 1"):
        EarlyStop(patience=0)


def test_progress_is_drawn_on_a_terminal():
    model, optimizer = made()
    console = Console(force_terminal=True, record=True, width=80, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    fit(model, pairs(4), optimizer=optimizer, loss=functional.mse_loss, console=console)
    console.file.close()
    assert "epoch 0: loss" in console.export_text()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"save_every": 2}, "save_every needs checkpoints="),
        ({"callbacks": [print]}, "callbacks need a method on_epoch_end"),
        ({"loss": None, "metrics": {"error": error}}, "metrics need loss="),
        ({"data": iter([])}, "data can be iterated once only"),
        ({"data": []}, "data contains no batches"),
        ({"validation": []}, "validation contains no batches"),
        ({"data": [torch.ones(2, 3)]}, "a batch must be a tuple of inputs and a target"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options, problem):
    model, optimizer = made()
    options = {"loss": functional.mse_loss, "data": pairs(2)} | options
    with pytest.raises(ConfigError, match=problem):
        fit(model, optimizer=optimizer, **options)
