"""What is wrong on one rank, or on all, is an error on all ranks with the same words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_ddp_second_order import SMALL, batch, grads, net
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import said_by

from braid.comm import Group
from braid.errors import CommError, ConfigError, MismatchError
from braid.parallel.data_parallel import DistributedDataParallel


def reduces(_state: object, bucket: Any) -> Any:
    return bucket.group.all_reduce(bucket.buffer(), op="avg", async_op=True)


def _no_hooks(group: Group) -> list[str]:
    model = DistributedDataParallel(net(), process_group=group)
    hooks = [{"a": 1}, None, 3, lambda _bucket: None, lambda _state, _bucket, _more: None]
    texts = [said_by(lambda h=h: model.register_comm_hook(None, h), ConfigError) for h in hooks]
    texts.append(said_by(lambda: model.register_comm_hook(reduces, "state"), ConfigError))
    model.register_comm_hook(None, reduces)  # nothing has been registered so far
    model(batch(group.rank, 0)).square().mean().backward()
    return texts


@pytest.mark.parametrize("size", [2, 3])
def test_hooks_that_are_none_are_refused_before_they_are_called(world, size):
    told = world(size, _no_hooks)
    assert told == [told[0]] * size
    mapping, none, number, one, three, swapped = told[0]
    assert "must be a function hook(state, bucket), got the dict {'a': 1}: call" in mapping
    assert "got the NoneType None" in none
    assert "got the int 3" in number
    assert "is called as hook(state, bucket), but" in one
    assert "<lambda>(_bucket) does not take these arguments: too many positional arguments" in one
    assert (
        "(_state, _bucket, _more) does not take these arguments: missing a required argument: '_more'"
        in three
    )
    assert swapped.endswith("call register_comm_hook(state, hook): the state comes first")


def _hook_on_some(group: Group, having: list[int]) -> str:
    model = DistributedDataParallel(net(), process_group=group, bucket_cap_mb=SMALL)
    if group.rank in having:
        model.register_comm_hook(None, reduces)
    loss = model(batch(group.rank, 0)).square().mean()
    return said_by(loss.backward, MismatchError)


@pytest.mark.parametrize(
    ("size", "having", "shown"),
    [(2, [1], "on rank 1 and none on rank 0"), (3, [0, 2], "on ranks 0, 2 and none on rank 1")],
)
def test_a_hook_on_some_ranks_only_is_named_on_all(world, size, having, shown):
    texts = world(size, _hook_on_some, having)
    assert texts == [texts[0]] * size
    assert f"a communication hook is registered {shown}, so ranks do not match" in texts[0]
    assert "call register_comm_hook with the same hook on every rank" in texts[0]


class Shared(nn.Module):
    """Uses its layer as often as it is told, each time in a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.skip_init(nn.Linear, 3, 3)
        self.last = nn.utils.skip_init(nn.Linear, 3, 3)
        for param in self.parameters():
            nn.init.constant_(param, 0.25)

    def forward(self, x: torch.Tensor, uses: int) -> torch.Tensor:
        x = x.requires_grad_()
        for _ in range(uses):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return self.last(x)


def _static(group: Group, guilty: int | None) -> list[str]:
    model = DistributedDataParallel(
        Shared(), process_group=group, static_graph=True, bucket_cap_mb=SMALL
    )
    texts = []
    for step, more in enumerate([0, 1, 0]):
        uses = 1 + more * (guilty in {None, group.rank})
        loss = model(batch(group.rank, step), uses).square().mean()
        texts.append(said_by(loss.backward, (ConfigError, CommError)))
        model.zero_grad()
    return texts


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("guilty", [None, 1])
def test_a_static_graph_that_changes_is_an_error_on_all_ranks(world, guilty, size):
    for rank, texts in enumerate(world(size, _static, guilty)):
        cause = rank if guilty is None else guilty
        assert (texts[0], texts[2]) == ("nothing happened",) * 2
        assert f"Error: rank {cause}: 'layer." in texts[1]
        assert "got a gradient more often than in the first step (once)" in texts[1]
        assert "Leave static_graph=True out, and checkpoint with use_reentrant=False" in texts[1]


class Branches(nn.Module):
    """Each rank may go through another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([net() for _ in range(3)])

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return self.branches[number](x)


def _two_graphs(group: Group, static: bool, hooked: bool) -> list[list[torch.Tensor]]:
    model = DistributedDataParallel(
        Branches(),
        process_group=group,
        static_graph=static,
        find_unused_parameters=True,
        bucket_cap_mb=SMALL,
    )
    if hooked:
        model.register_comm_hook(None, reduces)
    found = []
    for step in range(3):
        model.zero_grad()
        model(batch(group.rank, step), (group.rank + step) % 2).square().mean().backward()
        assert all(param.grad is None for param in model.module.branches[2].parameters())
        found.append([*map(torch.clone, grads(model.module.branches[:2]))])
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("hooked", [False, True])
def test_ranks_whose_graphs_differ_have_the_gradients_of_one_process(world, size, static, hooked):
    module = Branches()
    expected = []
    for step in range(3):
        module.zero_grad()
        losses = [module(batch(r, step), (r + step) % 2).square().mean() for r in range(size)]
        (sum(losses) / size).backward()
        expected.append(grads(module.branches[:2]))
    for found in world(size, _two_graphs, static, hooked):
        for own, others in zip(found, expected, strict=True):
            for a, b in zip(own, others, strict=True):
                torch.testing.assert_close(a, b)
