"""Several joinables of uneven inputs, and what a group keeps of wrappers that are gone."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from training import said_by

from braid.comm import Group
from braid.parallel.data_parallel import DistributedDataParallel, Join, Joinable, JoinHook
from braid.parallel.data_parallel.finite import MANY, NonFinite, nonfinite_handler
from braid.parallel.gradients.lost_requests import reclaim_lost_requests

EXTRA = 2  # inputs that each rank has more than the one before


def net() -> nn.Linear:
    layer = nn.utils.skip_init(nn.Linear, 4, 2)
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.arange(1.0, param.numel() + 1).view(param.shape) / 10)
    return layer


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(20 * rank + step))


class _Shadow(JoinHook):
    def __init__(self, counter: Counter) -> None:
        self._counter = counter

    def main_hook(self) -> None:
        self._counter.group.all_reduce(torch.zeros(1))

    def post_hook(self, is_last_joiner: bool) -> None:
        self._counter.ended = is_last_joiner


class Counter(Joinable):
    """Counts inputs of all ranks."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group
        self.total = 0
        self.ended: bool | None = None

    def __call__(self) -> None:
        word = Join.notify_join_context(self)
        if word is not None:
            word.wait()
        found = torch.ones(1)
        self.group.all_reduce(found)
        self.total += int(found)

    def join_hook(self, **_: Any) -> JoinHook:
        return _Shadow(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Group:
        return self.group


def _uneven(group: Group, kind: str) -> tuple[int, bool | None, list[float]]:
    options = {"gradient_accumulation_steps": 2} if kind == "every" else {}
    model = net()
    wrapped = DistributedDataParallel(model, process_group=group, **options)
    if kind == "hook":
        wrapped.register_comm_hook(group, _averages)
    counter = Counter(group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([wrapped, counter]):
        for step in range(2 + EXTRA * group.rank):
            x = batch(group.rank, step)
            optimizer.zero_grad()
            if kind in {"no_sync", "every"}:
                with wrapped.no_sync() if kind == "no_sync" else warnings.catch_warnings():
                    wrapped(x).square().mean().backward()
            if kind == "penalty":
                output = wrapped(x.requires_grad_())
                (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
                (output.square().mean() + slope.square().mean()).backward()
            elif kind == "twice":
                (wrapped(x).square().mean() + wrapped(x).mean()).backward()
            else:
                wrapped(x).square().mean().backward()
            if kind == "evaluates":
                with torch.no_grad():
                    wrapped(x)
            optimizer.step()
            counter()
    return counter.total, counter.ended, [p.sum().item() for p in model.parameters()]


def _averages(group: Group, bucket: Any) -> Any:
    yield group.all_reduce(bucket.buffer(), "avg", async_op=True)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "kind", ["plain", "no_sync", "every", "twice", "evaluates", "hook", "penalty"]
)
def test_several_joinables_have_uneven_inputs(world, kind, size):
    found = world(size, _uneven, kind)
    _, _, weights = found[0]
    steps = [2 + EXTRA * rank for rank in range(size)]
    for rank, (total, last, own) in enumerate(found):
        # each rank hears of others' inputs until it has joined
        assert total == sum(min(steps[rank], other) for other in steps)
        assert last == (rank == size - 1)
        assert own == weights


class Uninitialised(Counter):
    """Forgot its base."""

    def __init__(self, group: Group) -> None:
        self.group = group


class Hookless(Counter):
    """Returns nothing."""

    def join_hook(self, **_: Any) -> Any:
        return None


def _refused(group: Group) -> list[str]:
    counter, other = Counter(group), Counter(group)

    def nested() -> None:
        with Join([counter]), Join([other]):
            pass

    wrong = [[], counter, [net()], [Uninitialised(group)], [Hookless(group)], [counter, counter]]  # fmt: skip
    said = [said_by(lambda j=joinables: Join(j)) for joinables in wrong]
    said.append(said_by(nested))
    with Join([counter]):  # and again, as the last one has been left
        pass
    return said


def test_what_cannot_join_is_refused(world):
    words = [
        "a list of at least one joinable, got []",
        "a list of at least one joinable, got",
        "Linear is not a Joinable: derive from Joinable",
        "Uninitialised has not called Joinable.__init__",
        "join_hook() of every joinable must return a JoinHook, got None",
        "pass each once",
        "Join([a, b])",
    ]
    (said,) = world(1, _refused)
    for text, expected in zip(said, words, strict=True):
        assert text.startswith("ConfigError: ")
        assert expected in text


# What is left of wrappers.


def _wraps(group: Group, holds: bool) -> list[int]:
    """The least number that no request has, after each wrapping."""
    held = []
    counts = []
    for turn in range(6):
        wrapped = DistributedDataParallel(net(), process_group=group, bucket_cap_mb=1e-5)
        wrapped(batch(group.rank, 0)).sum().backward()
        if holds and group.rank and turn == 2:
            held.append(wrapped)  # one rank looks at it for longer
        del wrapped
        gc.collect()
        if turn == 4:
            held.clear()
            gc.collect()
        number = group.numbers.next()
        group.numbers.give_back(number)
        counts.append(number)
    return counts


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_channels_of_wrappers_that_are_gone_are_used_again(world, size, holds):
    for counts in world(size, _wraps, holds):
        assert max(counts) == counts[0] * (2 if holds and size > 1 else 1)
        assert counts[-1] == counts[0]


def _alone(group: Group) -> bool:
    """One rank has made requests that the other has not, while both look at what is lost."""
    first = DistributedDataParallel(net(), process_group=group)
    wrapped = DistributedDataParallel(net(), process_group=group)
    del first
    gc.collect()
    wrapped.module.bias.requires_grad_(False)
    if group.rank:
        wrapped(batch(group.rank, 0))
    reclaim_lost_requests(group)
    wrapped(batch(group.rank, 0)).sum().backward()
    free = group.numbers.lost()
    reclaim_lost_requests(group)
    return bool(free) and not group.numbers.lost()


@pytest.mark.filterwarnings("ignore:.*ran forwards without a backward:UserWarning")
def test_nothing_is_reclaimed_while_a_rank_has_requests_of_its_own(world):
    assert world(2, _alone) == [True, True]


def _enters_again(group: Group) -> list[str]:
    wrapped = DistributedDataParallel(net(), process_group=group)
    joins = wrapped.join()

    def within() -> None:
        with joins, joins:
            pass

    return [
        said_by(within),
        said_by(joins.__enter__),
        said_by(lambda: joins.__exit__(None, None, None)),
    ]


def test_a_context_is_entered_once_at_a_time(world):
    refused, entered, left = world(1, _enters_again)[0]
    assert "a group can have only one at a time" in refused
    assert (entered, left) == ("nothing happened", "nothing happened")


# Steps that are skipped.


def test_steps_that_are_skipped_are_told_at_first_and_when_nothing_else_happens():
    param = nn.Parameter(torch.zeros(1))
    skip = nonfinite_handler("skip", [param])
    told = []
    steps = [1, *range(5, 5 + MANY + 3), 100]
    for step in steps:
        param.grad = torch.full((1,), float("nan"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            skip(NonFinite(step, (1,), ("weight",)))
        told += [(step, str(one.message)) for one in caught]
        assert param.grad is None
    assert [step for step, _ in told] == [1, 4 + MANY]
    assert "'weight' are NaN or infinite on rank 1 in step 1; the step is skipped" in told[0][1]
    assert f"the {MANY}th step in a row" in told[1][1]
