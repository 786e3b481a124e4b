"""The task of a proof: a user's Python file with a few functions.

    def model(): ...                            # a new model, equal in every process
    def loss(model, rank, size, step): ...      # forward on the share of `rank`; the mean over it
    def optimizer(params): ...                  # default: torch.optim.SGD(params, lr=0.1)
    def wrap(model, group): ...                 # default: braid.DistributedDataParallel

In every step, the default random generator of a share starts with the same state in the parallel
run and in one process.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.data_parallel import DistributedDataParallel

__all__ = ["Task", "load_task"]


def _sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def _replicate(model: nn.Module, group: Group) -> nn.Module:
    return DistributedDataParallel(model, process_group=group, find_unused_parameters=True)


@dataclass(frozen=True, slots=True)
class Task:
    """The functions of a training to prove; see the module's docstring.

    Attributes:
        model: Function that makes the model.
        loss: Function (model, rank, size, step) that returns the loss of the share of `rank`.
        optimizer: Function that makes the optimizer of the given parameters.
        wrap: Function (model, group) that returns the module to train in the parallel run.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, int, int], torch.Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = _sgd
    wrap: Callable[[nn.Module, Group], nn.Module] = _replicate


def load_task(path: Path) -> Task:
    """Load a task from a Python file.

    Raises:
        ConfigError: The file does not exist, raises at import, or lacks a function.
    """
    if not path.is_file():
        msg = (
            f"{path} does not exist: name a Python file with model() and loss(model, "
            "rank, size, step)"
        )
        raise ConfigError(msg)
    try:
        names: dict[str, Any] = runpy.run_path(str(path), run_name="__braid_prove__")
    except Exception as exc:
        msg = f"{path} raised {type(exc).__name__} while it was imported: {exc}. Correct the file"
        raise ConfigError(msg) from exc
    lacking = [name for name in ("model", "loss") if not callable(names.get(name))]
    if lacking:
        msg = (
            f"{path} defines no {' and no '.join(lacking)}: a task needs model() and "
            "loss(model, rank, size, step)"
        )
        raise ConfigError(msg)
    options = {name: names[name] for name in ("optimizer", "wrap") if callable(names.get(name))}
    return Task(names["model"], names["loss"], **options)
