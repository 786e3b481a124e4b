"""What ranks hold each for itself goes into a checkpoint and comes out, bit by bit."""

from __future__ import annotations

import contextlib
import copy
import enum
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from braid.checkpoint import (
    ReplicatedSnapshot,
    load,
    read_manifest,
    restore_training,
    save,
    training_numbers,
    training_tensors,
)
from braid.comm import Group
from braid.errors import CheckpointError, ConfigError
from braid.parallel.data_parallel import (
    DiLoCo,
    NonFiniteError,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
)
from support.worlds import run_threads


class Net(nn.Module):
    """With two dtypes, a frozen parameter and a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Parameter(torch.randn(5, 4, generator=generator))
        self.second = nn.Parameter(torch.randn(4, generator=generator).double())
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach()[0, :3]
        return (torch.tanh(x @ self.first).double() @ self.second).square().mean()


def _diloco(net: Net, group: Group) -> DiLoCo:
    inner = torch.optim.AdamW(net.parameters(), lr=0.05)
    return DiLoCo(inner, period=3, process_group=group)


def _post_local(net: Net, group: Group) -> PostLocalSGDOptimizer:
    inner = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    return PostLocalSGDOptimizer(inner, PeriodicModelAverager(3, 2, group))


MAKERS: dict[str, Any] = {"diloco": _diloco, "post-local": _post_local}


def _train(net: Net, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * rank + step)
        optimizer.zero_grad()
        net(torch.randn(6, 5, generator=generator)).backward()
        optimizer.step()


def _save(group: Group, path: Path, net: Net, optimizer: Any, step: int) -> Path:
    tensors = training_tensors(net, optimizer)
    snapshot = ReplicatedSnapshot(tensors, rank=group.rank, size=group.size)
    numbers = training_numbers(net, optimizer)
    return save(path, snapshot, step=step, group=group, state=numbers)


def _resumed(group: Group, path: Path, kind: str, pause: int) -> dict[str, torch.Tensor]:
    net = Net(group.rank)
    optimizer = MAKERS[kind](net, group)
    _train(net, optimizer, group.rank, range(pause))
    if pause:
        _save(group, path, net, optimizer, pause)
        net = Net(7)
        optimizer = MAKERS[kind](net, group)
        restore_training(load(path, group=group), net, optimizer)
    _train(net, optimizer, group.rank, range(pause, 8))
    return net.state_dict()


@pytest.mark.parametrize("pause", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_run_whose_ranks_take_steps_alone_goes_on_from_a_checkpoint_to_the_bit(
    world, tmp_path, kind, pause
):
    told = world(2, _resumed, tmp_path, kind, pause)
    expected = world(2, _resumed, tmp_path, kind, 0)
    for found, wanted in zip(told, expected, strict=True):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not torch.equal(told[0]["first"], told[1]["first"])  # each has its own


def _written(group: Group, path: Path, steps: int) -> list[str]:
    net = Net()
    optimizer = _diloco(net, group)
    _train(net, optimizer, group.rank, range(steps))
    return sorted(read_manifest(_save(group, path, net, optimizer, steps)).tensors)


def test_only_what_differs_between_ranks_is_written_by_each(world, tmp_path):
    after, within = world(2, _written, tmp_path, 3)[0], world(2, _written, tmp_path, 4)[0]
    outer = [f"optimizer_state_dict/diloco/{x}/{i}" for x in ("momentum", "start") for i in (0, 1)]
    assert [name for name in after if not name.startswith("own/")] == [
        "model/first",
        "model/second",
        *outer,
    ]
    assert [name for name in within if not name.startswith("own/")] == outer
    assert {"own/00001/model/seen", "own/00000/optimizer/first/exp_avg"} < set(after)


def _owing(group: Group, path: Path) -> tuple[bool, list[torch.Tensor]]:
    net = Net()

    def make() -> DiLoCo:
        inner = torch.optim.SGD(net.parameters(), lr=0.05)
        return DiLoCo(inner, period=2, wire="bf16", process_group=group)

    optimizer = make()
    _train(net, optimizer, group.rank, range(3))
    _save(group, path, net, optimizer, 3)
    resumed = make()
    restore_training(load(path, group=group), net, resumed)
    owed = [made.state_dict()["diloco"]["residual"] for made in (optimizer, resumed)]
    return all(map(torch.equal, *owed)), owed[0]


@pytest.mark.procs
def _refused_to_meet(group: Group, path: Path) -> bool:
    """Whether each rank finds what it saved after an outer step that did not take place."""
    net = Net()
    optimizer = DiLoCo(
        torch.optim.SGD(net.parameters(), lr=0.1),
        period=1,
        process_group=group,
        nonfinite="raise",
    )
    for param in net.parameters():
        param.grad = torch.full_like(param, float("nan") if group.rank == 0 else 1.0)
    with contextlib.suppress(NonFiniteError):
        optimizer.step()
    _save(group, path, net, optimizer, 1)
    found = load(path, group=group)
    return all(
        torch.equal(found.read(f"model/{name}").isnan(), param.isnan())
        for name, param in net.named_parameters()
    )


def test_parameters_of_an_average_that_was_refused_are_each_ranks_own(world, tmp_path):
    assert world(2, _refused_to_meet, tmp_path) == [True, True]


def test_what_a_format_left_out_is_each_ranks_own(hosts, tmp_path):
    told = hosts(3, _owing, tmp_path)
    assert all(same for same, _ in told)
    assert any(bool(left.any()) for _, owed in told for left in owed)


def _elsewhere(group: Group, path: Path, own_of: int | None) -> tuple[str, torch.Tensor]:
    net = Net(5)
    before = net.first.detach().clone()
    try:
        restore_training(load(path, group=group, own_of=own_of), net, _diloco(net, group))
    except (CheckpointError, ConfigError) as error:
        assert torch.equal(net.first, before)
        return str(error), net.seen
    return "", net.seen


def test_another_number_of_ranks_says_whose_it_takes(world, tmp_path):
    world(2, _written, tmp_path, 4)
    for text, _ in world(3, _elsewhere, tmp_path, None):
        assert "was written by" in text
        assert "was written by 2 ranks with different values of" in text
        assert "load(..., own_of=0)" in text
    assert "own_of must be from 0 to 1" in run_threads(1, _elsewhere, tmp_path, 2)[0][0]
    ((text, first),) = run_threads(1, _elsewhere, tmp_path, 0)
    ((_, second),) = run_threads(1, _elsewhere, tmp_path, 1)
    assert text == ""
    assert not torch.equal(first, second)


def _model_first(group: Group, pause: int) -> bool:
    """Parameters are loaded before DiLoCo is made, which copies rank 0's."""
    net = Net()
    optimizer = _diloco(net, group)
    _train(net, optimizer, group.rank, range(pause))
    state, values = copy.deepcopy((optimizer.state_dict(), net.state_dict()))
    other = Net()
    other.load_state_dict(values)
    resumed = _diloco(other, group)
    resumed.load_state_dict(state)
    _train(net, optimizer, group.rank, range(pause, 8))
    _train(other, resumed, group.rank, range(pause, 8))
    return all(torch.equal(other.state_dict()[name], x) for name, x in net.state_dict().items())


