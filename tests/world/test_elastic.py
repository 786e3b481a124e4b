"""A training whose ranks die and come ends with the bits of an undisturbed one."""

from __future__ import annotations

import copy
import itertools
import re
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)
from training import linear

import braid
from braid.comm import Group
from braid.elasticity import gradient_sums, state_transfer, suspects
from braid.elasticity.gradient_sums import GradientSums, num_rounds, shard_of
from braid.elasticity.micro_batches import DataPosition, MicroBatches
from braid.elasticity.replica import WholeModel
from braid.elasticity.saving import TrainingCheckpoints
from braid.elasticity.state_transfer import TrainingState
from braid.elasticity.step_buffers import StepBuffers
from braid.elasticity.training import ElasticTraining
from braid.errors import CheckpointError, ConfigError, MismatchError
from braid.parallel.gradients import ParamTable
from braid.parallel.sharding import fully_shard
from braid.runtime.tensor_buffers import checksum
from elastic_cluster import (
    HERE,
    POINTS,
    Cluster,
    ThreadMembers,
    points_of_death,
    random_faults,
    train,
)
from elastic_differences import DIFFERENCES, differing
from support.worlds import run_threads


class Branching(nn.Module):
    """A parameter that only some micro-batches use, one that nobody uses, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first = nn.Parameter(torch.randn(6, 4, generator=generator))
        self.rare = nn.Parameter(torch.randn(4, generator=generator))
        self.never = nn.Parameter(torch.randn(3, generator=generator))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.short = nn.Parameter(torch.randn(4, generator=generator).bfloat16())

    def forward(self, shard: int) -> torch.Tensor:
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(shard))
        hidden = (x @ self.first) * self.frozen * self.short.float()
        if shard % 3 == 1:
            hidden = hidden * self.rare
        return (hidden.tanh() * 0.0 if shard == 2 else hidden.tanh()).square().sum()


def _sums(group: Group, num_shards: int) -> list[torch.Tensor | None]:
    model = Branching()
    sums = GradientSums(group, ParamTable.of(model).records)
    for number in range(num_rounds(num_shards, group.size)):
        shard = shard_of(number, group.rank, group.size, num_shards)
        if shard is not None:
            model(shard).backward()
        sums.add(number, has_shard=shard is not None)
        sums.reduce(number, num_shards, flag=False)
    sums.set_gradients()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize(("num_shards", "num_ranks"), [(1, 1), (4, 3), (5, 2), (5, 5), (7, 3)])
def test_sums_have_the_bits_of_one_process_on_any_number_of_ranks(num_shards, num_ranks):
    model, totals = Branching(), {}
    for shard in range(num_shards):
        model.zero_grad()
        model(shard).backward()
        for param in model.parameters():
            if param.grad is not None:
                grad = param.grad.float()  # also those of 16 bits
                totals[param] = totals[param] + grad if param in totals else grad
    expected = [
        (totals[p] * (1 / num_shards)).to(p.dtype) if p in totals else None
        for p in model.parameters()
    ]
    for grads in run_threads(num_ranks, _sums, num_shards):
        for grad, reference in zip(grads, expected, strict=True):
            assert (grad is None) == (reference is None)
            if grad is not None:
                assert grad.view(torch.uint8).tolist() == reference.view(torch.uint8).tolist()


def test_a_rank_without_a_micro_batch_changes_no_sign_of_zero():
    def main(group: Group) -> torch.Tensor:
        param = nn.Parameter(torch.zeros(3))
        records = ParamTable.of(nn.ParameterDict({"w": param})).records
        sums = GradientSums(group, records)
        if group.rank == 0:
            param.grad = torch.tensor([-0.0, 0.0, 1.0])
        sums.add(0, has_shard=group.rank == 0)
        sums.reduce(0, 1, flag=False)
        sums.set_gradients()
        return param.grad.clone()

    for grad in run_threads(2, main):
        assert grad.signbit().tolist() == [True, False, False]


class Curriculum(Sampler):
    """Sampler that has other samples in each pass."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        return iter([(i * (self.epoch + 1)) % 40 for i in range(20)])

    def __len__(self) -> int:
        return 20


class Endless(Curriculum):
    """Sampler without an end."""

    def __iter__(self):
        return itertools.count()


