"""Sharding under models and programs that are not simple: shared units, several graphs, exceptions, later changes."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from sharding_models import Model, Values, differing, loss_of, reference, values
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import linear, said_by

import braid
from braid.comm import Group
from braid.errors import CommError
from braid.parallel.data_parallel.ddp.reference import accumulate
from braid.parallel.sharding import (
    ShardedGradScaler,
    Sharding,
    ShardingOptions,
    attach,
    sharding_of,
)
from braid.parallel.sharding.gathered_state import load_state_dict, state_dict
from braid.parallel.sharding.optimizer import refuse_wrong_rules
from support.delegated_world import delegated_world
from support.seeded import filled

ADAMW = partial(torch.optim.AdamW, lr=0.01, fused=True)


def _sharded(base: nn.Module, group: Group, **options: Any) -> Any:
    """A copy of a model, its optimizer and its engine."""
    model = copy.deepcopy(base)
    optimizer = ADAMW(model.parameters())
    engine = Sharding(model, group, ShardingOptions(**options))
    attach(engine, optimizer)
    return model, optimizer, engine


def _alone(
    base: nn.Module, size: int, steps: Iterable[int], loss: Any = loss_of, make: Any = ADAMW
) -> Values:
    """The parameters after steps of one process that runs the ranks' samples in turn."""
    model = copy.deepcopy(base)
    optimizer = make(model.parameters())
    for step in steps:
        accumulate(model, [partial(loss, model, rank, step) for rank in range(size)])
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


class Recurrent(nn.Module):
    """Units that keep their weights in lists, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(filled(nn.LSTM(8, 8, batch_first=True)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return x


class Repeated(nn.Module):
    """Units that are called several times, out of order, and share a weight; sizes and dtypes of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear(8, 8) for _ in range(4))
        self.layers[2] = copy.deepcopy(self.layers[2]).double()
        self.layers[3].weight = self.layers[0].weight
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in (0, 1, 0, 2, 3, 1):
            layer = self.layers[index]
            x = torch.tanh(layer(x.to(layer.bias.dtype)))
        return x.float() * self.scale + self.empty.sum()


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.ModuleList(Repeated() for _ in range(2))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.outer[0](x)
        return {"y": [self.outer[1](x + y)], "name": "outputs in containers"}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "recurrent": Recurrent,
    "repeated": Repeated,
    "nested": Nested,
}


def loss(model: nn.Module, rank: int, step: int, num_forwards: int) -> torch.Tensor:
    """The sum of the losses of several forwards, which one backward goes through."""
    total = torch.zeros(())
    for number in range(num_forwards):
        generator = torch.Generator().manual_seed(100 * rank + 10 * step + number)
        y = model(torch.randn(3, 5, 8, generator=generator))
        total = total + (y["y"][0] if isinstance(y, dict) else y).square().mean()
    return total


def _train(group: Group, base: nn.Module, num_forwards: int, options: dict[str, Any]) -> Any:
    model = copy.deepcopy(base)
    options = dict(options)
    if options.pop("inner", False):
        options["units"] = [m for m in model.modules() if isinstance(m, nn.Linear | Repeated)]
    optimizer = ADAMW(model.parameters())
    engine = Sharding(model, group, ShardingOptions(**options))
    attach(engine, optimizer)
    for step in range(2):
        loss(model, group.rank, step, num_forwards).backward()
        optimizer.step()
        engine.zero_grad()
        with torch.no_grad():
            loss(model, 0, 0, 1)
    with engine.gathered():
        return values(model)


@pytest.mark.parametrize("num_forwards", [1, 2])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("recurrent", {}),
        ("repeated", {}),
        ("repeated", {"reshard_after_forward": True}),
        ("repeated", {"stage": 2}),
        ("repeated", {"whole": True}),
        ("nested", {}),
        ("nested", {"inner": True, "reshard_after_forward": True}),
    ],
)
def test_models_of_all_kinds_have_the_bits_of_one_process(world, name, options, num_forwards):
    base = MODELS[name]()
    expected = _alone(base, 2, range(2), partial(loss, num_forwards=num_forwards))
    for found in world(2, _train, base, num_forwards, options):
        assert differing(found, expected) == []


