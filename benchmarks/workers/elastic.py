"""A training of 25 million parameters that writes down when each step has ended.

Arguments: directory, number of steps, number of micro-batches.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import braid

WIDTH, HIDDEN = 1024, 4096
BATCH = 4  # samples of a micro-batch


def main() -> None:
    """Train, and write the digest of the weights at the end."""
    out, num_steps, num_shards = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rank = os.environ["RANK"]
    braid.init()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
        nn.Linear(HIDDEN, WIDTH),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x = torch.randn(num_steps * num_shards * BATCH, WIDTH)
    loader = DataLoader(TensorDataset(x), batch_size=BATCH, shuffle=True)
    with (
        (out / f"{rank}.steps").open("w", buffering=1) as file,
        braid.elastic(model, optimizer, shards=num_shards) as training,
    ):
        file.write(f"{os.getpid()} {time.monotonic_ns()} {training.num_steps}\n")
        for _ in training.epochs(1):
            for (batch,) in training.batches(loader):
                before = training.num_steps
                with training.step():
                    loss = functional.mse_loss(model(batch), batch)
                    loss.backward()  # type: ignore[no-untyped-call]  # torch's is untyped
                if training.num_steps > before:
                    file.write(f"{training.num_changes} {time.monotonic_ns()} {before + 1}\n")
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(param.detach().numpy().tobytes())
    (out / f"{rank}.digest").write_text(digest.hexdigest())


if __name__ == "__main__":
    main()