class Short(Curriculum):
    """Sampler that draws fewer samples than its length."""

    def __iter__(self):
        return iter(range(19))


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler([1.0, 3.0] * 20, 20),
    "own generator": lambda: WeightedRandomSampler([1.0] * 40, 20, generator=torch.Generator()),
    "with replacement": lambda: RandomSampler(range(40), replacement=True, num_samples=20),
    "a pass with a number": Curriculum,
    "numbers": lambda: range(39, 19, -1),
}


class Drawing(Dataset):
    """Samples with a random number, drawn when they are read."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + 0.9 * torch.rand(())


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_sampler_gives_the_same_samples_on_any_number_of_ranks(kind):
    seen: list[list[float]] = []
    for num_ranks in (1, 2, 3):
        of_rank = []
        for rank in range(num_ranks):
            loader = DataLoader(Drawing(), batch_size=2, sampler=SAMPLERS[kind]())
            data = MicroBatches(loader, seed=7)
            list(data.after(DataPosition(rank, 0), 0, 1, 3))  # another pass before
            torch.rand(rank)
            batches = data.after(DataPosition(1, 12), rank, num_ranks, 4)
            of_rank.append([batch.tolist() for batch in batches])
        turns = itertools.zip_longest(*of_rank, fillvalue=[])
        seen.append([x for turn in turns for batch in turn for x in batch])
    assert seen[0] == seen[1] == seen[2]
    assert len(set(seen[0])) == 8, "a sample that is drawn again has other random numbers"


@pytest.mark.parametrize(
    ("sampler", "problem"),
    [
        (lambda: iter(range(40)), "range_iterator has no __len__()"),
        (Endless, "Endless has drawn more samples in pass 0, but its len() was 20"),
        (lambda: "abc", "str must yield numbers of samples"),
        (lambda: DistributedSampler(Drawing(), 2, 0), "DistributedSampler divides samples among"),
        (list, "the loader's sampler is empty"),
        (Short, "Short has drawn only 19 samples in pass 0, but its len() was 20"),
    ],
)
def test_samplers_without_an_order_for_all_ranks_are_refused(sampler, problem):
    def read() -> None:
        data = MicroBatches(DataLoader(Drawing(), batch_size=2, sampler=sampler()), seed=7)
        list(data.after(DataPosition(), 0, 1, 1))

    with pytest.raises(ConfigError, match=re.escape(problem)):
        read()


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_each_sample_comes_once_from_any_step_on(shuffle, num_ranks):
    samples = torch.arange(40)
    loader = DataLoader(TensorDataset(samples), batch_size=2, shuffle=shuffle)
    data = MicroBatches(loader, seed=7)
    assert data.sizes(DataPosition(1, 36), 3) == [2, 2]
    seen = []
    for rank in range(num_ranks):
        batches = list(data.after(DataPosition(1, 12), rank, num_ranks, 3))
        is_idle = rank == 2  # in the last step, of two micro-batches
        seen += [int(x) for (batch,) in batches[: len(batches) - is_idle] for x in batch]
    assert len(seen) == len(set(seen)) == 28
    if not shuffle:
        assert sorted(seen) == list(range(12, 40))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_last_step_with_fewer_samples_takes_the_mean_over_its_samples(num_ranks):
    x = torch.linspace(-1.0, 1.0, 28, dtype=torch.float64).view(14, 2)
    data = TensorDataset(x, x.sum(1, keepdim=True))

    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (model(x) - y).square().mean()

    def main(members) -> dict[str, torch.Tensor]:
        model = _zeros().double()
        with _training(members, model, shards=3) as training:
            for batch in training.batches(DataLoader(data, batch_size=3)):
                with training.step():
                    loss = loss_of(model, *batch)
                    training.add_loss(loss)
                    loss.backward()
        assert training.num_samples == 5
        return {"weight": model.weight.detach(), "loss": torch.tensor(training.loss)}

    alone = _zeros().double()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for batch in DataLoader(data, batch_size=9):
        optimizer.zero_grad()
        loss = loss_of(alone, *batch)
        loss.backward()
        optimizer.step()
    cluster = Cluster(num_ranks, {})
    cluster.run(main)
    for state in cluster.results.values():
        torch.testing.assert_close(state["weight"], alone.weight.detach(), rtol=1e-12, atol=0)
        assert state["loss"].item() == pytest.approx(loss.item())


@pytest.mark.parametrize(("rule", "factor"), [("linear", 2 / 3), ("sqrt", (2 / 3) ** 0.5)])
def test_a_batch_of_each_rank_scales_the_rate_when_a_rank_is_lost(rule, factor):
    """A pass of 32 samples: two steps of 3 * 3, then 2 * 3 and 2 * 3, and 2 that are left."""
    seen: dict[int, list[tuple[int, float]]] = {}

    def watch(run: ElasticTraining, _: nn.Module) -> None:
        if run.num_steps not in seen:
            steps = seen[run.num_steps] = []
            optimizer = run.optimizer
            handle = optimizer.register_step_pre_hook(
                lambda *_: steps.append((run.num_shards, optimizer.param_groups[0]["lr"]))
            )
            optimizer.register_step_post_hook(lambda *_: handle.remove())

    cluster = Cluster(3, {(2, "forward"): 3}, restarts=0)

    def main(members):
        return train(members, None, epochs=1, after_backward=watch, batch_per_rank=rule)

    cluster.run(main)
    rates = [0.05, 0.05, 0.05 * 0.9, 0.05 * 0.81, 0.05 * 0.81]  # of the scheduler
    for step, rate in enumerate(rates):
        shards, factor_now = (3, 1.0) if step < 2 else (2, factor)
        assert seen[step][0] == (shards, pytest.approx(rate * factor_now))


def test_a_batch_of_each_rank_ends_a_pass_at_one_sample_on_any_number_of_ranks():
    loader = DataLoader(TensorDataset(torch.arange(21)), batch_size=2, drop_last=True)
    data = MicroBatches(loader, seed=0, per_rank=True)
    at = data.next(DataPosition(0, 12), 2)
    assert [data.sizes(at, num_ranks) for num_ranks in (1, 2, 3)] == [[2], [2, 2], [2, 2]]
    assert data.next(at, 3) == DataPosition(1, 0)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, torch.Tensor]:
    cluster = Cluster(1, {})
    cluster.run(partial(train, evaluate_every=1))
    return cluster.results[0]


@pytest.mark.parametrize(
    "seed", [*range(16), *(pytest.param(n, marks=pytest.mark.proof) for n in range(16, 500))]
)
def test_deaths_at_any_point_leave_the_bits_of_an_undisturbed_run(
    monkeypatch, tmp_path, undisturbed, seed
):
    num_ranks = 2 + seed // len(POINTS) % 2
    cluster = Cluster(num_ranks, random_faults(seed, num_ranks), spares=seed // 3 % 2)
    saved = TrainingCheckpoints(str(tmp_path), 1 + seed % 2)
    with points_of_death(monkeypatch):
        cluster.run(partial(train, evaluate_every=1, checkpoints=saved))
    assert cluster.deaths or cluster.left
    assert cluster.results or cluster.end, "all but a rank that left have died"
    for rank, state in cluster.results.items():
        for name, tensor in state.items():
            assert torch.equal(tensor, undisturbed[name]), (rank, name, cluster.deaths)


def _flipping(rank: int, most: int):
    """Return a training whose rank has a wrong gradient in step 3, at most so often."""
    count = itertools.count()

    def main(members):
        def flip(run: ElasticTraining, model: nn.Module) -> None:
            if members.rank == rank and run.num_steps == 2 and next(count) < most:
                model[0].weight.grad[0, 0] += 1.0

        return train(members, after_backward=flip, verify=2)

    return main


def test_a_rank_that_computes_wrongly_leaves_before_its_result_is_used(undisturbed):
    cluster = Cluster(3, {})
    cluster.run(_flipping(1, 1000))
    assert cluster.left == [(1, "has computed other gradients than its peers in step 3")]
    assert len(cluster.results) == 3, "another one has taken its place"
    for state in cluster.results.values():
        assert all(torch.equal(tensor, undisturbed[name]) for name, tensor in state.items())


@pytest.mark.parametrize("verify", [0, 1000])
@pytest.mark.parametrize("keeps_state", [False, True])
def test_a_newcomer_without_state_that_the_program_keeps_is_named(monkeypatch, keeps_state, verify):
    warnings = []
    monkeypatch.setattr(
        suspects.LOG, "warning", lambda text, *values: warnings.append(text % values)
    )

    def main(members):
        seen = [-1]

        def scale(run: ElasticTraining, model: nn.Module) -> None:
            if run.num_steps != seen[-1]:
                seen.append(run.num_steps)
            model[0].weight.grad.mul_(len(seen) if keeps_state else 1 + run.num_steps)

        return train(members, after_backward=scale, verify=verify)

    cluster = Cluster(3, {(1, "forward"): 4}, min_ranks=3, restarts=1)
    with points_of_death(monkeypatch):
        cluster.run(main)
    assert cluster.deaths
    step = 3 if verify else 5  # step 4 has fewer micro-batches than ranks
    reason = f"has computed other gradients than its peers in step {step}"
    assert cluster.left == ([(3, reason)] if keeps_state else [])
    assert len(warnings) == keeps_state
    text = f"this rank has joined, and computes other gradients than the other ranks in step {step}"
    assert warnings == [] or warnings[0].startswith(text), warnings


@pytest.mark.parametrize("keeps_state", [False, True])
def test_a_newcomer_with_another_first_update_leaves_before_the_next_step(keeps_state):
    """`update=` counts its calls, which a new rank has not seen."""

    def main(members):
        calls = [0]

        def lower_rate(run: ElasticTraining) -> None:
            calls[0] += 1
            number = calls[0] if keeps_state else 1 + run.num_steps
            run.optimizer.param_groups[0]["weight_decay"] = 0.1 * number

        return train(members, in_update=lower_rate)

    alone = Cluster(3, {}, min_ranks=3)
    alone.run(main)
    cluster = Cluster(3, {(1, "forward"): 4}, min_ranks=2, restarts=1)
    cluster.run(main)
    assert cluster.deaths
    assert [rank for rank, _ in cluster.left] == [3] * keeps_state
    for _, reason in cluster.left:
        assert reason.startswith(
            "has joined, and its first update gave other values (settings of the optimizer, "
        )
    for state in cluster.results.values():
        for name, tensor in state.items():
            assert torch.equal(tensor, alone.results[0][name]), name


def _receive(group: Group, local: threading.local) -> str:
    local.rank = group.rank
    model = linear(2, 2)
    state = TrainingState(model, torch.optim.AdamW(model.parameters()), {})
    try:
        state_transfer.transfer(group, [3, -1], state, {})
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("is_damaged", [False, True])
def test_damage_of_a_sent_state_is_noticed(monkeypatch, is_damaged):
    local = threading.local()

    def damaged(tensor: torch.Tensor) -> int:
        return checksum(tensor) ^ (is_damaged and local.rank)

    monkeypatch.setattr(state_transfer, "checksum", damaged)
    sender, receiver = run_threads(2, _receive, local)
    assert not sender
    expected = "model/weight, model/bias arrived with other values than were sent"
    assert receiver.startswith(expected if is_damaged else "")
    assert bool(receiver) == is_damaged


def test_a_newcomer_is_checked_also_if_a_loss_breaks_its_first_step(monkeypatch):
    def main(members):
        seen = [-1]

        def scale(run: ElasticTraining, model: nn.Module) -> None:
            if run.num_steps != seen[-1]:
                seen.append(run.num_steps)
            model[0].weight.grad.mul_(len(seen))

        return train(members, after_backward=scale, verify=1000)

    # rank 3 replaces rank 1, and rank 4 replaces rank 2, which dies before the check of rank 3
    faults = {(1, "forward"): 4, (2, "forward"): 5}
    cluster = Cluster(3, faults, min_ranks=3, restarts=2)
    with points_of_death(monkeypatch):
        cluster.run(main)
    assert [rank for rank, _ in cluster.deaths] == [1, 2]
    assert cluster.left[0][0] in {3, 4}, "one after the other, as they may have a part's copies"


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_a_newcomer_with_other_objects_is_named_and_the_others_go_on(undisturbed, kind):
    def main(members):
        change = partial(differing, kind=kind) if members.rank == 3 else lambda state: state
        return train(members, change=change)

    cluster = Cluster(3, {(1, "forward"): 2}, min_ranks=3, restarts=2)
    cluster.run(main)
    assert cluster.left == [(3, "cannot take part")]
    assert DIFFERENCES[kind] in cluster.refused[0]
    assert set(cluster.results) == {0, 2, 4}
    for state in cluster.results.values():
        assert all(torch.equal(tensor, undisturbed[name]) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        ({"sampler": range(31, -1, -1)}, "checksum of the order by range 1"),
        ({"sampler": range(32), "batch_size": 2}, "samples of a step 9 (here 6)"),
        ({"batch_size": None}, "may not have batch_size=None or a batch_sampler"),
    ],
)
def test_a_newcomer_with_other_data_is_named_and_the_others_go_on(order, problem):
    def main(members):
        return train(members, order=order if members.rank == 3 else {"sampler": range(32)})

    undisturbed = Cluster(1, {})
    undisturbed.run(main)
    cluster = Cluster(3, {(1, "forward"): 2}, min_ranks=3, restarts=2)
    cluster.run(main)
    assert cluster.left == [(3, "cannot take part")]
    assert problem in cluster.refused[0]
    assert set(cluster.results) == {0, 2, 4}
    for state in cluster.results.values():
        assert all(
            torch.equal(tensor, undisturbed.results[0][name]) for name, tensor in state.items()
        )


def test_buffers_that_a_forward_makes_or_reshapes_are_no_hindrance():
    def main(group: Group) -> tuple[list[float], list[float]]:
        model = nn.BatchNorm1d(3)
        buffers = StepBuffers(group, model)
        buffers.begin(is_first=True)
        model.register_buffer("mask", torch.ones(2), persistent=False)
        model.running_mean = torch.ones(5)
        buffers.begin(is_first=False)
        return model.running_mean.tolist(), model.mask.tolist()

    assert run_threads(2, main) == [([0.0] * 3, [1.0] * 2)] * 2


def test_a_bit_that_flips_once_is_computed_again(undisturbed):
    cluster = Cluster(2, {})
    cluster.run(_flipping(1, 1))
    assert cluster.left == []
    for state in cluster.results.values():
        assert all(torch.equal(tensor, undisturbed[name]) for name, tensor in state.items())


def test_of_two_ranks_that_differ_again_and_again_both_are_named():
    cluster = Cluster(2, {})
    with pytest.raises(MismatchError) as caught:
        cluster.run(_flipping(1, 1000))
    text = "gradients of ranks 0 and 1 differ between replicas for the same micro-batch of step 3"
    assert text in str(caught.value)


@pytest.mark.parametrize("factor", [0.0, 2.0])
def test_a_rank_that_stays_slow_is_named_or_leaves(monkeypatch, factor):
    now = threading.local()

    def monotonic_ns() -> int:
        now.ns = getattr(now, "ns", 0) + (9000 if HERE.members.rank == 2 else 1000)
        return now.ns

    monkeypatch.setattr(suspects, "time", SimpleNamespace(monotonic_ns=monotonic_ns))
    # a rank that joins later asks for the times like all others
    cluster = Cluster(3, {} if factor else {(1, "forward"): 40})
    warnings = []
    monkeypatch.setattr(
        suspects.LOG, "warning", lambda text, *values: warnings.append(text % values)
    )
    with points_of_death(monkeypatch):
        cluster.run(partial(train, epochs=20, replace_slow=factor))
    text = "has taken 9.0 times as long as its peers for its steps"
    assert cluster.left == ([(2, text)] if factor else [])
    assert len(cluster.begun) > 1
    assert len(cluster.results) == 3
    assert [text in warning for warning in warnings] == ([] if factor else [True])


def test_a_slow_rank_stays_if_the_spare_has_died_meanwhile(monkeypatch):
    now = threading.local()

    def monotonic_ns() -> int:
        now.ns = getattr(now, "ns", 0) + (9000 if HERE.members.rank == 2 else 1000)
        return now.ns

    def lose_spare(run: ElasticTraining, _: nn.Module) -> None:
        if run.num_steps == 5:
            with cluster.changed:
                cluster.execute(cluster.state.lost(3))

    monkeypatch.setattr(suspects, "time", SimpleNamespace(monotonic_ns=monotonic_ns))
    warnings = []
    monkeypatch.setattr(
        suspects.LOG, "warning", lambda text, *values: warnings.append(text % values)
    )
    cluster = Cluster(3, {}, spares=1, min_ranks=3, restarts=0)
    cluster.run(partial(train, epochs=25, replace_slow=2.0, after_backward=lose_spare))
    assert [begun.members for begun in cluster.begun] == [(0, 1, 2), (0, 1, 2)]
    assert (cluster.left, len(cluster.results)) == ([], 3)
    (warning,) = warnings  # in the second epoch
    assert "allow another process with --restarts, since the run needs this rank" in warning


def test_a_rank_is_not_slow_beside_ranks_without_micro_batches():
    cluster = Cluster(4, {})
    cluster.run(partial(train, shards=1, epochs=3, replace_slow=1e9))
    assert (cluster.left, len(cluster.results)) == ([], 4)


@pytest.mark.parametrize(
    "faults",
    [
        {(1, "evaluate"): 2},
        {(2, "evaluated"): 1, (0, "evaluate"): 3},
        {(0, "evaluated"): 4},  # after the last step
        {(1, "evaluated"): 2, (2, "evaluate"): 2, (3, "forward"): 1},
        {(1, "leave forward"): 3, (0, "evaluated"): 2},
    ],
)
def test_an_evaluation_is_done_again_if_a_rank_is_lost_in_it(monkeypatch, faults):
    run = partial(train, evaluate_every=2)
    alone = Cluster(1, {})
    alone.run(run)
    assert {f"evaluation {step}" for step in (2, 4, 6, 8)} <= alone.results[0].keys()
    cluster = Cluster(3, faults)
    with points_of_death(monkeypatch):
        cluster.run(run)
    assert cluster.deaths
    assert any("evaluation 8" in state for state in cluster.results.values())
    for state in cluster.results.values():
        for name, value in state.items():
            torch.testing.assert_close(value, alone.results[0][name], rtol=0, atol=0)


def _leave_early(members) -> dict[str, torch.Tensor]:
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
    training = _training(members, model, shards=2)
    loader = DataLoader(TensorDataset(torch.ones(12, 2)), batch_size=2)
    with training:
        for _ in training.epochs(9):
            for (x,) in training.batches(loader):
                with training.step():
                    model(x).sum().backward()
                if training.num_steps == 4:
                    break
            if training.num_steps == 4:
                break
        members.visit("exit")
    return {"steps": torch.tensor(training.num_steps), "weight": model.weight.detach().clone()}


@pytest.mark.parametrize("victim", [0, 1])
def test_a_newcomer_ends_with_those_that_have_left_their_loop(victim):
    cluster = Cluster(2, {(victim, "exit"): 1}, min_ranks=2)
    cluster.run(_leave_early)
    assert cluster.deaths == [(victim, "exit")]
    assert set(cluster.results) == {1 - victim, 2}
    assert [state["steps"].item() for state in cluster.results.values()] == [4, 4]
    first, second = cluster.results.values()
    assert torch.equal(first["weight"], second["weight"])


def _training(
    members: Group | ThreadMembers,
    model: nn.Module,
    shards: int | None = None,
    update: Callable[[], None] | None = None,
) -> ElasticTraining:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = WholeModel(TrainingState(model, optimizer, {}))
    members = FixedMembers(members) if isinstance(members, Group) else members
    return ElasticTraining(members, state, num_shards=shards, seed=0, update=update)


class FixedMembers:
    """Members of a run that are the same from beginning to end."""

    may_change = is_newcomer = pauses = leaves = is_last_epoch = can_lose = False
    number = 1
    checkpoint_step = -1

    def can_resume(self, num_steps: int, *, is_saved: bool) -> None: ...

    def __init__(self, group: Group) -> None:
        self.group = group

    def next_epoch(self, num_steps: int, directory: str = "") -> list[int]:  # noqa: ARG002
        raise AssertionError(num_steps)

    def finished_step(self, num_steps: int, weights: Any) -> None: ...

    def leave(self, num_steps: int, reason: str) -> None:
        raise AssertionError(num_steps, reason)


def _loader(**options: object) -> DataLoader:
    x = torch.arange(24.0).view(12, 2)
    return DataLoader(TensorDataset(x), **({"batch_size": 2} | options))


def _refusal(run) -> str:
    def main(group: Group) -> str:
        with pytest.raises(ConfigError) as caught:
            run(group)
        return str(caught.value)

    return run_in_process(main)


def run_in_process(main):
    """Run one rank, with torch's default generator left as it is."""
    state = torch.random.get_rng_state()

    def restored(group: Group):
        try:
            return main(group)
        finally:
            torch.random.set_rng_state(state)

    return run_threads(1, restored)[0]


