"""The number of layers of each stage: even, as configured, or by rank 0's measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from braid.comm import Group
from braid.parallel.pipeline import Balance, balance_by_size, balance_by_time
from braid.train.config import MEASURED, TrainConfig

__all__ = ["stage_balance"]

PARAM_COPIES = 4.0  # with AdamW: the parameter, its gradient and two moments
INDENT = "\n         "


def stage_balance(
    config: TrainConfig,
    group: Group,
    layers: Sequence[nn.Module],
    sample: Callable[[int], Any],
) -> tuple[Sequence[int] | None, str]:
    """Return the number of layers of each stage, equal on all ranks; None for even stages.

    Args:
        config: Configuration of the training.
        group: Ranks of the pipeline; rank 0 measures while the other ranks wait.
        layers: Layers of the model.
        sample: Function that returns a batch of the model's input with a number of rows.

    Returns:
        The numbers, and on rank 0 a picture of its measurements.
    """
    if config.balance not in MEASURED:
        return config.stage_sizes, ""
    sizes = torch.zeros(config.num_stages, dtype=torch.int64)
    picture = ""
    if group.rank == 0:
        measured = _measured(config, layers, sample)
        sizes = torch.tensor(measured.sizes)
        picture = f"balance by {config.balance}\n{measured}".replace("\n", INDENT)
    return group.broadcast(sizes, 0).tolist(), picture


def _measured(
    config: TrainConfig, layers: Sequence[nn.Module], sample: Callable[[int], Any]
) -> Balance:
    batch = config.batch // max(1, config.meshes[0].size // config.num_stage_ranks)
    if config.balance == "time":
        rows = max(1, batch // config.microbatches)
        return balance_by_time(config.num_stages, layers, sample(rows))
    return balance_by_size(
        config.num_stages,
        layers,
        sample(batch),
        num_microbatches=config.microbatches,
        param_scale=PARAM_COPIES,
    )
