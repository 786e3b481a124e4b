"""Strategies with the replicas of one process: weights, contexts, data sets, and what is refused."""

from __future__ import annotations

import copy
import io
import json
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from braid.errors import ConfigError, StaleError
from braid.runtime.rendezvous.engine_ranks import as_torchrun
from braid.runtime.rendezvous.tf_config import read_tf_config
from braid.strategies import (
    InputContext,
    MirroredStrategy,
    OneDeviceStrategy,
    PerReplica,
    Strategy,
    TFConfigClusterResolver,
    compute_average_loss,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    replicas,
)
from braid.strategies.agreement import average_closure

WIDTH = 4


def network(*, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(8) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(WIDTH, 8), middle, nn.Linear(8, 1))


def batches(*sizes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    xs = [
        torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(i))
        for i, size in enumerate(sizes)
    ]
    return [(x, x.sum(1, keepdim=True)) for x in xs]


def train(strategy: Strategy, data: list, *, norm: bool = False) -> tuple[nn.Module, list[float]]:
    with strategy.scope():
        model = network(norm=norm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach() * len(x)

    losses = [
        strategy.reduce("sum", strategy.run(step, args=batch)).item()
        for batch in strategy.experimental_distribute_dataset(data)
    ]
    return model, losses


def in_turn(data: list, count: int) -> nn.Module:
    """Train in one process: gradients of shares in order, scaled once."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    params = list(model.parameters())
    for x, y in data:
        grads = [
            torch.autograd.grad(functional.mse_loss(model(x_i), y_i), params)
            for x_i, y_i in zip(x.chunk(count), y.chunk(count), strict=True)
        ]
        for param, *parts in zip(params, *grads, strict=True):
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            param.grad = total / count
        optimizer.step()
    return model


@pytest.mark.parametrize("count", [2, 3])
def test_mirrored_replicas_have_the_bits_of_one_process_in_turn(count):
    strategy = MirroredStrategy(["cpu"] * count)
    data = batches(*[6] * 5)
    model, _ = train(strategy, data)
    for found, expected in zip(model.parameters(), in_turn(data, count).parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    copies = [objects.tensors().values() for objects in strategy._copies.objects]
    assert all(torch.equal(a, b) for a, *bs in zip(*copies, strict=True) for b in bs)
    strategy.close()


def test_libraries_reach_the_copies_of_a_parameter(mirrored):
    model, _ = train(mirrored, batches(4))
    extended, weight = mirrored.extended, model[0].weight
    sums = extended.update(
        weight, lambda x, value: x.detach().fill_(value).sum().item(), args=(2.0,)
    )
    assert sums.values == (2.0 * weight.numel(),) * 2
    assert torch.equal(weight, torch.full_like(weight, 2.0))
    assert extended.variable_created_in_scope(weight)
    assert not extended.variable_created_in_scope(torch.ones(1))
    with extended.colocate_vars_with(weight):
        pass
    with (
        pytest.raises(ConfigError, match=r"shape \[1\] is in no module made in this"),
        extended.colocate_vars_with(torch.ones(1)),
    ):
        pass
    value = PerReplica([torch.ones(1), torch.ones(1)])
    assert extended.reduce_to("sum", value, "cpu").item() == 2.0
    assert [x.item() for x in extended.batch_reduce_to("mean", [(value, weight)])] == [1.0]
    assert extended.worker_devices == extended.parameter_devices == (torch.device("cpu"),) * 2


def test_shares_of_different_sizes_are_weighted_by_samples(mirrored):
    data = batches(5, 7, 2, 9)
    model, losses = train(mirrored, data)
    whole, expected = train(OneDeviceStrategy(), data)
    assert losses == pytest.approx(expected, rel=1e-5)
    for found, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found, other)


def test_statistics_are_averaged_and_equal_in_all_replicas(mirrored):
    model, _ = train(mirrored, batches(8, 8), norm=True)
    first, second = (objects.modules[0][1] for objects in mirrored._copies.objects)
    assert first.running_mean.abs().sum() > 0
    assert torch.equal(first.running_mean, second.running_mean)
    assert model[1].num_batches_tracked == 2


def test_what_the_program_changes_between_steps_reaches_all_replicas(mirrored):
    with mirrored.scope():
        model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Dropout(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)

    def step() -> tuple[float, bool, torch.Tensor]:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return optimizer.param_groups[0]["lr"], model[1].training, model[0].weight.detach().clone()

    mirrored.run(step)
    scheduler.step()
    model.eval()
    with torch.no_grad():
        model[0].weight.fill_(3.0)
    lrs, training, weights = mirrored.run(step)
    assert lrs.values == pytest.approx((0.1, 0.1))
    assert training.values == (False, False)
    assert torch.equal(weights.values[0], weights.values[1])
    assert weights.values[0].tolist() == [[pytest.approx(2.9)] * 2]
    assert scheduler.get_last_lr() == [pytest.approx(0.1)]


def test_parts_that_are_kept_by_themselves_are_the_replicas_own(mirrored):
    with mirrored.scope():
        encoder, decoder = nn.Linear(2, 3), nn.Linear(3, 1)
        both = nn.ModuleList([encoder, decoder])
        optimizer = torch.optim.SGD(both.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        decoder(encoder(x)).sum().backward()
        optimizer.step()
        return both[1].weight.detach().clone()

    weights = mirrored.run(step, args=(PerReplica([torch.ones(1, 2), -torch.ones(1, 2)]),))
    assert torch.equal(*weights.values)
    assert weights.values[0].data_ptr() != weights.values[1].data_ptr()


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x
        return self.layer(self.seen)


def test_what_a_forward_keeps_in_its_module_is_the_replicas_own(mirrored):
    with mirrored.scope():
        model = Remembers()

    def step(x: torch.Tensor) -> torch.Tensor:
        model(x)
        return model.seen

    seen = mirrored.run(step, args=(PerReplica([torch.zeros(1, 1), torch.ones(1, 1)]),))
    assert [x.item() for x in seen.values] == [0, 1]


def test_a_model_of_a_scope_is_copied_and_saved_as_any_other(mirrored):
    model, _ = train(mirrored, batches(4))
    again = copy.deepcopy(model)
    assert type(again) is nn.Sequential
    assert type(again[0]) is nn.Linear
    assert isinstance(model, nn.Sequential)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    x = torch.ones(1, WIDTH)
    assert torch.equal(model(x), again(x))
    assert torch.equal(model(x), loaded(x))
    assert len(model) == 3


def test_contexts_say_where_a_statement_runs(mirrored):
    assert not has_strategy()
    with pytest.raises(ConfigError, match="no strategy is active here"):
        get_strategy()
    with mirrored.scope():
        assert (get_strategy(), in_cross_replica_context()) == (mirrored, True)

    def step() -> tuple:
        context = get_replica_context()
        assert context is not None
        assert get_strategy() is mirrored
        assert not in_cross_replica_context()
        number = context.replica_id_in_sync_group
        total = context.all_reduce("sum", torch.tensor([1.0 + number]))
        rows = context.all_gather(torch.full((number + 1, 2), float(number)))
        largest = context.merge_call(
            lambda _, x: (in_cross_replica_context(), max(x.values)), (number,)
        )
        return number, total.item(), rows[:, 0].tolist(), largest

    numbers, totals, rows, (crossed, largest) = mirrored.run(step)
    assert numbers.values == (0, 1)
    assert totals.values == (3.0, 3.0)
    assert rows[0].values == (0.0, 0.0)
    assert [row.values for row in rows] == [(0.0, 0.0), (1.0, 1.0), (1.0, 1.0)]
    assert (crossed.values, largest.values) == ((True, True), (1, 1))


def test_values_are_combined_over_replicas(mirrored):
    value = PerReplica([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])])
    assert mirrored.reduce("sum", value).tolist() == [4.0, 6.0]
    assert mirrored.reduce("mean", value).tolist() == [2.0, 3.0]
    ragged = PerReplica([torch.tensor([1.0]), torch.tensor([2.0, 6.0])])
    assert mirrored.reduce("mean", ragged, axis=0).item() == 3.0
    assert mirrored.gather(ragged, 0).tolist() == [1.0, 2.0, 6.0]
    with pytest.raises(ConfigError, match=r"different shapes \[\[1\], \[2\]\]: pass axis=0"):
        mirrored.reduce("sum", ragged)
    with pytest.raises(ConfigError, match="sum or mean to combine values of replicas, got 'max'"):
        mirrored.reduce("max", value)
    assert mirrored.experimental_local_results(value) == value.values
    made = mirrored.experimental_distribute_values_from_function(lambda i: 10 * i)
    assert made.values == (0, 10)


def test_a_metric_is_changed_by_replicas_and_combined_when_it_is_read(mirrored):
    count, mean = mirrored.sync_on_read(0.0), mirrored.sync_on_read(0.0, "mean")

    def step() -> None:
        number = get_replica_context().replica_id_in_sync_group
        count.value.add_(1 + number)
        mean.value.add_(number)

    mirrored.run(step)
    mirrored.run(step)
    assert (count.read().item(), mean.read().item()) == (6.0, 1.0)
    assert mirrored.reduce("sum", count).item() == 6.0
    with pytest.raises(ConfigError, match="value exists only inside a replica"):
        _ = count.value
    with pytest.raises(ConfigError, match="aggregation must be one of"):
        mirrored.sync_on_read(0.0, "median")


def test_an_average_loss_is_that_of_the_whole_batch(mirrored):
    x, y = batches(5)[0]
    with mirrored.scope():
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        losses = (model(x) - y).square()
        compute_average_loss(losses, global_batch_size=5).backward()
        optimizer.step()

    for batch in mirrored.experimental_distribute_dataset([(x, y)]):
        mirrored.run(step, args=batch)
    expected = network()
    (expected(x) - y).square().mean().backward()
    for found, param in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, param - param.grad)


@pytest.mark.parametrize("index", [0, 1])
def test_the_replica_that_fails_is_the_error_and_the_next_run_works(mirrored, index):
    with mirrored.scope():
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, fail: bool) -> float:
        optimizer.zero_grad()
        if fail and get_replica_context().replica_id_in_sync_group == index:
            raise ValueError("bad sample")
        model(x).sum().backward()
        optimizer.step()
        return model[0].weight.sum().item()

    x = torch.ones(1, WIDTH)
    with pytest.raises(ValueError, match="bad sample"):
        mirrored.run(step, args=(x, True))
    first, second = mirrored.run(step, args=(x, False)).values
    assert first == second


def test_a_merge_that_one_replica_never_reaches_ends(mirrored):
    def step() -> None:
        context = get_replica_context()
        if context.replica_id_in_sync_group:
            raise ValueError("not here")
        context.merge_call(print)

    with pytest.raises(ValueError, match="not here"):
        mirrored.run(step)


def test_parameters_that_are_not_the_replicas_own_are_refused(mirrored):
    outside = nn.Sequential(nn.Linear(2, 1))
    with mirrored.scope():
        model = nn.Linear(2, 1)
    kept = list(model.parameters())

    def uses_kept() -> None:
        model(torch.ones(1, 2)).sum().backward()
        nn.utils.clip_grad_norm_(kept, 1.0)
        torch.nn.functional.linear(torch.ones(1, 2), kept[0])

    with pytest.raises(ConfigError, match="replica 1 uses weight of replica 0"):
        mirrored.run(uses_kept)
    with pytest.raises(
        ConfigError,
        match=r"trainable parameter 0.weight of Sequential \(shape \[1, 2\]\), which was not made",
    ):
        mirrored.run(lambda: outside(torch.ones(1, 2)))


def test_frozen_parameters_and_buffers_from_outside_are_constants(mirrored):
    teacher = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval().requires_grad_(False)
    with mirrored.scope():
        model = nn.Linear(2, 2)

    def distill() -> torch.Tensor:
        x = torch.ones(3, 2)
        return (model(x) - teacher(x)).square().mean()

    assert torch.equal(mirrored.reduce("mean", mirrored.run(distill)), distill())


def test_an_optimizer_of_parameters_outside_of_the_scope_is_refused(mirrored):
    outside = nn.Linear(2, 1)
    with mirrored.scope():
        optimizer = torch.optim.SGD(outside.parameters(), lr=0.1)
    with pytest.raises(
        ConfigError, match=r"parameter 0 \(shape \[1, 2\]\) of SGD belongs to no module"
    ):
        mirrored.run(optimizer.step)


@pytest.mark.parametrize("kind", ["mirrored", "one"])
def test_an_optimizer_made_outside_of_the_scope_is_refused(mirrored, kind):
    strategy = mirrored if kind == "mirrored" else OneDeviceStrategy()
    with strategy.scope():
        model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    with pytest.raises(ConfigError, match=r"was not made in this strategy's scope|replica 0's"):
        strategy.run(step)
    strategy.close()


def test_shares_in_tuples_and_mappings_are_weighted_too(mirrored):
    data = [{"x": x, "y": y} for x, y in batches(5, 3)]
    weights = []
    for strategy in (mirrored, OneDeviceStrategy()):
        with strategy.scope():
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch: dict, model: nn.Module = model, optimizer: object = optimizer) -> None:
            for _ in range(2):  # gradients add up
                functional.mse_loss(model(batch["x"]), batch["y"]).backward()
            optimizer.step()
            optimizer.zero_grad()

        for batch in strategy.experimental_distribute_dataset(data):
            strategy.run(step, args=(batch,))
        weights.append([param.detach() for param in model.parameters()])
    for found, expected in zip(*weights, strict=True):
        torch.testing.assert_close(found, expected)


def test_replicas_that_become_different_are_refused(mirrored):
    with mirrored.scope():
        model = network()

    def step() -> None:
        with torch.no_grad():
            model[0].weight.add_(get_replica_context().replica_id_in_sync_group)

    with pytest.raises(ConfigError, match=r"0\.weight differ between replicas after this step"):
        mirrored.run(step)


def test_weights_that_are_loaded_before_the_end_are_no_difference(mirrored):
    model, _ = train(mirrored, batches(4))
    with torch.no_grad():
        model[0].weight.zero_()
    mirrored.check_replicas()
    mirrored.close()
    assert model[0].weight.sum() == 0


def test_a_scheduler_steps_outside_of_replicas(mirrored):
    with mirrored.scope():
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(
        ConfigError, match=r"StepLR\.step\(\) was called in a replica, but all replicas share"
    ):
        mirrored.run(lambda: scheduler.step())  # noqa: PLW0108 - found in the call
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(
        ConfigError, match=r"GradScaler\.unscale_\(\) was called in a replica, but all replicas"
    ):
        mirrored.run(lambda: scaler.unscale_(optimizer))


@pytest.mark.parametrize("moment", ["before", "between"])
def test_hooks_of_parameters_and_modules_are_those_of_all_replicas(mirrored, moment):
    with mirrored.scope():
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        y = model(torch.ones(1, 2))
        y.sum().backward()
        optimizer.step()
        return y.detach()

    if moment == "between":
        mirrored.run(step)
    before = model.weight.detach().clone()
    model.weight.register_hook(torch.zeros_like)
    model.register_forward_hook(lambda _module, _inputs, output: 3 * output)
    found = mirrored.run(step)
    expected = 3 * before.sum()
    assert [y.item() for y in found.values] == pytest.approx([expected.item()] * 2)
    assert torch.equal(model.weight, before)


def test_states_that_are_loaded_between_steps_reach_all_replicas(mirrored):
    with mirrored.scope():
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        functional.mse_loss(model(x), y).backward()
        optimizer.step()

    (batch,) = mirrored.experimental_distribute_dataset(batches(6))
    mirrored.run(step, args=batch)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    optimizer.zero_grad()
    mirrored.run(step, args=batch)
    expected = [param.detach().clone() for param in model.parameters()]
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    model.zero_grad()
    mirrored.run(step, args=batch)
    for found, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(found.detach(), value, rtol=0, atol=0)


def test_a_merge_that_another_replica_returns_without_ends(mirrored):
    def step() -> None:
        context = get_replica_context()
        if not context.replica_id_in_sync_group:
            context.merge_call(print)

    with pytest.raises(StaleError, match="another had ended its step"):
        mirrored.run(step)


@pytest.mark.parametrize("waits", [True, False])
def test_a_replica_that_skips_backward_is_named_and_one_that_computes_is_not(
    mirrored, monkeypatch, waits
):
    monkeypatch.setattr(replicas, "GRACE_S", 0.05)
    with mirrored.scope():
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, skips: bool) -> float:
        is_first = get_replica_context().replica_id_in_sync_group == 0
        if not (skips and waits and is_first):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        while skips and not waits and not is_first and mirrored._replicas.is_usable:
            model(x)  # until the first replica has waited for long enough
        return model[0].weight.sum().item()

    x = torch.ones(1, WIDTH)
    if waits:
        with pytest.raises(StaleError, match="waits for another one, which ended its step"):
            mirrored.run(step, args=(x, True))
    else:
        mirrored.run(step, args=(x, True))
    first, second = mirrored.run(step, args=(x, False)).values
    assert first == second


def test_scopes_and_runs_that_enclose_others_are_refused(mirrored):
    with mirrored.scope(), mirrored.scope():
        model = nn.Linear(1, 1)
    assert len(mirrored._made.modules()) == 1
    with (
        mirrored.scope(),
        pytest.raises(
            ConfigError, match="OneDeviceStrategy was entered inside the scope of MirroredStrategy"
        ),
        OneDeviceStrategy().scope(),
    ):
        pass
    with pytest.raises(ConfigError, match=r"strategy\.run was called inside strategy\.run"):
        mirrored.run(lambda: mirrored.run(lambda: None))
    mirrored.run(lambda: model(torch.ones(1, 1)))


def test_what_is_made_between_steps_is_distributed_too(mirrored):
    model, _ = train(mirrored, batches(4))
    with mirrored.scope():
        head = nn.Linear(1, 1)
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        head(model(x)).sum().backward()
        optimizer.step()
        return torch.cat([p.detach().flatten() for p in [*model.parameters(), *head.parameters()]])

    first, second = mirrored.run(
        step, args=(PerReplica([torch.ones(1, 4), -torch.ones(1, 4)]),)
    ).values
    assert torch.equal(first, second)
    assert mirrored.run(lambda: None) is None


def test_batches_are_cut_for_replicas(mirrored):
    data = mirrored.experimental_distribute_dataset([{"x": torch.arange(5), "y": torch.arange(5)}])
    (batch,) = data
    assert [x.tolist() for x in batch["x"].values] == [[0, 1], [2, 3, 4]]
    assert batch["y"].samples == (2, 3)
    assert len(data) == 1
    (only,) = mirrored.experimental_distribute_dataset([torch.arange(4)])
    assert [x.tolist() for x in only.values] == [[0, 1], [2, 3]]
    with pytest.raises(ConfigError, match="1 samples is too small for 2 replicas"):
        next(iter(mirrored.experimental_distribute_dataset([torch.arange(1)])))
    with pytest.raises(ConfigError, match="the same length in dim 0"):
        next(iter(mirrored.experimental_distribute_dataset([(torch.ones(2), torch.ones(3))])))


def test_a_function_makes_the_batches_of_a_process(mirrored):
    seen: list[InputContext] = []

    def make(context: InputContext) -> list[torch.Tensor]:
        seen.append(context)
        each = context.get_per_replica_batch_size(4)
        return [torch.full((each,), float(i)) for i in range(5)]

    found = list(mirrored.distribute_datasets_from_function(make))
    assert seen == [InputContext(1, 0, 2)]
    assert [[x[0].item() for x in batch.values] for batch in found] == [[0, 1], [2, 3]]
    with pytest.raises(ConfigError, match="a batch of 3 cannot be divided equally among 2"):
        seen[0].get_per_replica_batch_size(3)


def test_devices_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError, match="devices is empty"):
        MirroredStrategy([])
    with pytest.raises(ConfigError):
        OneDeviceStrategy("cuda:99")


def config(cluster: object, **task: object) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def test_ranks_are_counted_from_the_chief():
    cluster = {"worker": ["a:1", "b:2"], "chief": ["a:3"]}
    environ = config(cluster, type="worker", index=0)
    assert read_tf_config(environ).rank == 1
    engine, values = as_torchrun(environ)
    assert engine == "tf_config"
    assert {
        name: values[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    } == {
        "RANK": "1",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "3",
    }
    assert (values["LOCAL_RANK"], values["LOCAL_WORLD_SIZE"]) == ("1", "2")
    resolver = TFConfigClusterResolver(environ)
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert resolver.cluster_spec()["chief"] == ("a:3",)


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({}, "TF_CONFIG is not set"),
        ({"TF_CONFIG": "{"}, "is not JSON"),
        ({"TF_CONFIG": "[]"}, 'has no "cluster"'),
        (config({}, type="worker", index=0), 'has no "cluster"'),
        (config({"wörker": ["a:1"]}, type="worker", index=0), "job 'wörker' is unknown"),
        (config({"worker": "a:1"}, type="worker", index=0), "must be a list of addresses"),
        (config({"worker": {"0": "a:1", "2": "b:1"}}, type="worker", index=0), "without gaps"),
        (config({"worker": ["a"]}, type="worker", index=0), "'a' is not host:port"),
        (config({"worker": ["a:99999"]}, type="worker", index=0), "not host:port"),
        (config({"worker": ["a:1", "a:1"]}, type="worker", index=0), "address of two tasks"),
        (config({"worker": ["a:1"]}, type="ps", index=0), "task type 'ps' is not a job"),
        (
            config({"worker": ["a:1"]}, type="worker", index=1),
            "task index 1 is not a task of worker",
        ),
        (config({"worker": ["a:1"]}, type="worker", index="0"), "task index '0' is not a task of"),
        (
            config({"worker": ["a:1", "b:1"]}, type="worker", index=True),
            "task index True is not a task",
        ),
        (config({"worker": ["a:1"]}, type=["worker"], index=0), "is not a job of the cluster"),
        (config({"worker": ["a:1"]}), 'has no "task"'),
        (config({"worker": ["http://a:1"]}, type="worker", index=0), "is not host:port"),
        (config({"chief": ["a:1", "b:1"]}, type="chief", index=0), "2 tasks of chief"),
    ],
)
def test_a_cluster_that_makes_no_sense_is_refused(environ, problem):
    with pytest.raises(ConfigError, match=problem):
        read_tf_config(environ)


def test_tasks_may_be_numbered():
    jobs = {"worker": {"1": "b:1", "0": "a:1"}}
    assert read_tf_config(config(jobs, type="worker", index=1)).addresses == ["a:1", "b:1"]


class Scaled(torch.optim.SGD):
    """An optimizer with further arguments of a step."""

    def step(self, closure=None, factor=1.0, *, times=1):
        return closure() * factor * times


def test_the_arguments_of_a_step_beside_its_closure_are_kept():
    optimizer = Scaled(nn.Linear(1, 1).parameters())
    optimizer.register_step_pre_hook(partial(average_closure, None))
    assert optimizer.step(lambda: 5.0, 2.0, times=3) == 30.0
    assert optimizer.step(closure=lambda: 5.0, factor=2.0) == 10.0