def test_a_step_of_the_optimizer_in_the_loop_is_refused():
    def run(group: Group) -> None:
        model = nn.Linear(2, 1)
        with _training(group, model) as training:
            for (x,) in training.batches(_loader()):
                with training.step():
                    model(x).sum().backward()
                    training.optimizer.step()

    assert "optimizer.step() was called by the loop: training.step() calls it" in _refusal(run)


def test_torchs_clipping_in_the_loop_is_refused_and_allowed_in_an_update():
    def run(group: Group, *, in_loop: bool) -> float:
        model = nn.Linear(2, 1)

        def update() -> None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            norms.append(norm.item())
            training.optimizer.step()

        norms: list[float] = []
        with _training(group, model, update=update) as training:
            for (x,) in training.batches(_loader()):
                with training.step():
                    model(x).sum().backward()
                    if in_loop:
                        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # the model is the program's again
        return min(norms)

    text = _refusal(partial(run, in_loop=True))
    assert "gradients are of one micro-batch: call it in the function update=" in text
    assert run_in_process(partial(run, in_loop=False)) > 0


def test_a_scheduler_that_the_loop_calls_is_refused():
    def run(group: Group) -> None:
        model = nn.Linear(2, 1)
        training = _training(group, model)
        scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 1, 0.5)
        training._replica.state = training._replica.state._replace(others={"scheduler": scheduler})
        with training:
            for (x,) in training.batches(_loader()):
                with training.step():
                    model(x).sum().backward()
                scheduler.step()

    text = _refusal(run)
    assert "the optimizer's options changed outside of the function update=" in text
    assert "change it in update=, such as by scheduler.step()" in text


