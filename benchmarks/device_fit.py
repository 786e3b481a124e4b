"""Fits the efficiencies of a described device to measured iterations of GPTs.

The authors of vTrain measured 1,440 iterations on 2, 4 and 8 A100, of Megatron's GPTs with every
division of 8 ranks into tensor, data and pipeline parallelism. The planner's closed form predicts
each iteration from the operations of its layers; six figures of the device are fitted.

    half         fitted on a random half, evaluated on the other half
    larger       fitted on 2 and 4 GPUs, evaluated on 8

Source: J. Bang et al., vTrain, MICRO 2024: data/ground_truth_single.csv (MIT licence).
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from braid.errors import ConfigError
from braid.plan.described import (
    DescribedMachines,
    DescribedModel,
    LayerOperations,
    count_operations,
)
from braid.plan.lone_rank import LoneRank
from braid.plan.search import Estimator, Split, Training
from braid.programs.topology import DEVICES, Cluster, Efficiency, Level

__all__ = ["DeviceFit", "Iteration", "fit_device", "read_iterations"]

VOCABULARY = 51200
NVLINK = 300e9  # bytes per second of an A100 in one direction
DROPOUT = 0.1
SEED = 0
STEPS = 25
LEAST = {
    "flops": 0.05,
    "memory": 0.05,
    "operation_s": 1e-7,
    "message_s": 1e-7,
    "transfer_s": 1e-7,
    "link": 0.01,
}
MOST = {**dict.fromkeys(("flops", "memory", "link"), 1.0), "transfer_s": 1e-2}
Errors = npt.NDArray[np.float64]


class Iteration(NamedTuple):
    """One measured iteration.

    Attributes:
        width: Width of the residual stream.
        heads: Number of attention heads.
        layers: Number of blocks.
        context: Number of tokens in a sequence.
        batch: Number of sequences in a step.
        split: Division over GPUs.
        seconds: Measured seconds.
    """

    width: int
    heads: int
    layers: int
    context: int
    batch: int
    split: Split
    seconds: float


class DeviceFit(NamedTuple):
    """Mean relative errors, and a fitted efficiency.

    Attributes:
        half: Mean error on the second half, fitted on the first half.
        larger: Mean error on 8 GPUs, fitted on 2 and 4.
        efficiency: Efficiency fitted on the first half.
    """

    half: float
    larger: float
    efficiency: Efficiency


def read_iterations(file: str | Path) -> list[Iteration]:
    """Read vTrain's table.

    Raises:
        ConfigError: The file cannot be read, or is not such a table.
    """
    try:
        with Path(file).open(encoding="utf-8-sig", newline="") as lines:
            rows = list(csv.reader(lines))[1:]
        return [_iteration(list(map(float, row))) for row in rows]
    except OSError as exc:
        msg = f"cannot read {file}: {exc.strerror}"
        raise ConfigError(msg) from exc
    except ValueError as exc:
        msg = f"{file} is not vTrain's table of iterations: {exc}"
        raise ConfigError(msg) from exc


def _iteration(row: Sequence[float]) -> Iteration:
    _, batch, rows, width, heads, layers, context, tensor, data, pipeline = map(int, row[:10])
    split = Split(pp=pipeline, dp=data, tp=tensor, microbatches=batch // (rows * data))
    return Iteration(width, heads, layers, context, batch, split, row[10] / 1e3)


def fit_device(iterations: Sequence[Iteration]) -> DeviceFit:
    """Fit on a part of the iterations, and return the errors on the rest."""
    models = _Models(iterations)
    everything = np.random.default_rng(SEED).permutation(len(iterations))
    first, second = np.array_split(everything, 2)
    small = np.array([i for i, it in enumerate(iterations) if it.split.num_ranks < 8])
    large = np.array([i for i, it in enumerate(iterations) if it.split.num_ranks == 8])
    half = models.fitted(first)
    return DeviceFit(
        float(np.abs(models.errors(half, second)).mean()),
        float(np.abs(models.errors(models.fitted(small), large)).mean()),
        half,
    )


class _Models:
    """Predictions of iterations for an efficiency."""

    def __init__(self, iterations: Sequence[Iteration]) -> None:
        self._iterations = iterations
        self._operations: dict[tuple[int, ...], dict[int, list[LayerOperations]]] = {}
        for it in iterations:
            key = (it.width, it.heads, it.layers, it.context)
            operations = self._operations.setdefault(key, {})
            if it.split.tp not in operations:
                operations[it.split.tp] = _operations(it)

    def fitted(self, chosen: npt.NDArray[np.int64]) -> Efficiency:
        """Return the efficiency that minimizes the errors."""
        from scipy.optimize import least_squares

        names = list(LEAST)
        start = Efficiency()
        result = least_squares(
            lambda x: self.errors(_efficiency(names, x), chosen),
            np.log([getattr(start, name) * 0.9 for name in names]),
            bounds=(
                np.log([LEAST[name] for name in names]),
                np.log([MOST.get(name, 1e-3) for name in names]),
            ),
            loss="soft_l1",
            f_scale=0.1,
            diff_step=1e-3,
            max_nfev=STEPS,
        )
        return _efficiency(names, result.x)

    def errors(self, efficiency: Efficiency, chosen: npt.NDArray[np.int64]) -> Errors:
        """Return relative errors of the predicted seconds."""
        device = dataclasses.replace(DEVICES["a100-40gb"], efficiency=efficiency, overlap=0.0)
        models = {
            key: DescribedModel("gpt", operations, device, "fp16")
            for key, operations in self._operations.items()
        }
        estimators: dict[tuple[object, int, int], Estimator] = {}
        errors = []
        for it in (self._iterations[i] for i in chosen):
            model = (it.width, it.heads, it.layers, it.context)
            key = (model, it.split.num_ranks, it.batch)
            if key not in estimators:
                level = Level(
                    name="host", size=it.split.num_ranks, latency_s=0.0, bytes_per_s=NVLINK
                )
                machines = DescribedMachines(Cluster([level]), device, dtype="fp16")
                training = Training(it.batch, dtype="fp16")
                estimators[key] = Estimator(models[model], machines, training)
            errors.append(estimators[key].time(it.split).seconds / it.seconds - 1)
        return np.array(errors)


def _efficiency(names: Sequence[str], logs: npt.NDArray[np.float64]) -> Efficiency:
    return Efficiency(**dict(zip(names, map(float, np.exp(logs)), strict=True)))


def _operations(it: Iteration) -> list[LayerOperations]:
    """Return the operations of a GPT's layers on one tensor parallel rank."""
    ranks = LoneRank(it.split.tp)
    with torch.device("meta"):
        named: list[tuple[str, nn.Module]] = [
            ("embedding", _Embedding(it.width, it.context, ranks)),
            ("block", _Block(it.width, it.heads, ranks)),
            ("head", _Head(it.width, ranks)),
        ]
        first, block, last = count_operations(
            named,
            lambda rows: torch.zeros(rows, it.context, dtype=torch.long),
            dtype=torch.float16,
            ranks=ranks,
        )
    blocks = [block._replace(params=(1000 + i,)) for i in range(it.layers)]
    return [first, *blocks, last]


