"""Training by one call of `fit`: replicas, evaluation, early stop, and a resumed run.

braid run -n 2 examples/54_fit.py
"""

from __future__ import annotations

import tempfile

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import braid
from braid.strategies import EarlyStop, MirroredStrategy, MultiWorkerMirroredStrategy, Strategy

EPOCHS = 4


def train(
    strategy: Strategy, checkpoints: str | None = None, epochs: int = EPOCHS
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
    with tempfile.TemporaryDirectory() as name:
        directory = group.objects.broadcast(name)
        train(strategy, directory, epochs=2)
        resumed, again = train(strategy, directory)
        group.barrier()
    assert resumed == history
    assert all(map(torch.equal, again.parameters(), model.parameters()))
    threads = MirroredStrategy(["cpu"] * group.size)
    in_threads, reference = train(threads)
    threads.close()
    assert in_threads == history
    assert all(map(torch.equal, reference.parameters(), model.parameters()))
    if group.rank == 0:
        for epoch, results in enumerate(history):
            print(f"epoch {epoch}", *(f"{name} {value:.4f}" for name, value in results.items()))
        size = group.size
        print(f"{size} processes, resumed or not, and {size} threads agree bit by bit")


if __name__ == "__main__":
    main()