@pytest.mark.parametrize("pause", [3, 4])
def test_diloco_goes_on_from_parameters_that_were_loaded_before_it_was_made(world, pause):
    assert world(2, _model_first, pause) == [True, True]


def _only_first_loads(group: Group) -> bool:
    """Another rank's parameters before DiLoCo was made are none of the state's."""
    net = Net()
    optimizer = _diloco(net, group)
    _train(net, optimizer, group.rank, range(4))
    other = Net(9)
    if group.rank == 0:
        other.load_state_dict(net.state_dict())
    resumed = _diloco(other, group)
    resumed.load_state_dict(optimizer.state_dict())
    return torch.equal(group.broadcast(other.first.detach().clone(), 0), other.first)


def test_diloco_keeps_rank_0s_parameters_where_its_own_are_not_those_of_the_state(world):
    assert world(2, _only_first_loads) == [True, True]


# Optimizers of other kinds.


class Mode(str, enum.Enum):
    """Text with a name."""

    FAST = "fast"


class Level(enum.IntEnum):
    """A number with a name."""

    HIGH = 7


class Odd(torch.optim.SGD):
    """Remembers something of its own."""

    def __init__(self, params: Any, memory: Any) -> None:
        super().__init__(params, lr=0.1)
        self.memory = memory

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "memory": self.memory}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.memory = state_dict.pop("memory")
        super().load_state_dict(state_dict)


