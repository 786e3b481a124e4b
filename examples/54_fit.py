"""A training without a loop: replicas, evaluation, early stop, and a resumed run, in one call.

braid run -n 2 examples/54_fit.py
"""

from __future__ import annotations

import tempfile

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import braid
from braid.strategies import EarlyStop, MultiWorkerMirroredStrategy, Strategy

EPOCHS = 4


def train(
    strategy: Strategy | None, checkpoints: str | None = None, epochs: int = EPOCHS
) -> tuple[list[dict[str, float]], nn.Module]:
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    history = braid.fit(
        model,
        DataLoader(data, 32, shuffle=True),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        loss=functional.mse_loss,
        epochs=epochs,
        strategy=strategy,
        validation=DataLoader(data, 50),
        metrics={"error": functional.l1_loss},
        callbacks=[EarlyStop()],
        checkpoints=checkpoints,
    )
    return history, model


def main() -> None:
    torch.set_num_threads(1)
    group = braid.init()
    strategy = MultiWorkerMirroredStrategy(device="cpu", group=group)
    history, model = train(strategy)
    with tempfile.TemporaryDirectory() as own:
        directory = group.objects.broadcast(own)
        train(strategy, directory, epochs=2)
        resumed, again = train(strategy, directory)
        group.barrier()
    assert resumed == history
    assert all(map(torch.equal, again.parameters(), model.parameters()))
    alone, reference = train(None)
    if group.rank == 0:
        for epoch, results in enumerate(history):
            print(f"epoch {epoch}", *(f"{name} {value:.4f}" for name, value in results.items()))
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert all(
        abs(ours["error"] - other["error"]) < 1e-3
        for ours, other in zip(history, alone, strict=True)
    )
    if group.rank == 0:
        print(f"{group.size} replicas learn what one process does, also when resumed")


if __name__ == "__main__":
    main()
