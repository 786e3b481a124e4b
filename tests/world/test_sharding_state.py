"""States of sharded trainings: saved by any number of ranks at any stage, loaded by any other, to the bit."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from sharding_models import Model, differing, loss_of, values
from torch import nn
from training import linear, said_by

from braid import DistributedDataParallel, FullyShardedDataParallel
from braid.checkpoint.agreed_buffers import agreed_buffers
from braid.checkpoint.loading import open_last
from braid.comm import Group
from braid.errors import CheckpointError, ConfigError
from braid.parallel import resume
from braid.parallel.hybrid import HybridParallel
from braid.parallel.sharding import Sharding, ShardingOptions, attach, gathered_state, sharding_of

Whole = dict[str, Any]


def make(
    group: Group, kind: str, *, dtype: torch.dtype = torch.float32, optimizer: str = "Adam"
) -> tuple[Any, torch.optim.Optimizer, Any]:
    """A model that is wrapped, or divided at a stage, with its optimizer and the plain model."""
    plain = Model(frozen=True, dtype=dtype)
    options: dict[str, Any] = {"lr": 0.01}
    if optimizer == "Adam":
        options["amsgrad"] = True
    made = getattr(torch.optim, optimizer)(plain.parameters(), **options)
    masters = None if dtype == torch.float32 else torch.float32
    if kind == "ddp":
        return DistributedDataParallel(plain, process_group=group), made, plain
    whole = optimizer == "Adafactor"
    if kind == "fsdp":
        wrapped = FullyShardedDataParallel(
            plain, group, whole_parameters=whole, master_dtype=masters
        )
        attach(wrapped.sharding, made)
        return wrapped, made, plain
    engine = Sharding(
        plain, group, ShardingOptions(stage=int(kind), whole=whole, master_dtype=masters)
    )
    attach(engine, made)
    return plain, made, plain


def step(model: Any, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    loss_of(model, rank, number).backward()
    optimizer.step()
    optimizer.zero_grad()


def whole_state(model: Any, optimizer: torch.optim.Optimizer, group: Group) -> Whole:
    """Parameters and optimizer states as whole tensors, by name."""
    engine = getattr(getattr(model, "module", model), "braid_sharding", None)
    if engine is None:
        plain = getattr(model, "module", model)
        names = {id(p): n for n, p in plain.named_parameters()}
        found: Whole = values(plain)
        for param, state in optimizer.state.items():
            found.update({f"{names[id(param)]}/{k}": v.clone() for k, v in state.items()})
        return found
    from braid.parallel.sharding import gathered_state

    state = gathered_state.optimizer_state_dict(engine, optimizer)["state"]
    kept = gathered_state.state_dict(engine)
    found = {record.name: kept[record.name].clone() for record in engine.table}
    for name, entries in state.items():
        found.update({f"{name}/{k}": v.clone() for k, v in entries.items()})
    return found


def _save(group: Group, kind: str, directory: str, options: dict[str, Any]) -> Whole:
    model, optimizer, plain = make(group, kind, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for number in range(2):
        step(model, optimizer, 0, number)
    schedule.step()
    plain.steps.fill_(3)
    resume.save(directory, model=model, optimizer=optimizer, step=1, group=group, schedule=schedule)
    return whole_state(model, optimizer, group)


def _load(group: Group, kind: str, directory: str, options: dict[str, Any]) -> Whole:
    model, optimizer, plain = make(group, kind, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    start = resume.load(directory, model=model, optimizer=optimizer, group=group, schedule=schedule)
    assert start == 2
    assert plain.steps == 3
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
    return whole_state(model, optimizer, group)


@pytest.mark.procs
@pytest.mark.parametrize(
    ("kind", "size", "then", "new_size"),
    [
        ("fsdp", 2, "fsdp", 3),
        ("fsdp", 3, "ddp", 2),
        ("ddp", 2, "fsdp", 3),
        ("3", 2, "1", 3),
        ("2", 3, "3", 1),
    ],
)
def test_a_state_is_loaded_to_the_bit_by_any_division(
    procs, kind, size, then, new_size, tmp_path: Path
):
    saved = procs(size, _save, kind, str(tmp_path), {})[0]
    assert len(saved) > 50
    for found in procs(new_size, _load, then, str(tmp_path), {}):
        assert differing(found, saved) == []


@pytest.mark.procs
@pytest.mark.parametrize(
    "options", [{"optimizer": "Adafactor"}, {"dtype": torch.bfloat16}], ids=["whole", "masters"]
)
def test_states_of_other_shapes_and_masters_are_loaded_too(procs, options, tmp_path: Path):
    saved = procs(2, _save, "fsdp", str(tmp_path), options)[0]
    for found in procs(3, _load, "fsdp", str(tmp_path), options):
        assert differing(found, saved) == []
    if "dtype" in options:
        masters = procs(3, _masters, str(tmp_path), options)
        assert sum(masters) > 0


def _masters(group: Group, directory: str, options: dict[str, Any]) -> float:
    """Sum of what the pieces have beyond the model's data type."""
    model, optimizer, _ = make(group, "fsdp", **options)
    resume.load(directory, model=model, optimizer=optimizer, group=group)
    pieces = [owned.detach() for _, owned in model.sharding.owned()]
    return sum(float((piece - piece.bfloat16()).abs().sum()) for piece in pieces)


