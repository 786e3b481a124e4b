"""A training of 25 million parameters that records the end time of each step.

Arguments: directory, number of steps, number of micro-batches, samples of a micro-batch, the model
(mlp or gpt), and on a mesh: the mesh, the stage of sharding, and 1 with copies or 0 without.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import braid
from braid.elasticity import ElasticTraining
from braid.train.gpt import GPT, VOCABULARY, mean_loss
from braid.train.model_sizes import MODELS

WIDTH, HIDDEN = 1024, 4096
CONTEXT = 128  # tokens of a sequence
DISTINCT = 4096  # samples; more of them repeat


class _Samples(Dataset[torch.Tensor]):
    """Random rows, or sequences of tokens."""

    def __init__(self, length: int, model: str) -> None:
        count = min(length, DISTINCT)
        tokens = torch.randint(0, VOCABULARY, (count, CONTEXT + 1))
        self._rows = torch.randn(count, WIDTH) if model == "mlp" else tokens
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index % DISTINCT]


class _Layers(nn.Module):
    """Sequential layers that can be sharded separately."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = (WIDTH, HIDDEN, HIDDEN, WIDTH)
        self.rows = nn.ModuleList(
            nn.Sequential(nn.Linear(a, b), nn.ReLU() if b == HIDDEN else nn.Identity())
            for a, b in pairwise(sizes)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the last layer."""
        for row in self.rows:
            x = row(x)
        return x


def _build(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _Layers() if name == "mlp" else GPT(MODELS["medium"], CONTEXT)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _rows(model: nn.Module) -> list[nn.Module]:
    if isinstance(model, GPT):
        return model.layers()
    assert isinstance(model, _Layers)
    return list(model.rows)


def _train(training: ElasticTraining, batch: torch.Tensor, *, on_mesh: bool) -> None:
    is_gpt = not batch.is_floating_point()
    x, y = (batch[:, :-1], batch[:, 1:]) if is_gpt else (batch, batch)
    loss_of = mean_loss if is_gpt else functional.mse_loss
    if on_mesh:
        training.model.step(x, y, loss=loss_of)
    else:
        loss: torch.Tensor = loss_of(training.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's is untyped


def main() -> None:
    """Train, and write the digest of the weights at the end."""
    out, numbers, name, on = Path(sys.argv[1]), map(int, sys.argv[2:5]), sys.argv[5], sys.argv[6:]
    num_steps, num_shards, num_samples = numbers
    rank = os.environ["RANK"]
    braid.init()
    on_mesh = bool(on)
    if on_mesh:
        mesh, shard, copies = on[0], int(on[1]), on[2] == "1"
        made = braid.elastic_mesh(
            *(partial(_build, name), mesh),
            layers=_rows,
            shards=num_shards,
            shard=shard,
            copies=copies,
        )
    else:
        made = braid.elastic(*_build(name), shards=num_shards)
    torch.manual_seed(1)
    data = _Samples(num_steps * num_shards * num_samples, name)
    loader = DataLoader(data, batch_size=num_samples, shuffle=True)
    with (
        (out / f"{rank}.steps").open("w", buffering=1) as file,
        made as training,
    ):
        file.write(f"{os.getpid()} {time.monotonic_ns()} {training.num_steps}\n")
        for _ in training.epochs(1):
            for batch in training.batches(loader):
                before = training.num_steps
                with training.step():
                    _train(training, batch, on_mesh=on_mesh)
                if training.num_steps > before:
                    file.write(f"{training.num_changes} {time.monotonic_ns()} {before + 1}\n")
    model = training.model
    if on_mesh:
        model.make_whole()
        model = model.model
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(param.detach().numpy().tobytes())
    (out / f"{rank}.digest").write_text(digest.hexdigest())


if __name__ == "__main__":
    main()