class _Dropout(nn.Module):
    """Dropout as one kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = torch.native_dropout(x, DROPOUT, train=True)
        return y


class _Embedding(nn.Module):
    """Megatron's embedding: (rows, tokens) to (tokens, rows, width)."""

    def __init__(self, width: int, context: int, ranks: LoneRank) -> None:
        super().__init__()
        self.ranks, self.dropout = ranks, _Dropout()
        self.tokens = nn.Embedding(VOCABULARY // ranks.size, width)
        self.positions = nn.Embedding(context, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.ranks.all_reduce(self.tokens(x)) + self.positions.weight
        dropped: torch.Tensor = self.dropout(y.transpose(0, 1).contiguous())
        return dropped


class _Block(nn.Module):
    """Megatron's block, with attention in single operations, as it was in 2022."""

    def __init__(self, width: int, heads: int, ranks: LoneRank) -> None:
        super().__init__()
        n = ranks.size
        self.ranks, self.dropout = ranks, _Dropout()
        self.heads, self.head_width = heads // n, width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width // n)
        self.project = nn.Linear(width // n, width)
        self.up = nn.Linear(width, 4 * width // n)
        self.down = nn.Linear(4 * width // n, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        t, b, _ = x.shape
        mixed = self.qkv(self.norm1(x)).view(t, b * self.heads, 3 * self.head_width)
        q, k, v = mixed.chunk(3, -1)
        scores = torch.bmm(q.transpose(0, 1), k.permute(1, 2, 0))
        mixed = torch.bmm(self.dropout(torch.softmax(scores, -1)), v.transpose(0, 1))
        y = self.project(mixed.transpose(0, 1).contiguous().view(t, b, -1))
        x = x + self.dropout(self.ranks.all_reduce(y))
        y = self.down(nn.functional.gelu(self.up(self.norm2(x))))
        result: torch.Tensor = x + self.dropout(self.ranks.all_reduce(y))
        return result


class _Head(nn.Module):
    """Norm, logits and their log-softmax in float32."""

    def __init__(self, width: int, ranks: LoneRank) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, VOCABULARY // ranks.size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(self.logits(self.norm(x)).float(), -1)