def test_a_parameter_that_is_unfrozen_on_the_way_is_refused():
    def run(group: Group) -> None:
        model = nn.Linear(2, 1)
        model.bias.requires_grad_(False)
        with _training(group, model) as training:
            for (x,) in training.batches(_loader()):
                with training.step():
                    model(x).sum().backward()
                model.bias.requires_grad_(True)

    assert "bias was unfrozen after braid.elastic was called: begin another" in _refusal(run)


def test_a_second_loader_in_one_pass_is_refused():
    def run(group: Group) -> None:
        model = nn.Linear(2, 1)
        with _training(group, model) as training:
            for _ in training.epochs(2):
                for loader in (_loader(), _loader(batch_size=4)):
                    for (x,) in training.batches(loader):
                        with training.step():
                            model(x).sum().backward()

    assert "batches() was called again in pass 0 of epochs()" in _refusal(run)


@pytest.mark.parametrize(("batch_size", "fact"), [(2, "samples of a step"), (4, "shuffled")])
def test_ranks_that_would_train_on_other_data_are_named(batch_size, fact):
    def main(group: Group) -> str:
        options = {"batch_size": batch_size, "shuffle": fact == "shuffled"} if group.rank else {}
        loader = _loader(**({"batch_size": 4} | options))
        with pytest.raises(MismatchError) as caught, _training(group, _zeros()) as training:
            next(training.batches(loader))
        return str(caught.value)

    for text in run_threads(2, main):
        assert text.startswith(f"ranks train on different data: {fact} is ")