def _remembered(path: Path, memory: Any, swapped: bool = False) -> Any:
    def main(group: Group) -> Any:
        net = Net()
        _save(group, path, net, Odd(net.parameters(), memory), 1)
        params = list(net.parameters())
        fresh = Odd(params[::-1] if swapped else params, None)
        restore_training(load(path, group=group), net, fresh)
        return fresh.memory

    return run_threads(1, main)[0]


def test_all_that_a_state_dict_holds_comes_back_as_it_was(tmp_path):
    memory = {"deep": [1, (2.5, None), {"inf": float("inf")}], "text": "x", "flag": True}
    found = _remembered(tmp_path, {**memory, "x": (torch.arange(3.0),)})
    assert torch.equal(found.pop("x")[0], torch.arange(3.0))
    assert found == memory


def test_dicts_with_any_keys_and_counters_come_back(tmp_path):
    memory = {1: 2.0, "a": Counter({5: 2, 7: 1}), (1, 2): {"b": None}}
    again = _remembered(tmp_path, memory)
    assert again == memory
    assert type(again["a"]) is Counter


def test_derived_text_and_numbers_are_filed_as_what_they_are(tmp_path):
    memory = [Mode.FAST, Level.HIGH, np.int64(3), np.float32(0.5), np.float64("inf")]
    assert _remembered(tmp_path, memory) == ["fast", 7, 3, 0.5, float("inf")]


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        ({"f": [print]}, r"has builtin_function_or_method as 'optimizer_state_dict/memory/f/0'"),
        ({print: 2.0}, r"has builtin_function_or_method as 'optimizer_state_dict/memory \(key\)'"),
    ],
)
def test_what_cannot_be_filed_is_refused_by_name_before_anything_is_written(
    tmp_path, memory, words
):
    with pytest.raises(ConfigError, match=words):
        _remembered(tmp_path, memory)
    assert list(tmp_path.iterdir()) == []


def test_tensors_that_are_not_filed_by_parameter_need_the_same_order(tmp_path):
    assert _remembered(tmp_path, 3, swapped=True) == 3
    with pytest.raises(
        CheckpointError, match=r"'optimizer_state_dict/memory' is stored by position, not by"
    ):
        _remembered(tmp_path, torch.ones(2), swapped=True)


def _adamw(net: Net) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.05))


def _lbfgs(net: Net) -> torch.optim.Optimizer:
    return torch.optim.LBFGS([net.first, net.frozen], lr=0.1, max_iter=3)


@pytest.mark.parametrize("make", [_adamw, _lbfgs], ids=["tensors as rates", "lists of tensors"])
def test_tensors_in_groups_and_in_lists_come_back(tmp_path, make):
    def train(net: Net, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(torch.ones(6, 5))
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)

    def main(group: Group) -> None:
        nets = [Net(), Net()]
        made = [make(net) for net in nets]
        train(nets[0], made[0])
        _save(group, tmp_path, nets[0], made[0], 2)
        restore_training(load(tmp_path, group=group), nets[1], made[1])
        for net, optimizer in zip(nets, made, strict=True):
            train(net, optimizer)
        assert all(map(torch.equal, nets[0].parameters(), nets[1].parameters()))

    run_threads(1, main)
