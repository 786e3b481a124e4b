"""Horovod's autotuning: the limit of a batch and the cycle time are searched during training.

braid run -n 2 examples/60_autotune.py
"""

from __future__ import annotations

import csv
import os
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import nn

import braid.compat.horovod.torch as hvd
from braid.parallel.data_parallel import accumulate

LAYERS, STEPS = 12, 22  # the search takes 1 + 6 samples of 2 + 1 steps
SEARCH = {
    "HOROVOD_AUTOTUNE": "1",
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "2",
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "6",
}


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(128, 128) for _ in range(LAYERS)])


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(x).square().mean()


def train(log: Path) -> nn.Module:
    os.environ.update(SEARCH, HOROVOD_AUTOTUNE_LOG=str(log))
    hvd.init()  # reads these variables
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
    return model


def alone() -> nn.Module:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        accumulate(model, [partial(loss_of, model, rank, step) for rank in range(2)])
        optimizer.step()
    return model


def show(log: Path) -> None:
    for row in list(csv.DictReader(log.read_text().splitlines()))[:-1]:  # without the best
        mib, ms = int(row["threshold_bytes"]) / (1 << 20), float(row["cycle_time_ms"])
        speed = float(row["bytes_per_s"]) / 1e6
        print(f"batches of {mib:g} MiB, collected for {ms:g} ms: {speed:.0f} MB/s")


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        model = train(Path(directory) / "search.csv")
        rank = hvd.rank()
        hvd.shutdown()  # until then the search may write its log
        if rank == 0:
            show(Path(directory) / "search.csv")
    assert all(map(torch.equal, model.parameters(), alone().parameters()))
    if rank == 0:
        print("weights equal one process, bit by bit, whatever was tried")


if __name__ == "__main__":
    main()