def test_a_batch_outside_of_a_step_is_refused():
    def run(group: Group) -> None:
        with _training(group, nn.Linear(2, 1)) as training:
            for _ in training.batches(_loader()):
                pass

    assert "a batch was not used: put `with training.step():` around" in _refusal(run)


def test_an_epoch_without_batches_is_refused():
    def run(group: Group) -> None:
        with _training(group, nn.Linear(2, 1)) as training:
            for _ in training.epochs(2):
                pass

    assert "epoch 0 has not been trained: loop over training.batches(loader)" in _refusal(run)


def _zeros() -> nn.Module:
    """A layer whose making draws no random numbers, which threads share."""
    layer = nn.utils.skip_init(nn.Linear, 2, 1)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class Noted(nn.Module):
    """A module with a state that is no tensor."""

    def get_extra_state(self) -> int:
        return 3


class Stream(IterableDataset):
    """Samples without numbers."""

    def __iter__(self):
        return itertools.count()


@pytest.mark.parametrize(
    ("loader", "problem"),
    [
        (
            lambda: _loader(batch_size=None),
            "may not have batch_size=None or a batch_sampler (it is a",
        ),
        (
            lambda: DataLoader(Stream(), batch_size=2),
            "an IterableDataset cannot be indexed by sample number",
        ),
        (lambda: _loader(batch_size=13, drop_last=True), "12 samples, but a step of 1 times 13"),
        (
            lambda: DataLoader(TensorDataset(torch.ones(0))),
            "the loader's data set (TensorDataset) is",
        ),
    ],
)
def test_loaders_whose_order_cannot_be_kept_are_refused(loader, problem):
    def run(group: Group) -> None:
        with _training(group, nn.Linear(2, 1)) as training:
            next(training.batches(loader()))

    assert problem in _refusal(run)