def _refusals(group: Group, directory: str) -> list[str]:
    model, optimizer, _ = make(group, "fsdp")
    resume.save(directory, model=model, optimizer=optimizer, step=0, group=group)
    other = FullyShardedDataParallel(Model(unused=True), group)
    adafactor = torch.optim.SGD(model.parameters(), lr=0.1)
    state = model.state_dict()
    short = {name: value for name, value in state.items() if name != "norm.weight"}
    wrong = state | {"norm.weight": torch.zeros(3), "strange": torch.zeros(1)}
    whole = model.optimizer_state_dict(optimizer)
    fewer = torch.optim.Adam([model.module.embed.weight])
    before = [owned.detach().clone() for _, owned in model.sharding.owned()]
    said = [
        said_by(lambda: resume.load(directory, model=other, group=group)),
        said_by(lambda: resume.load(directory, model=model, optimizer=adafactor, group=group)),
        said_by(lambda: model.load_state_dict(short)),
        said_by(lambda: model.load_state_dict(wrong)),
        said_by(lambda: model.load_state_dict(state, assign=True)),
        said_by(lambda: model.load_optimizer_state_dict(fewer, whole)),
    ]
    after = [owned.detach() for _, owned in model.sharding.owned()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return said


@pytest.mark.procs
def test_a_state_of_another_model_is_refused(procs, tmp_path: Path):
    parts = [
        "is not a checkpoint of this model",
        "the optimizer is SGD",
        "norm.weight are missing",
        "norm.weight has the shape [3], the model's is [24]; strange are not in the model",
        "leave it out",
        "create the optimizer with the same groups",
    ]
    for said in procs(2, _refusals, str(tmp_path)):
        assert [part in text for part, text in zip(parts, said, strict=True)] == [True] * 6, said
        assert said[0].startswith(CheckpointError.__name__)
        assert said[2].startswith(ConfigError.__name__)


def _copied(group: Group, whole: bool) -> Any:
    """Whole state dicts of one training are loaded into another, which then takes the same steps."""
    name = "Adafactor" if whole else "Adam"
    first, optimizer, _ = make(group, "fsdp", optimizer=name)
    for number in range(2):
        step(first, optimizer, group.rank, number)
    state, states = first.state_dict(), first.optimizer_state_dict(optimizer)
    assert set(state) == set(Model().state_dict())
    second, other, _ = make(group, "fsdp", optimizer=name)
    step(second, other, group.rank, 9)
    second.load_state_dict({name: value.clone() for name, value in state.items()})
    second.load_optimizer_state_dict(other, copy.deepcopy(states))
    for model, own in ((first, optimizer), (second, other)):
        step(model, own, group.rank, 5)
    return first.state_dict(), second.state_dict()


@pytest.mark.parametrize("whole", [False, True])
def test_whole_state_dicts_continue_a_training(world, whole):
    for first, second in world(2, _copied, whole):
        assert differing(second, first) == []


class Scaled(nn.Module):
    """Has parameters without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.first = linear(3, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor(-0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x)) * self.scale + self.shift


BY_ELEMENTS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "AdamW": {},
    "Adam": {"amsgrad": True},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "ASGD": {},
    "Rprop": {},
}


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))  # on all ranks
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _resumed(group: Group, kind: str, name: str, directory: str) -> Whole:
    """Whole parameters after a training that was saved, loaded, and shared out in the middle."""

    def made(loads: bool) -> tuple[Any, torch.optim.Optimizer]:
        model = Scaled()
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **BY_ELEMENTS[name])
        if not loads:
            _trained(model, optimizer, range(1))  # states that are cut
        engine = Sharding(model, group, ShardingOptions(stage=int(kind)))
        attach(engine, optimizer)
        return model, optimizer

    model, optimizer = made(loads=False)
    _trained(model, optimizer, range(1, 3))
    resume.save(directory, model=model, optimizer=optimizer, step=0, group=group)
    kept = gathered_state.optimizer_state_dict(sharding_of(model), optimizer)
    model, optimizer = made(loads=True)
    resume.load(directory, model=model, optimizer=optimizer, group=group)
    _trained(model, optimizer, range(3, 4))
    gathered_state.load_optimizer_state_dict(sharding_of(model), optimizer, kept)
    _trained(model, optimizer, range(4, 5))
    with sharding_of(model).gathered():
        return values(model)


def _all_resumed(group: Group, kind: str, directory: str) -> dict[str, Whole]:
    return {
        name: _resumed(group, kind, name, f"{directory}/{group.size} {name}")
        for name in BY_ELEMENTS
    }


@pytest.mark.procs
@pytest.mark.parametrize(("kind", "size"), [("1", 1), ("2", 3), ("3", 3)])
def test_parameters_without_dims_are_saved_loaded_and_stepped(procs, kind, size, tmp_path: Path):
    ranks = procs(size, _all_resumed, kind, str(tmp_path))
    for name, options in BY_ELEMENTS.items():
        model = Scaled()
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **options)
        _trained(model, optimizer, range(3))
        kept = copy.deepcopy(optimizer.state_dict())
        _trained(model, optimizer, range(3, 4))
        optimizer.load_state_dict(kept)
        _trained(model, optimizer, range(4, 5))
        for found in ranks:
            torch.testing.assert_close(found[name], values(model), msg=name)


class Normed(nn.Sequential):
    """Has running statistics, and a buffer of which no rule is known."""

    def __init__(self) -> None:
        super().__init__(linear(3, 4), nn.BatchNorm1d(4), linear(4, 2))
        self.register_buffer("seen", torch.zeros(2))


def _normed(group: Group, kind: str, directory: str, same: bool) -> Any:
    """Own buffers of a rank, those of a checkpoint, those of a whole state, and warnings."""
    plain = Normed()
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0 if same else group.rank))
    model: Any = plain
    if kind == "fsdp":
        model = FullyShardedDataParallel(plain, group)
    elif kind == "ddp":
        model = DistributedDataParallel(plain, process_group=group, broadcast_buffers=False)
    elif kind != "zero":
        layers = list(plain)
        model = HybridParallel(
            plain, "dp=2", group, layers=layers, num_microbatches=1, shard=int(kind)
        )
    else:
        Sharding(plain, group, ShardingOptions(stage=1))
    if isinstance(model, HybridParallel):
        model.step(x, torch.zeros(6, 2), loss=nn.functional.mse_loss)
    else:
        model(x).sum().backward()
    if not same:
        plain.seen.fill_(group.rank + 1)
    own = {name: x.clone() for name, x in plain.named_buffers()}
    resume.save(directory, model=model, step=0, group=group)
    saved = open_last(directory)
    whole = model.state_dict() if kind == "fsdp" else own
    assert all(torch.equal(x, own[name]) for name, x in plain.named_buffers())
    return own, {name: saved.read(f"model/{name}") for name in own}, {n: whole[n] for n in own}


@pytest.mark.filterwarnings("ignore:buffers .* differ between ranks")
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("kind", ["fsdp", "zero", "ddp", "0", "2"])
def test_statistics_of_ranks_that_differ_are_averaged_in_a_checkpoint(world, tmp_path, kind, same):
    (first, saved, whole), (second, also, other) = world(2, _normed, kind, str(tmp_path), same)
    assert all(torch.equal(saved[name], also[name]) for name in saved)
    if kind == "fsdp":
        assert all(torch.equal(saved[name], x) for name, x in (*whole.items(), *other.items()))
    for name in ("1.running_mean", "1.running_var"):
        assert torch.equal(first[name], second[name]) == same
        mean = ((first[name].double() + second[name].double()) / 2).float()
        assert torch.equal(saved[name], mean)
    assert torch.equal(saved["seen"], first["seen"])
    assert saved["1.num_batches_tracked"] == 1


def _unequal(group: Group) -> list[str]:
    model = Normed()
    model.seen.fill_(group.rank)
    if group.rank:  # filters belong to all threads
        agreed_buffers(model, [group])
        return []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        agreed_buffers(model, [group])
    return [str(each.message) for each in caught]


@pytest.mark.filterwarnings("ignore:buffers .* differ between ranks")
def test_buffers_that_cannot_be_averaged_are_named(world):
    (text,) = set(world(2, _unequal)[0])  # threads share what is caught
    assert text.startswith("buffers seen differ between ranks")
