"""The faces of sharding: wrapper, fully_shard, shard_optimizer; hybrid meshes, accumulation, data types, places."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from sharding_models import OPTIMIZERS, Model, differing, loss_of, reference, values
from torch import nn
from training import said_by

import braid
from braid import FullyShardedDataParallel
from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.data_parallel import DistributedDataParallel, MixedPrecision
from braid.parallel.data_parallel.ddp.reference import accumulate
from braid.parallel.gradients.exact_norm import clip_pieces_
from braid.parallel.sharding import (
    Bytes,
    CPUOffloadPolicy,
    DiskOffloadPolicy,
    MixedPrecisionPolicy,
    Sharding,
    ShardingOptions,
    attach,
    fully_shard,
    live_bytes,
    shard_optimizer,
)

ADAMW = OPTIMIZERS["adamw"][0]


def train(model: Any, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[float]:
    norms = []
    for step in steps:
        loss_of(model, rank, step).backward()
        norms.append(model.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def _wrapped(group: Group, base: Model, options: dict[str, Any]) -> Any:
    model = FullyShardedDataParallel(copy.deepcopy(base), group, **options)
    optimizer = ADAMW(model.parameters())
    norms = train(model, optimizer, group.rank, range(3))
    return {n: v.clone() for n, v in model.state_dict().items() if n != "steps"}, norms


@pytest.mark.parametrize("reshard", [None, True, False])
def test_the_wrapper_has_the_bits_of_one_process(world, reshard):
    base = Model()
    expected, norms = reference(base, 2, ADAMW)
    expected["head.weight"] = expected["embed.weight"]
    for found, own in world(2, _wrapped, base, {"reshard_after_forward": reshard}):
        assert differing(found, expected) == []
        assert own == norms


def _in_calls(group: Group, base: Model) -> Any:
    model = copy.deepcopy(base)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, process_group=group)
    optimizer = ADAMW(model.parameters())  # before anything is divided
    norms = train(model, optimizer, group.rank, range(3))
    assert [unit.name for unit in model.sharding.units[1:]] == [f"blocks.{i}" for i in range(4)]
    assert isinstance(model, Model)
    assert "call the method of the root model" in said_by(lambda: model.blocks[0].sharding)
    with model.gathered():
        return values(model), norms


def test_fully_shard_has_the_bits_of_one_process(world):
    base = Model()
    expected, norms = reference(base, 2, ADAMW)
    for found, own in world(2, _in_calls, base):
        assert differing(found, expected) == []
        assert own == norms


def _zero(group: Group, base: Model, stage: int) -> Any:
    model = copy.deepcopy(base)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)
    engine = shard_optimizer(optimizer, model, stage=stage, process_group=group)
    assert engine.options.whole
    for step in range(3):
        loss_of(model, group.rank, step).backward()
        engine.clip_grad_norm_(0.5)
        optimizer.step()
        engine.zero_grad()
    engine.undo()
    assert not any(hasattr(m, "braid_sharding") for m in model.modules())
    model(torch.zeros(1, 2, dtype=torch.long))  # an ordinary model again
    return values(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimizer_is_sharded_by_its_rule_and_undone(world, stage):
    base = Model()
    expected, _ = reference(base, 2, lambda p: torch.optim.Adafactor(p, lr=0.01))
    for found in world(2, _zero, base, stage):
        assert differing(found, expected) == []


def _hybrid(group: Group, base: Model, stage: int) -> Any:
    mesh = braid.mesh("replica=2,shard=2", group)
    model = copy.deepcopy(base)
    if stage == 3:
        wrapped = FullyShardedDataParallel(model, mesh=mesh)
        train(wrapped, ADAMW(wrapped.parameters()), group.rank, range(2))
        return wrapped.state_dict()["embed.weight"]
    optimizer = ADAMW(model.parameters())
    engine = Sharding(model, mesh["shard"], ShardingOptions(stage=stage), replicas=mesh["replica"])
    attach(engine, optimizer)
    for step in range(2):
        loss_of(model, group.rank, step).backward()
        engine.clip_grad_norm_(0.5)
        optimizer.step()
        engine.zero_grad()
    return model.embed.weight.detach().clone()


@pytest.mark.parametrize("stage", [1, 3])
def test_replicas_of_shards_agree_and_come_close_to_one_process(world, stage):
    """Sums inside of each replica come first, so the order of sums is another one."""
    base = Model()
    expected, _ = reference(base, 4, ADAMW, steps=2)
    found = world(4, _hybrid, base, stage)
    assert all(torch.equal(found[0], other) for other in found)
    torch.testing.assert_close(found[0], expected["embed.weight"], rtol=1e-4, atol=1e-5)


def _accumulated(group: Group, base: Model, stage: int) -> Any:
    model = copy.deepcopy(base)
    engine = Sharding(model, group, ShardingOptions(stage=stage))
    optimizer = (
        ADAMW(model.parameters() if stage == 3 else []) if stage == 3 else ADAMW(base.parameters())
    )
    optimizer = ADAMW(owned for _, owned in engine.owned())
    attach(engine, optimizer)
    for step in range(0, 4, 2):
        with engine.no_sync():
            loss_of(model, group.rank, step).backward()
        assert engine.pieces() == []
        loss_of(model, group.rank, step + 1).backward()
        optimizer.step()
        engine.zero_grad()
    with engine.gathered():
        whole = values(model)
    engine.zero_grad()
    for step in (5, 6):  # averaged twice, added
        loss_of(model, group.rank, step).backward()
    twice = [piece.clone() for piece in engine.pieces()]
    engine.zero_grad()
    for step in (5, 6):
        loss_of(model, group.rank, step).backward()
        own = [piece.clone() for piece in engine.pieces()]
        engine.zero_grad()
        twice = [a - b for a, b in zip(twice, own, strict=True)]
    return whole, max(float(piece.abs().max()) for piece in twice if piece.numel())


def one_number() -> nn.Module:
    model = nn.utils.skip_init(nn.Linear, 1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def _many_ones(group: Group, stage: int) -> list[float]:
    """The sum of 512 gradients of 1, of which 511 stay local, twice."""
    model = one_number()
    dtypes: dict[str, Any] = {"reduce_dtype": torch.float32, "master_dtype": torch.float32}
    if stage == 3:
        dtypes["param_dtype"] = torch.bfloat16
    else:
        model.bfloat16()
    engine = Sharding(model, group, ShardingOptions(stage=stage, **dtypes))
    ones = torch.ones(1, 1, dtype=torch.bfloat16)
    sums = []
    for _ in range(2):
        with engine.no_sync():
            for _ in range(511):
                model(ones).sum().backward()
        model(ones).sum().backward()
        sums += [piece.item() for piece in engine.pieces() if piece.numel()]
        engine.zero_grad()
    return sums


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_accumulates_locally_has_the_dtype_of_sums_over_ranks(world, stage):
    sums = [x for own in world(2, _many_ones, stage) for x in own]
    assert sums == [512.0, 512.0]


def _many_ones_of_ddp(group: Group) -> float:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = DistributedDataParallel(one_number(), process_group=group, mixed_precision=precision)
    with model.no_sync():
        for _ in range(511):
            model(torch.ones(1, 1)).sum().backward()
    model(torch.ones(1, 1)).sum().backward()
    return model.module.weight.grad.item()


def test_data_parallel_training_in_mixed_precision_accumulates_in_32_bits(world):
    assert world(2, _many_ones_of_ddp) == [512.0, 512.0]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accumulated_gradients_are_averaged_once(world, stage):
    base = Model()
    expected = copy.deepcopy(base)
    optimizer = ADAMW(expected.parameters())
    for step in range(0, 4, 2):

        def both(rank: int, step: int = step) -> torch.Tensor:
            loss_of(expected, rank, step).backward()
            return loss_of(expected, rank, step + 1)

        accumulate(expected, [partial(both, rank) for rank in range(2)])
        optimizer.step()
        optimizer.zero_grad()
    for found, rest in world(2, _accumulated, base, stage):
        assert differing(found, values(expected)) == []
        assert rest < 1e-6


def _mixed(group: Group, base: Model) -> Any:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    model = FullyShardedDataParallel(copy.deepcopy(base), group, mp_policy=policy)
    optimizer = ADAMW(model.parameters())
    out = model(torch.zeros(1, 2, dtype=torch.long))
    assert out.dtype == torch.float32
    losses = []
    for _ in range(8):
        loss = loss_of(model, group.rank, 0)
        loss.backward()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = model.state_dict()
    assert state["embed.weight"].dtype == torch.float32
    rounded = state["embed.weight"].bfloat16().float()
    assert not torch.equal(state["embed.weight"], rounded)  # numbers that bfloat16 does not have
    return losses


def test_parameters_compute_in_another_dtype_than_the_optimizer(world):
    for losses in world(2, _mixed, Model()):
        assert losses[-1] < losses[0] - 0.3


def _masters(group: Group, base: Model, stage: int) -> Any:
    model = copy.deepcopy(base)
    options = ShardingOptions(stage=stage, master_dtype=torch.float32)
    engine = Sharding(model, group, options)
    optimizer = torch.optim.SGD((owned for _, owned in engine.owned()), lr=1e-4)
    attach(engine, optimizer)
    for _ in range(20):  # steps too small for bfloat16
        loss_of(model, 0, 0).backward()
        optimizer.step()
        engine.zero_grad()
    moved = sum(float((o.detach() - o.detach().bfloat16()).abs().sum()) for _, o in engine.owned())
    assert moved > 0
    with engine.gathered():
        return values(model)


def test_masters_in_float32_collect_small_steps(world):
    base = Model(dtype=torch.bfloat16)
    by_stage = [world(2, _masters, base, stage) for stage in (1, 2, 3)]
    assert {value.dtype for value in by_stage[0][0].values()} == {torch.bfloat16}
    for found in [ranks for stage in by_stage for ranks in stage]:
        assert differing(found, by_stage[0][0]) == []


def _offloaded(group: Group, base: Model, policy: Any) -> Any:
    model = FullyShardedDataParallel(copy.deepcopy(base), group, offload_policy=policy)
    optimizer = ADAMW(model.parameters())
    attach(model.sharding, optimizer)
    train(model, optimizer, group.rank, range(3))
    disk = model.sharding.disk
    nbytes = 0 if disk is None else disk.nbytes
    found = model.state_dict()
    if disk is not None:
        disk.close()
    return {name: found[name] for name in values(base)}, nbytes


@pytest.mark.parametrize("where", ["disk", "host"])
def test_states_elsewhere_have_the_same_bits(world, where, tmp_path):
    base = Model()
    expected, _ = reference(base, 2, ADAMW)
    policy = DiskOffloadPolicy(directory=tmp_path) if where == "disk" else CPUOffloadPolicy()
    for found, nbytes in world(2, _offloaded, base, policy):
        assert differing(found, expected) == []
        assert (nbytes > 0) == (where == "disk")
    assert list(tmp_path.iterdir()) == []


NUM_LAYERS = 48


class Deep(nn.Module):
    """Equal layers, so that one or two whole ones weigh little."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.utils.skip_init(nn.Linear, 64, 48, bias=False) for _ in range(NUM_LAYERS)
        )
        for layer in self.layers:
            nn.init.eye_(layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.pad(torch.tanh(layer(x)), (0, 16))
        return x


def _lives(group: Group, stage: int, mixed: bool) -> Any:
    model = Deep()
    masters = torch.float32 if mixed else None
    model.to(torch.bfloat16 if mixed else torch.float32)
    options = ShardingOptions(stage=stage, master_dtype=masters, reshard_after_forward=True)
    engine = Sharding(model, group, options)
    optimizer = torch.optim.Adam(owned for _, owned in engine.owned())
    attach(engine, optimizer)
    peak = 0

    def look(*_args: Any) -> None:
        nonlocal peak
        peak = max(peak, live_bytes(engine, optimizer).total)

    for layer in model.layers:
        layer.register_full_backward_hook(look)
        layer.register_forward_hook(look)
    x = torch.ones(2, 64, dtype=torch.bfloat16 if mixed else torch.float32)
    for _ in range(2):
        sent = group.statistics()["nbytes"]
        model(x.requires_grad_()).sum().backward()
        look()
        optimizer.step()
        look()
        sent = group.statistics()["nbytes"] - sent
        engine.zero_grad()
    return peak, sent


@pytest.mark.parametrize(
    ("stage", "size", "mixed"),
    [(1, 2, False), (2, 2, False), (3, 2, False), (1, 3, True), (2, 3, True), (3, 3, True)],
)
def test_bytes_held_and_sent_are_those_of_the_formulas(world, stage, size, mixed):
    numel = NUM_LAYERS * 48 * 64  # 48 rows of 64 are cut evenly by 2 and 3
    each = Bytes(2, 2, 4, 12) if mixed else Bytes(4, 4, 0, 8)
    if mixed and stage != 1:  # gradients are kept in the dtype of the masters only
        each = Bytes(2, 4, 0, 12)
    flags = NUM_LAYERS + size  # bytes: which parameters have gradients, which ranks go on
    for peak, sent in world(size, _lives, stage, mixed):
        assert sent == {1: 2, 2: 2, 3: 3}[stage] * numel * (2 if mixed else 4) + flags
        assert peak == pytest.approx(each.live(stage, size) * numel, rel=0.1)


def _refusals(group: Group) -> list[str]:
    model = Model()

    def wrap(module: nn.Module, **options: Any) -> Any:
        return lambda: FullyShardedDataParallel(module, group, **options)

    twice = Model()
    FullyShardedDataParallel(twice, group)
    strided = nn.Linear(4, 4) if False else nn.utils.skip_init(nn.Linear, 4, 3)
    strided.weight.data = torch.zeros(4, 3).t()
    integers = nn.utils.skip_init(nn.Linear, 4, 3)
    integers.bias = nn.Parameter(torch.zeros(3, dtype=torch.int32), requires_grad=False)
    lbfgs = torch.optim.LBFGS(model.parameters())
    strange = torch.optim.SGD([torch.zeros(2, requires_grad=True)])
    engine = Sharding(Model(), group)
    muon = torch.optim.Adafactor(engine.model.parameters())
    calls = [
        wrap(twice),
        wrap(twice.blocks[0]),
        wrap(nn.Sequential(twice)),
        wrap(nn.ReLU()),
        wrap(Model().requires_grad_(False)),
        wrap(nn.utils.skip_init(nn.Linear, 4, 3, device="meta")),
        wrap(strided),
        wrap(integers),
        wrap(nn.utils.skip_init(nn.Embedding, 4, 3, sparse=True)),
        wrap(nn.LazyLinear(3)),
        wrap(model, units=[nn.ReLU()]),
        wrap(model, shard_placement_fn=id),
        wrap(model, mp_policy="bf16"),
        wrap(model, offload_policy="cpu"),
        wrap(model, mesh=group),
        wrap(model, mp_policy=MixedPrecisionPolicy(torch.int8)),
        lambda: FullyShardedDataParallel(model, mesh="dp=2"),
        lambda: FullyShardedDataParallel(model, mesh=braid.mesh("a=1,b=1,c=2", group)),
        lambda: FullyShardedDataParallel(model),
        lambda: shard_optimizer(lbfgs, model, process_group=group),
        lambda: shard_optimizer(lbfgs, model, process_group=group, whole=True),
        lambda: attach(engine, strange),
        lambda: attach(engine, muon),
        lambda: ShardingOptions(stage=4),
        lambda: ShardingOptions(stage=2, param_dtype=torch.bfloat16),
        DiskOffloadPolicy,
    ]
    return [said_by(call) for call in calls]


EXPECTED = [
    "Model is already sharded: shard a model only once",
    "is already sharded",
    "is already sharded",
    "none of the 0 parameters requires a gradient",
    "none of the 44 parameters requires a gradient"[:12],
    "on the device meta",
    "weight are not contiguous",
    "bias are not floating-point numbers",
    "pass sparse=False",
    "have no shape yet",
    "are not modules of Model",
    "shard_placement_fn is not supported",
    "mp_policy must be a MixedPrecisionPolicy",
    "offload_policy must be a CPUOffloadPolicy",
    "process_group and mesh were both passed",
    "param_dtype must be a floating-point dtype",
    "mesh must be a mesh of braid",
    "has 3 axes",
    "process_group must be a braid Group",
    "LBFGS cannot be sharded",
    "LBFGS cannot be sharded",
    "1 parameters that are not the model's",
    "Adafactor needs whole parameters",
    "stage must be 1, 2 or 3",
    "param_dtype=torch.bfloat16 needs stage 3",
    "needs a directory",
]


def test_mistakes_are_named(world):
    for said in world(2, _refusals):
        assert len(said) == len(EXPECTED)
        for text, part in zip(said, EXPECTED, strict=True):
            assert text.startswith("ConfigError: ")
            assert part in text


class Strange(torch.optim.SGD):
    """An optimizer that nobody knows."""


def test_an_unknown_optimizer_gets_whole_parameters_with_a_warning(world):
    def main(group: Group) -> bool:
        model = Model()
        optimizer = Strange(model.parameters(), lr=0.1)
        return shard_optimizer(optimizer, model, process_group=group).options.whole

    with pytest.warns(UserWarning, match="Strange may not update each element independently"):
        assert world(1, main) == [True]
    with pytest.raises(ConfigError):
        fully_shard(fully_shard(Model()))
    assert clip_pieces_([], 1.0) == 0


class LARS(torch.optim.SGD):
    """A rule that is known, by its name, to look at norms."""


def _wrong_steps(group: Group) -> list[str]:
    def step(kind: Any, **options: Any) -> None:
        model = FullyShardedDataParallel(Model(), group, **options)
        optimizer = kind(model.parameters(), lr=0.1)
        loss = loss_of(model, group.rank, 0)
        loss.backward()
        optimizer.step(lambda: loss)

    def second() -> None:
        params = list((model := Model()).parameters())
        first = torch.optim.SGD(params[:2], lr=0.1)
        shard_optimizer(first, model, process_group=group)
        loss_of(model, group.rank, 0).backward()
        first.step()
        torch.optim.SGD(params[2:], lr=0.1).step()

    step(LARS, whole_parameters=True)
    return [
        said_by(lambda: step(torch.optim.LBFGS)),
        said_by(lambda: step(torch.optim.LBFGS, whole_parameters=True)),
        said_by(lambda: step(LARS)),
        said_by(second),
    ]


def test_a_step_of_an_optimizer_that_cannot_use_pieces_fails(world):
    for said in world(2, _wrong_steps):
        expected = ["LBFGS takes", "LBFGS takes", "LARS uses", "SGD has parameters"]
        for text, part in zip(said, expected, strict=True):
            assert text.startswith(f"ConfigError: {part}")


def test_two_optimizers_of_one_model_train_as_in_one_process(world):
    def main(group: Group) -> list[torch.Tensor]:
        params = list((model := Model()).parameters())
        halves = [torch.optim.AdamW(params[:3]), torch.optim.SGD(params[3:], lr=0.1)]
        engine = shard_optimizer(halves[0], model, process_group=group)
        attach(engine, halves[1])
        for step in range(3):
            loss_of(model, group.rank, step).backward()
            for half in halves:
                half.step()
            engine.zero_grad()
        return [p.detach().clone() for p in params]

    params = list((model := Model()).parameters())
    halves = [torch.optim.AdamW(params[:3]), torch.optim.SGD(params[3:], lr=0.1)]
    for step in range(3):
        accumulate(model, [partial(loss_of, model, rank, step) for rank in range(2)])
        for half in halves:
            half.step()
            half.zero_grad()
    for values_of_rank in world(2, main):
        for x, y in zip(values_of_rank, params, strict=True):
            torch.testing.assert_close(x, y)


def _states(group: Group) -> tuple[bool, str, bool]:
    model = nn.Sequential(nn.utils.skip_init(nn.Linear, 6, 6))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fully_shard(model[0], process_group=group)
    fully_shard(model, process_group=group)
    before = model.state_dict().keys() == whole.keys()
    model(torch.ones(2, 6)).sum().backward()
    text = said_by(model.state_dict, ConfigError)
    state = model.full_state_dict()
    return before, text, all(torch.equal(state[name], whole[name]) for name in whole)


def test_pieces_do_not_pass_for_the_whole_state(world):
    for before, text, same in world(2, _states):
        assert before
        assert "call full_state_dict() on all ranks, or braid.save" in text
        assert same