class Skipped(nn.Module):
    """A unit with a second layer that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(8, 8), linear(8, 8)

    def forward(self, x: torch.Tensor, mode: str) -> torch.Tensor:
        if mode == "same":
            return x
        x = torch.tanh(self.first(x))
        return x if mode == "part" else x + self.second(x)


class Skipping(nn.Module):
    """Units that ranks call alike, and use as they like; one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(filled(Skipped()) for _ in range(8))
        self.inner = nn.ModuleList(filled(Skipped()) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor, rng: random.Random) -> torch.Tensor:
        for index in (0, 1, 2, 3, 1, 4, 5, 6, 7):
            mode = rng.choice(["whole", "whole", "part", "dropped", "same"])
            y = self.layers[index](x, mode)
            x = x if mode == "dropped" else y
        for layer in self.inner:
            x = layer(x, rng.choice(["whole", "part"]))
        return x * self.scale


def _loss_of_skipping(model: nn.Module, rank: int, step: int, seed: int) -> torch.Tensor:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * rank + step))
    loss: torch.Tensor = model(x, random.Random(f"{seed} {rank} {step}")).square().mean()
    return loss


def _skips(group: Group, base: nn.Module, seed: int, options: dict[str, Any]) -> Any:
    model, optimizer, engine = _sharded(base, group, **options)
    for step in range(3):
        _loss_of_skipping(model, group.rank, step, seed).backward()
        optimizer.step()
        engine.zero_grad()
    with engine.gathered():
        return values(model)


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": True}, {"stage": 2}], ids=str)
@pytest.mark.parametrize("seed", [0, 3, 4])
def test_units_that_some_ranks_leave_out_stop_no_rank(world, seed, options):
    base = Skipping()
    expected = _alone(base, 3, range(3), partial(_loss_of_skipping, seed=seed))
    for found in world(3, _skips, base, seed, options):
        assert differing(found, expected) == []


class Fails(Exception):
    """Raised on purpose."""


def _goes_on(group: Group, base: Model, stage: int, where: str) -> Any:
    def fail(*_args: Any) -> None:
        raise Fails

    model, optimizer, engine = _sharded(base, group, stage=stage)
    block = model.blocks[1].drop
    hook = (
        block.register_forward_hook(fail)
        if where == "forward"
        else block.register_full_backward_hook(fail)
    )
    with pytest.raises(Fails):
        loss_of(model, group.rank, 7).backward()
    hook.remove()
    for step in range(2):
        loss_of(model, group.rank, step).backward()
        optimizer.step()
        engine.zero_grad()
    with engine.gathered():
        return values(model)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("stage", [1, 3])
def test_training_goes_on_after_an_exception_on_all_ranks(world, where, stage):
    base = Model()
    expected = _alone(base, 2, range(2))
    for found in world(2, _goes_on, base, stage, where):
        assert differing(found, expected) == []


def _one_fails(group: Group, base: Model, stage: int, fails_at: int) -> Any:
    def fail(*_args: Any) -> None:
        raise Fails

    model, optimizer, engine = _sharded(base, group, stage=stage)
    said = []
    for step in range(4):
        hook = None
        if step == fails_at and group.rank == 1:
            hook = model.blocks[2].drop.register_full_backward_hook(fail)
        said.append(said_by(partial(loss_of(model, group.rank, step).backward), (Fails, CommError)))
        if hook is not None:
            hook.remove()
        if step != fails_at:
            optimizer.step()
        engine.zero_grad()
    with engine.gathered():
        return values(model), said