def test_a_loop_that_is_left_inside_of_a_step_is_refused():
    def run(group: Group) -> None:
        model = _zeros()
        with _training(group, model, shards=2) as training:
            for _ in range(2):
                for (x,) in training.batches(_loader()):
                    with training.step():
                        model(x).sum().backward()
                    break

    assert "left within a step" in _refusal(run)


def test_models_and_objects_that_cannot_take_part_are_refused():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = copy.deepcopy(model)
    wrapped.no_sync = None
    with pytest.raises(ConfigError, match="Linear averages gradients itself: pass the model insid"):
        braid.elastic(wrapped, optimizer)
    noted = nn.Sequential(Noted())
    with pytest.raises(ConfigError, match="0 has an extra state, which new ranks do not receive"):
        braid.elastic(noted, optimizer)
    with pytest.raises(ConfigError, match=r"counter has no state_dict\(\) and load_state_dict\(\)"):
        braid.elastic(model, optimizer, counter=3)


@pytest.mark.parametrize("division", ["tensor parallelism", "ZeRO or FSDP"])
def test_models_that_ranks_have_parts_of_are_refused(division):
    def main(group: Group) -> str:
        layer = nn.utils.skip_init(nn.Linear, 4, 8)
        model = nn.Sequential(layer, nn.Tanh())
        for param in model.parameters():
            nn.init.ones_(param)
        if division == "ZeRO or FSDP":
            fully_shard(model, process_group=group)
        else:
            braid.parallelize(model, group, {"0": "head"})
        with pytest.raises(ConfigError) as caught:
            braid.elastic(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return str(caught.value)

    for text in run_threads(2, main):
        assert f"Sequential is divided among ranks ({division}), and braid.elastic" in text


def test_ranks_without_a_micro_batch_are_named_and_change_no_bit(undisturbed, monkeypatch):
    warnings = []
    monkeypatch.setattr(
        gradient_sums.LOG, "warning", lambda text, *values: warnings.append(text % values)
    )
    cluster = Cluster(4, {(2, "forward"): 3})
    cluster.run(partial(train, verify=2))
    assert len(cluster.results) == 4
    for state in cluster.results.values():
        assert all(torch.equal(value, undisturbed[name]) for name, value in state.items())
    assert (
        "4 replicas share 3 micro-batches, so the work of 1 does not count, and verify="
        in warnings[0]
    )


def test_members_that_have_diverged_are_named():
    def main(group: Group) -> str:
        group.context.health.numbers = (0, 2)  # of the launcher
        model = _zeros()
        training = _training(group, model, shards=2)
        training.__enter__()
        if group.rank:
            with torch.no_grad():
                model.weight[0, 1] += 1.0
        with pytest.raises(MismatchError) as caught:
            training._begin_epoch([3, 3])
        return str(caught.value)

    for text in run_threads(2, main):
        assert "after 3 steps rank 2 has other values of 'weight' than rank 0" in text
