"""Functions for `braid.launch.ray.run`."""

from __future__ import annotations

import os
import signal

import torch
from torch.utils.data import DataLoader

import braid


def end() -> None:
    """End rank 1 without a result."""
    braid.init().barrier()
    if os.environ["RANK"] == "1":
        os._exit(0)


def train() -> int:
    """Train until rank 1 kills itself, and then without it."""
    braid.init()
    model = torch.nn.Linear(4, 1)
    loader = DataLoader(torch.randn(40, 4), batch_size=2)
    with braid.elastic(model, torch.optim.SGD(model.parameters()), shards=2) as training:
        for _ in training.epochs(1):
            for batch in training.batches(loader):
                with training.step():
                    training.model(batch).square().mean().backward()
                if os.environ["RANK"] == "1" and training.num_steps == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
    return training.num_steps