@pytest.mark.parametrize("fails_at", [0, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_all_go_on_after_an_exception_on_one_rank(world, stage, fails_at):
    base = Model()
    expected = _alone(base, 3, {0, 1, 2, 3} - {fails_at})
    for rank, (found, said) in enumerate(world(3, _one_fails, base, stage, fails_at)):
        assert differing(found, expected) == []
        failed = said.pop(fails_at)
        assert said == ["nothing happened"] * 3
        if rank == 1:
            assert failed.startswith("Fails")
        else:
            assert failed.startswith("CommError: an exception ended this backward on ranks [1]")


class Tangled(nn.Module):
    """A weight in two re-entrant checkpoints, whose gradient comes in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in (0, 1, 0):
            x = torch.tanh(checkpoint(self.layers[index], x, use_reentrant=True))
        return x


def _changes(group: Group) -> list[str]:
    tangled = Tangled()
    Sharding(tangled, group)
    x = torch.ones(2, 8, requires_grad=True)
    model = Model(frozen=True)
    engine = Sharding(model, group)
    said = [said_by(lambda: tangled(x).sum().backward())]
    tangled(x)  # ends what has been started
    said += [
        said_by(lambda: copy.deepcopy(model)),
        said_by(lambda: pickle.dumps(model)),
    ]
    model.blocks[1].requires_grad_(True)
    said.append(said_by(lambda: loss_of(model, 0, 0)))
    model.blocks[1].requires_grad_(False)
    loss_of(model, 0, 0)
    assert sharding_of(model) is engine
    model.double()
    said.append(said_by(lambda: loss_of(model, 0, 0)))
    whole = Model()
    whole.head.weight.requires_grad_(True)
    other = Sharding(whole, group, ShardingOptions(stage=1))
    whole.to(torch.float64)
    said.append(said_by(lambda: loss_of(whole, 0, 0)))
    assert repr(other).startswith("Sharding(stage 1, 5 units")
    assert sharding_of(nn.ReLU()) is None
    return said


def test_changes_that_sharding_cannot_follow_are_named(world):
    parts = [
        "got another gradient after its sum over ranks was started",
        "this sharded model cannot be copied or pickled",
        "this sharded model cannot be copied or pickled",
        "were frozen when the model was sharded",
        "were moved, converted or replaced after sharding",
        "were moved, converted or replaced after sharding",
    ]
    for said in world(2, _changes):
        assert [part in text for part, text in zip(parts, said, strict=True)] == [True] * 6, said


def _two_rules(group: Group | None, base: Model) -> Any:
    """Matrices by Muon, everything else by AdamW."""
    model = copy.deepcopy(base)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    optimizers = [torch.optim.Muon(matrices, lr=0.01), ADAMW(others)]
    if group is None:
        for step in range(2):
            accumulate(model, [partial(loss_of, model, r, step) for r in range(2)])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return values(model)
    engine = Sharding(model, group, ShardingOptions(whole=True))
    for optimizer in optimizers:
        attach(engine, optimizer)
    for step in range(2):
        loss_of(model, group.rank, step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with engine.gathered():
        return values(model)


def test_two_optimizers_share_a_model_of_whole_parameters(world):
    base = Model()
    expected = _two_rules(None, base)
    for found in world(2, _two_rules, base):
        assert differing(found, expected) == []


def _ahead(group: Group) -> list[str]:
    """The order in which gathers are started and units compute."""
    model = Model()
    engine = Sharding(model, group)
    log: list[str] = []
    for unit in engine.units:
        for flat in unit.flats:

            def start(
                flat: Any = flat, name: str = unit.name, real: Any = flat.start_gather
            ) -> None:
                if flat.full is None:
                    log.append(f"gather {name or 'root'}")
                real()

            flat.start_gather = start
    for index, block in enumerate(model.blocks):
        block.norm.register_forward_hook(lambda *_, i=index: log.append(f"forward {i}"))
        block.down.register_full_backward_hook(lambda *_, i=index: log.append(f"backward {i}"))
    loss_of(model, group.rank, 0).backward()
    log.clear()
    loss_of(model, group.rank, 1).backward()
    return [line.replace("blocks.", "") for line in log]


def test_the_next_unit_is_gathered_while_one_computes(world):
    expected = (
        "gather root, gather 0, gather 1, forward 0, gather 2, forward 1, gather 3, forward 2, "
        "forward 3, gather 2, backward 3, gather 1, backward 2, gather 0, backward 1, backward 0"
    )
    assert [", ".join(log) for log in world(2, _ahead)] == [expected] * 2


def _scaled(group: Group, base: Model, fused: bool) -> Any:
    model = copy.deepcopy(base)
    engine = Sharding(model, group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    attach(engine, optimizer)
    scaler = ShardedGradScaler(engine, init_scale=8.0, growth_interval=100)
    after = []
    for step in range(3):
        scaler.scale(loss_of(model, group.rank, step)).backward()
        if step == 1 and group.rank == 1:  # only this rank sees it
            engine.pieces()[0][0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        engine.zero_grad()
        after.append(scaler.get_scale())
    with engine.gathered():
        return values(model), after


@pytest.mark.parametrize("fused", [False, True])
def test_ranks_agree_on_nonfinite_gradients(world, fused):
    base = Model()
    make = partial(torch.optim.AdamW, lr=0.01, fused=fused)
    expected = _alone(base, 2, (0, 2), make=make)
    for found, scales in world(2, _scaled, base, fused):
        assert scales == [8.0, 4.0, 4.0]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def _over_gloo(group: Group, base: Model, stage: int, whole: bool) -> Any:
    gloo = delegated_world(group.context)
    model, optimizer, engine = _sharded(base, gloo, stage=stage, whole=whole)
    for step in range(2):
        loss_of(model, group.rank, step).backward()
        engine.clip_grad_norm_(0.5)
        optimizer.step()
        engine.zero_grad()
    with engine.gathered():
        found = values(model)
    gloo.close()
    return found


@pytest.mark.procs
@pytest.mark.parametrize(("stage", "whole"), [(1, False), (3, False), (3, True)])
def test_a_backend_of_torch_can_carry_it(procs, stage, whole):
    """As NCCL on GPUs; its sums are in another order."""
    base = Model(frozen=True)
    expected, _ = reference(base, 2, ADAMW, steps=2)
    for found in procs(2, _over_gloo, base, stage, whole):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def _begins(group: Group, init_sync: bool) -> Any:
    model = Model()
    model.steps.fill_(group.rank)
    with torch.no_grad():
        model.norm.weight.add_(group.rank)
    options = ShardingOptions(init_sync=init_sync, ignored=frozenset({"norm.bias"}))
    engine = Sharding(model, group, options)
    loss_of(model, group.rank, 0).backward()
    assert model.norm.bias.grad is not None  # of this rank, as it stays
    assert model.norm.bias.shape == (24,)
    with engine.gathered():
        return model.steps.item(), model.norm.weight[0].item(), len(engine.table)


def test_ranks_begin_with_the_values_of_the_first(world):
    numbers = len(list(Model().parameters())) - 1
    first = Model().norm.weight[0].item()
    assert world(2, _begins, True) == [(0.0, first, numbers)] * 2
    second = [step for step, _, _ in world(2, _begins, False)]
    assert second == [0.0, 1.0]


def _left_out(group: Group, directory: str) -> Any:
    def sharded(value: float) -> tuple[Model, Sharding]:
        model = Model()
        model.norm.bias.data.fill_(value)
        options = ShardingOptions(stage=2, ignored=frozenset({"norm.bias"}))
        return model, Sharding(model, group, options)

    model, engine = sharded(3.0)
    braid.save(directory, model=model, step=0, group=group)
    kept = state_dict(engine)
    loaded, filled = sharded(0.0)[0], sharded(0.0)
    braid.load(directory, model=loaded, group=group)
    load_state_dict(filled[1], kept)
    refuse_wrong_rules(engine)
    engine.undo()
    optimizer = ADAMW(model.parameters())
    loss_of(model, group.rank, 0).backward()
    optimizer.step()
    return loaded.norm.bias[0].item(), filled[0].norm.bias[0].item()


def test_ignored_parameters_are_saved_and_an_undone_model_trains_on(world, tmp_path):
    assert world(2, _left_out, str(tmp_path)) == [(3.0, 3.0)] * 2


def _differs(group: Group) -> str:
    stage = 1 + group.rank
    return said_by(lambda: Sharding(Model(), group, ShardingOptions(stage=stage)))


def test_ranks_with_other_options_are_told_which(world):
    for said in world(2, _differs):
        assert said.startswith("MismatchError: arguments differ between ranks")
        assert "rank 1  stage=2" in said


def _dropped(group: Group, base: Model) -> list[float]:
    model, optimizer, engine = _sharded(base, group)
    assert type(optimizer).__name__ == "AdamW"
    assert isinstance(optimizer, torch.optim.AdamW)
    assert "cannot be copied" in said_by(lambda: copy.deepcopy(optimizer))
    norms = []
    for attempt in range(2):
        if attempt:
            with engine.no_sync():
                loss_of(model, group.rank, 3).backward()
            optimizer.zero_grad()
        loss_of(model, group.rank, 0).backward()
        norms.append(engine.grad_norm().item())
        optimizer.zero_grad()
    return norms


def test_an_optimizer_drops_what_no_sync_has_left(world):
    for first, second in world(2, _dropped, Model()):
        assert first == second > 0


def penalty(model: nn.Module, rank: int) -> torch.Tensor:
    """The squared norm of the gradient with respect to the input."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    value: torch.Tensor = slope.square().mean()
    return value


def _penalized(group: Group, stage: int) -> Any:
    model = Repeated()
    optimizer = ADAMW(model.parameters())
    engine = Sharding(model, group, ShardingOptions(stage=stage))
    attach(engine, optimizer)
    if stage == 3:
        return said_by(lambda: penalty(model, group.rank))
    for _ in range(2):
        penalty(model, group.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def test_second_derivatives_are_right_or_refused(world):
    expected = Repeated()
    optimizer = ADAMW(expected.parameters())
    for _ in range(2):
        accumulate(expected, [partial(penalty, expected, rank) for rank in range(2)])
        optimizer.step()
        optimizer.zero_grad()
    for stage in (1, 2):
        for found in world(2, _penalized, stage):
            assert differing(found, values(expected)) == []
    for said in world(2, _penalized, 3):
        assert said.startswith("ConfigError: a backward with create_graph=True")
