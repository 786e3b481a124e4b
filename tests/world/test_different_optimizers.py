"""Optimizers that differ between ranks, by a state that only rank 0 has loaded or another learning rate, are named."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from functools import partial

import pytest
import torch

import braid
from braid.comm import Group
from braid.errors import MismatchError
from braid.parallel import data_parallel, sharding
from braid.parallel.hybrid import HybridParallel
from engine_habits import PLAN, Net, batch, loss_of

pytestmark = pytest.mark.procs


def optimizer_of(model: Net, group: Group, mistake: str) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if mistake == "a state on rank 0" and not group.rank:
        for param in model.parameters():
            optimizer.state[param]["momentum_buffer"] = torch.ones_like(param)
    if mistake == "another rate":
        optimizer.param_groups[0]["lr"] *= 1 + group.rank
    return optimizer


def _wrap(group: Group, engine: str, mistake: str) -> str:
    model = Net()
    optimizer = optimizer_of(model, group, mistake)
    kind, *rest = engine.split()
    try:
        if kind == "averaging":
            data_parallel.AveragingOptimizer(optimizer, process_group=group)
        elif kind == "stage":
            stage = int(rest[0])
            sharding.shard_optimizer(optimizer, model, process_group=group, stage=stage)
        else:
            mesh, stage = rest
            plan = PLAN if "tp" in mesh else None
            layers = list(model.blocks)
            hybrid = HybridParallel(model, mesh, group, layers=layers, plan=plan, shard=int(stage))
            hybrid.attach(optimizer)
    except MismatchError as exc:
        return str(exc)
    return ""


ENGINES = (
    *("averaging", "stage 1", "stage 2", "stage 3", "mesh dp=2 0", "mesh dp=2 1", "mesh dp=2 3"),
    *("mesh pp=2 0", "mesh pp=2 1", "mesh tp=2 0"),
)
SAID = {
    "none": "",
    "a state on rank 0": r"rank 1  state of parameter \d: {}",
    "another rate": r"rank 1  settings of parameter group 0: .* 'lr': 0\.1,",
}


def _wrap_all(group: Group, mistake: str) -> dict[str, str]:
    torch.set_num_threads(1)
    return {engine: _wrap(group, engine, mistake) for engine in ENGINES}


@pytest.mark.parametrize("mistake", SAID)
def test_an_engine_with_an_optimizer_compares_it_first(procs, mistake):
    for rank in procs(2, _wrap_all, mistake):
        for engine, text in rank.items():
            assert bool(text) == bool(SAID[mistake]), engine
            assert re.search(SAID[mistake], text), engine


def _train(group: Group, mistake: str) -> list[str]:
    torch.set_num_threads(1)
    model = Net()
    optimizer = optimizer_of(model, group, mistake)
    wrapper = braid.DistributedDataParallel(model, process_group=group)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            loss_of(wrapper(batch(step, group.rank))).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("mistake", SAID)
def test_data_parallel_training_compares_parameters_after_the_first_step(procs, mistake):
    for said in procs(2, partial(_train, mistake=mistake)):
        if mistake == "none":
            assert not said
            continue
        (text,) = said
        assert text.startswith("16 of 16 parameters differ between ranks before the optimizer's")
        assert "blocks.0.up.weight on rank 1" in text
        assert "same learning rate" in text


def _go_on(group: Group, engine: str, mistake: str) -> list[str]:
    """Train; from step 4 on, rank 1 has another loss for its scheduler, or skips steps."""
    torch.set_num_threads(1)
    model = Net()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    kind, *rest = engine.split()
    call: torch.nn.Module = model
    kept: object = None
    if kind == "data":
        call = braid.DistributedDataParallel(model, process_group=group)
    elif kind == "averaging":
        data_parallel.AveragingOptimizer(optimizer, process_group=group)
    elif kind == "stage":
        kept = sharding.shard_optimizer(optimizer, model, process_group=group, stage=int(rest[0]))
    elif kind == "fsdp":
        call = braid.FullyShardedDataParallel(model, group)
        optimizer = torch.optim.AdamW(call.parameters(), lr=0.05)
    else:
        plan = PLAN if "tp" in rest[0] else None
        layers = list(model.blocks)
        kept = HybridParallel(model, rest[0], group, layers=layers, plan=plan, shard=int(rest[1]))
        kept.attach(optimizer)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(15):
            if isinstance(kept, HybridParallel):
                x = batch(step, kept.samples.rank)
                kept.step(x, x, loss=loss_of)
            else:
                loss_of(call(batch(step, group.rank))).backward()
            differs = step >= 4 and group.rank == 1
            if not (differs and mistake == "a step"):
                optimizer.step()
            optimizer.zero_grad()
            is_worse = mistake == "none" or (differs and mistake == "a loss")
            scheduler.step(1.0 if is_worse else 1 / (1 + step))
    return [str(warning.message) for warning in caught]


GATHERING = ("stage 1", "stage 2", "stage 3", "fsdp", "mesh dp=2 1")  # wait in a step for all ranks
TRAINED = ("data", "averaging", *GATHERING, "mesh dp=2 0", "mesh tp=2 0")
LATER = {
    "none": "",
    "a loss": r"rank 1  step 7, parameter group 0: {'lr': 0\.00",
    "a step": r"rank 0  step 5, parameter group 0: {'lr': 0\.05.*\n  rank 1  step 5: none",
}


def _go_on_with_all(group: Group, mistake: str) -> dict[str, list[str]]:
    some = [engine for engine in TRAINED if mistake != "a step" or engine not in GATHERING]
    return {engine: _go_on(group, engine, mistake) for engine in some}


@pytest.mark.parametrize("mistake", LATER)
def test_steps_with_other_settings_on_a_rank_are_named_later_too(procs, mistake):
    for rank in procs(2, _go_on_with_all, mistake):
        for engine, texts in rank.items():
            found = [text for text in texts if "step with different settings" in text]
            assert len(found) == bool(LATER[mistake]), (engine, texts)
            assert re.search(LATER[mistake], "".join(found)), (engine, texts)


class Odd(torch.optim.SGD):
    """Has settings and states of unusual types."""

    def __init__(self, params: Iterable[torch.nn.Parameter], rank: int, last: float = 0.0) -> None:
        super().__init__(params, lr=0.1)
        settings = self.param_groups[0]
        settings["rule"] = lambda x: x + rank
        settings["names"] = {f"layer {i}" for i in range(20)}
        settings["generator"] = torch.Generator()
        for param in settings["params"]:
            self.state[param] = {"list": [torch.arange(2000.0), last], 3: None, "b": (1, "x")}


def _odd(group: Group, last: float) -> str:
    model = Net()
    optimizer = Odd(model.parameters(), group.rank, last * group.rank)
    try:
        data_parallel.AveragingOptimizer(optimizer, process_group=group)
    except MismatchError as exc:
        return str(exc)
    return ""


@pytest.mark.parametrize("last", [0.0, 1.0])
def test_states_of_unusual_types_are_compared(procs, last):
    for text in procs(2, _odd, last):
        assert bool(text) == bool(last)


def _grouped_by_dims(group: Group, early: bool) -> list[str]:
    """Groups for weight decay by dims, chosen before or after the model is sharded."""
    model = Net()

    def optimizer_of(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        matrices = [param for param in params if param.dim() >= 2]
        rest = [param for param in params if param.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups)

    if early:
        optimizer, call = optimizer_of(list(model.parameters())), model
        sharding.shard_optimizer(optimizer, model, process_group=group, stage=3)
    else:
        call = braid.FullyShardedDataParallel(model, group)
        optimizer = optimizer_of(list(call.parameters()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            loss_of(call(batch(step, group.rank))).backward()
            optimizer.step()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("early", [True, False])
def test_groups_by_dims_of_flat_pieces_are_named(procs, early):
    for said in procs(2, _grouped_by_dims, early):
        assert [text.partition(".")[0] for text in said] == [
            "AdamW has a parameter group without parameters"
        ] * (not early)
