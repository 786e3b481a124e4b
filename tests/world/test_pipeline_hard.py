"""Pipelines of a model that has everything: dropout, BatchNorm, skip connections, shared weights."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from training import linear, said_by

from braid.comm import Group
from braid.errors import CommError, ConfigError, PeerLostError
from braid.parallel.pipeline import Pipeline, Stage
from braid.parallel.pipeline.microbatches import scatter, sizes_of
from braid.parallel.pipeline.skip import Namespace, SkipError, Skippable, pop, skippable, stash
from braid.parallel.pipeline.stage import Layer
from braid.programs.schedule import from_text, to_text, validate
from braid.programs.schedule.known import RULES, VOCABULARIES
from braid.programs.schedule.pipeline import SCHEDULES, with_steps
from braid.runtime.seeding import Draws
from support.pool import RankDiedError
from support.worlds import run_threads

TRAINING = [
    "gpipe", "1f1b", "breadth_first", "interleaved", "zb_h1", "zb_h2", "zbv", "v_half", "v_min",
]  # fmt: skip
SEED = 11
WIDTH = 4


class Block(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear = linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.3)
        with torch.no_grad():
            self.linear.weight.mul_(1 + index / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(torch.tanh(self.norm(self.linear(x)))) + x


@skippable(stash=["early"])
class Enters(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.block = Block(index)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.block(x)
        yield stash("early", x * 2)
        return x


@skippable(pop=["early"])
class Leaves(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.block = Block(index)

    def forward(self, x: torch.Tensor) -> Any:
        early = yield pop("early")
        return self.block(x) + early


def model() -> nn.Sequential:
    """Eight layers; two skip connections of one name, one of which spans stages."""
    inner, outer = Namespace(), Namespace()
    layers = nn.Sequential(
        Enters(0).isolate(outer),
        Block(1),
        Enters(2).isolate(inner),
        Leaves(3).isolate(inner),
        Block(4),
        Block(5),
        Leaves(6).isolate(outer),
        Block(7),
    )
    layers[7].linear.weight = layers[1].linear.weight
    return layers


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def batch_of(rows: int, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rows + step)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(
        rows, WIDTH, generator=generator
    )


def state_of(modules: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in modules.named_parameters() if p.grad is not None}
    return found | {name: b.clone() for name, b in modules.named_buffers()}


def reference(rows: int, num_microbatches: int) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients, buffers and loss of one process that runs the micro-batches in turn."""
    layers = model()
    x, target = batch_of(rows)
    sizes, total, begin = sizes_of(rows, num_microbatches), 0.0, 0
    for part, wanted, size in zip(scatter(x, sizes), scatter(target, sizes), sizes, strict=True):
        value, draws = part, Draws(SEED, 0, range(begin, begin + size))
        begin += size
        for name, layer in layers.named_children():
            with draws.layer(name):
                value = layer(value)
        loss = loss_of(value, wanted) * (size / rows)
        loss.backward()
        total += loss.item()
    return state_of(layers), total


def _train(
    group: Group, schedule: str, rows: int, num_microbatches: int, recompute: str | int
) -> tuple[dict[str, torch.Tensor], float]:
    pipeline = Pipeline(
        model(),
        num_microbatches=num_microbatches,
        schedule=schedule,
        group=group,
        recompute=recompute,
        seed=SEED,
    )
    loss = pipeline.step(*batch_of(rows), loss=loss_of).item()
    return state_of(pipeline), loss


def assert_equal_to_reference(
    ranks: list[tuple[dict[str, torch.Tensor], float]], rows: int, num_microbatches: int
) -> None:
    expected, loss = reference(rows, num_microbatches)
    shared = {"1.linear.weight", "7.linear.weight"}
    found: dict[str, torch.Tensor] = {}
    for state, own_loss in ranks:
        assert own_loss == pytest.approx(loss, rel=1e-6)
        found |= state
    assert found.keys() - shared == expected.keys() - shared
    for name, value in found.items():
        if name in shared:  # its gradients are added per rank first
            torch.testing.assert_close(value, expected["1.linear.weight"])
        else:
            assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("schedule", TRAINING)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_schedule_has_the_bits_of_one_process(world, schedule, size):
    assert_equal_to_reference(world(size, _train, schedule, 11, 4, "never"), 11, 4)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zbv"])
@pytest.mark.parametrize("recompute", ["always", "except_last", 1, 2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_recomputation_changes_no_bit_and_no_running_mean(world, schedule, recompute, size):
    assert_equal_to_reference(world(size, _train, schedule, 11, 4, recompute), 11, 4)


def test_a_forward_that_is_recomputed_keeps_its_input_only():
    layers = [Layer(str(i), nn.Sequential(nn.Linear(64, 64), nn.Tanh())) for i in range(4)]
    held = {}
    for drops in (False, True):
        stage, saved = Stage(0, layers), []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, saved=saved: saved.append(x.nbytes) or x, lambda x: x
        ):
            stage.forward(0, torch.randn(8, 64), keeps=True, drops=drops)
        held[drops] = len(saved)
        if drops:
            stage.recompute(0)
        stage.backward(0, {None: [torch.ones(8, 64)]})
        assert all(layer.module[0].weight.grad is not None for layer in layers)
    assert held[False] > 8
    assert held[True] == 0


def _train_replicas(group: Group, num_stages: int, schedule: str) -> Any:
    num_replicas = group.size // num_stages
    stage, replica = divmod(group.rank, num_replicas)
    pipeline = Pipeline(
        model(),
        num_microbatches=2,
        schedule=schedule,
        group=group.split(replica),
        replicas=group.split(stage),
        seed=SEED,
    )
    x, target = batch_of(12)
    begin, end = (0, 6) if replica == 0 else (6, 12)
    if num_replicas == 1:
        begin, end = 0, 12
    loss = pipeline.step(x[begin:end], target[begin:end], loss=loss_of).item()
    grads = {name: p.grad for name, p in pipeline.named_parameters()}
    norm = pipeline.clip_grad_norm_(1e9).item()
    return grads, loss, norm


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_replicas_train_as_one_process_on_all_samples(world, schedule, num_stages):
    expected, loss = reference(12, 4)
    whole = [g for name, g in expected.items() if name.endswith(("weight", "bias"))]
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in whole])).item()
    seen = set()
    for grads, own_loss, own_norm in world(2 * num_stages, _train_replicas, num_stages, schedule):
        assert own_loss == pytest.approx(loss, rel=1e-5)
        assert own_norm == pytest.approx(norm, rel=1e-5)
        for name, grad in grads.items():
            known = "1.linear.weight" if name == "7.linear.weight" else name
            torch.testing.assert_close(grad, expected[known])
            seen.add(known)
    assert seen == {name for name, _ in model().named_parameters()}


def _train_unequal_replicas(group: Group) -> tuple[torch.Tensor, torch.Tensor | None]:
    torch.manual_seed(0)
    layers = nn.Sequential(linear(WIDTH, WIDTH), nn.Identity(), linear(WIDTH, WIDTH))
    layers[2].bias.requires_grad_(False)
    pipeline = Pipeline(layers, num_microbatches=2, group=group.split(group.rank), replicas=group)
    x, target = batch_of(9)
    mine = slice(0, 2) if group.rank == 0 else slice(2, 9)
    for _ in range(2):
        pipeline.step(x[mine], target[mine], loss=loss_of)
    return pipeline.get_parameter("0.weight").grad, pipeline.get_parameter("2.bias").grad


@pytest.mark.procs
def test_replicas_of_unequal_batches_weigh_samples_alike_and_accumulate(procs):
    first, second = procs(2, _train_unequal_replicas)
    layers = nn.Sequential(linear(WIDTH, WIDTH), nn.Identity(), linear(WIDTH, WIDTH))
    x, target = batch_of(9)
    for _ in range(2):
        loss_of(layers(x), target).backward()
    assert torch.equal(first[0], second[0])
    assert first[1] is None
    torch.testing.assert_close(first[0], layers[0].weight.grad)


def _refusals(group: Group) -> list[str]:
    def make(layers: list[nn.Module], **options: Any) -> str:
        return said_by(
            lambda: Pipeline(layers, num_microbatches=2, group=group, **options),
            (ConfigError, TypeError),
        )

    blocks = [Block(i) for i in range(3)]
    return [
        make([Enters(0), *blocks]),
        make([*blocks, Leaves(0)]),
        make([Enters(0), Enters(1), Leaves(2), Leaves(3)]),
        make([Leaves(0), Enters(0), *blocks]),
        make(blocks, recompute="sometimes"),
        make(blocks, recompute=0),
    ]


def test_pairs_that_do_not_match_and_unknown_modes_are_refused(world):
    first, second = world(2, _refusals)
    assert first == second
    never, missing, twice, late, mode, zero = first
    assert "no module declared 'early' as poppable but stashed" in never
    assert "'3' declared 'early' as poppable but it was not stashed" in missing
    assert "'1' redeclared 'early' as stashable but not isolated by namespace" in twice
    assert "'3' redeclared 'early' as poppable but not isolated by namespace" in twice
    assert "'0' declared 'early' as poppable but it was not stashed" in late
    assert "recompute must be one of always, except_last, never" in mode
    assert "got 0" in zero


class Yields(nn.Module):
    def __init__(self, *commands: Any) -> None:
        super().__init__()
        self.commands = commands

    def forward(self, x: torch.Tensor) -> Any:
        yield from self.commands
        return x


@pytest.mark.parametrize(
    ("declared", "commands", "text"),
    [
        (((), ()), [stash("a", torch.ones(1))], "'a' has not been declared as stashable"),
        (((), ()), [pop("a")], "'a' has not been declared as poppable"),
        (((), ["a"]), [pop("a")], "'a' has not been stashed"),
        ((["a"], ["b"]), [], "'a' must be stashed but have not; 'b' must be popped but have not"),
        (((), ()), ["a"], "yields 'a': yield stash"),
    ],
)
def test_a_layer_that_does_not_keep_its_word_is_named(declared, commands, text):
    with pytest.raises(SkipError, match=text):
        Skippable(Yields(*commands), *declared)(torch.ones(1))


def test_a_layer_without_yields_and_unknown_names():
    layer = Skippable(nn.Identity(), (), ())
    assert layer(3) == 3
    with pytest.raises(ConfigError, match="unknown names b"):
        Enters(0).isolate(Namespace(), only=["b"])


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x) + y, y * 2


def wires() -> list[tuple[nn.Module, list[str], list[str]]]:
    return [
        (linear(WIDTH, WIDTH), ["x"], ["h"]),
        (Adds(), ["h", "x"], ["h", "doubled"]),
        (nn.Tanh(), ["h"], ["h"]),
        (Adds(), ["h", "doubled"], ["h", "rest"]),
    ]


def wired_loss(output: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return (output[0] + output[1] - target).square().mean()


def _train_wired(group: Group) -> dict[str, torch.Tensor]:
    pipeline = Pipeline(wires(), num_microbatches=2, group=group)
    x, target = batch_of(6)
    pipeline.step({"x": x}, target, loss=wired_loss)
    return {name: p.grad for name, p in pipeline.named_parameters()}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_modules_with_named_inputs_and_outputs_are_a_pipeline(world, size):
    first, second, tanh, last = (module for module, _, _ in wires())
    batch, wanted = batch_of(6)
    for x, target in zip(batch.split(3), wanted.split(3), strict=True):
        h, doubled = second(first(x), x)
        (wired_loss(last(tanh(h), doubled), target) / 2).backward()
    expected = {"0": first, "1.linear": second.linear, "3.linear": last.linear}
    found = {name: grad for grads in world(size, _train_wired) for name, grad in grads.items()}
    assert len(found) == 6
    for name, grad in found.items():
        layer, _, kind = name.rpartition(".")
        assert torch.equal(grad, getattr(expected[layer], kind).grad), name


def _refused_wires(group: Group) -> list[str]:
    def make(layers: list[Any]) -> str:
        return said_by(lambda: Pipeline(layers, num_microbatches=1, group=group), ConfigError)

    def step(batch: Any) -> str:
        layers = [
            (Adds(), ["x", "y"], ["a", "b", "c"]),
            (Adds(), ["a", "b"], ["d"]),
            (Adds(), ["c", "d"], ["e"]),
        ]
        own = group.split(0)  # a step that fails ends its group
        pipeline = Pipeline(layers, num_microbatches=1, group=own)
        return said_by(lambda: pipeline.step(batch, target, loss=wired_loss), ConfigError)

    x, target = batch_of(2)
    return [
        make([(nn.Identity(), "x", ["y"]), (nn.Identity(), ["y"], ["z"])]),
        make([(nn.Identity(), ["x"], ["y"]), (nn.Identity(), ["x"], ["z"])]),
        step(x),
        step({"x": x, "y": x}),
    ]


def test_wires_that_lead_nowhere_are_refused(world):
    (refused,) = world(1, _refused_wires)
    text, unused, batch, results = refused
    assert "layer 0 needs a list of input names and a list of output names" in text
    assert "output y of layer 0 is never used" in unused
    assert "the model needs the inputs x, y, by name or in this order, got Tensor" in batch
    assert "Adds returned 2 values, but its outputs are a, b, c" in results


def _deferred(group: Group) -> dict[str, torch.Tensor]:
    pipeline = Pipeline(
        nn.Sequential(linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), linear(WIDTH, WIDTH)),
        num_microbatches=3,
        group=group,
        deferred_batch_norm=True,
        recompute="always",
    )
    for step in range(2):
        pipeline.step(*batch_of(8, step), loss=loss_of)
    return dict(pipeline.state_dict())


def test_deferred_batch_norm_follows_whole_batches(world):
    plain = nn.Sequential(linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    for step in range(2):
        plain(batch_of(8, step)[0])
    state = {name: x for own in world(2, _deferred) for name, x in own.items()}
    torch.testing.assert_close(state["1.running_mean"], plain[1].running_mean)
    torch.testing.assert_close(state["1.running_var"], plain[1].running_var)
    assert state["1.num_batches_tracked"] == 2


class Reuses(nn.Module):
    """Returns the same memory for every micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(64, 8192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.memory.copy_(x)


def _reuse(group: Group) -> str:
    pipeline = Pipeline(
        [Reuses(), linear(8192, 1)],
        num_microbatches=4,
        schedule="gpipe",
        group=group,
    )
    x = torch.ones(256, 8192)
    return said_by(lambda: pipeline.evaluate(x, x[:, :1], loss=loss_of), (ConfigError, CommError))


def test_an_output_that_is_changed_while_it_is_sent_is_an_error_on_all_ranks(world):
    first, second = world(2, _reuse)
    assert "a tensor of shape [64, 8192] was changed in place before it was sent" in first
    assert "rank 0 failed in" in second
    assert "changed in place" in second


class Ends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.count == 2:
            os._exit(7)
        return x


def _end(group: Group) -> tuple[str, float]:
    layers = nn.Sequential(linear(WIDTH, WIDTH), Ends() if group.rank == 1 else nn.Identity())
    pipeline = Pipeline(layers, num_microbatches=4, group=group)
    began = time.monotonic()
    said = said_by(lambda: pipeline.step(*batch_of(8), loss=loss_of), PeerLostError)
    return said, time.monotonic() - began


@pytest.mark.procs
def test_a_rank_that_dies_in_mid_schedule_is_named_at_once(procs):
    with pytest.raises(RankDiedError) as caught:
        procs(2, _end)
    said, seconds = caught.value.__dict__["answers"][0].result
    assert "rank 1" in said
    assert seconds < 20  # it would be the deadline of a collective otherwise


PLANS = st.fixed_dictionaries(
    {
        "size": st.integers(1, 4),
        "schedule": st.sampled_from(TRAINING),
        "num_microbatches": st.integers(1, 6),
        "rows": st.lists(st.integers(6, 13), min_size=1, max_size=2),
        "recompute": st.sampled_from(["never", "always", "except_last", 1, 3]),
    }
)


@given(PLANS)
def test_any_plan_has_the_bits_of_one_process(plan):
    ranks = run_threads(plan["size"], _train_plan, plan)
    alone = {**plan, "schedule": "gpipe", "recompute": "never"}
    (expected,) = run_threads(1, _train_plan, alone)
    shared = {"1.linear.weight", "7.linear.weight"}
    for state in ranks:
        for name, value in state.items():
            if name not in shared:
                assert torch.equal(value, expected[name]), name


def _train_plan(group: Group, plan: dict[str, Any]) -> dict[str, torch.Tensor]:
    pipeline = Pipeline(
        model(),
        num_microbatches=plan["num_microbatches"],
        schedule=plan["schedule"],
        group=group,
        recompute=plan["recompute"],
        seed=SEED,
    )
    for step, rows in enumerate(plan["rows"]):
        pipeline.step(*batch_of(2 * rows, step), loss=loss_of)
    return state_of(pipeline)


def _step_in_program(group: Group, num_stages: int, schedule: str, *, in_program: bool) -> Any:
    replica = group.rank % (group.size // num_stages)
    pipeline = Pipeline(
        model(),
        num_microbatches=4,
        schedule=schedule,
        group=group.split(replica),
        replicas=group.split(group.rank // (group.size // num_stages)),
        seed=SEED,
    )
    make = partial(torch.optim.SGD, lr=0.01, momentum=0.5)
    optimizers = (
        pipeline.step_in_program(make) if in_program else [make(list(pipeline.parameters()))]
    )
    for step in range(3):
        pipeline.step(*batch_of(8, step), loss=loss_of)
        if in_program:
            assert all(p.grad is None for p in pipeline.parameters())
            assert "step_in_program cannot clip gradients" in said_by(
                lambda: pipeline.clip_grad_norm_(1.0), ConfigError
            )
        else:
            optimizers[0].step()
            optimizers[0].zero_grad()
    return dict(pipeline.named_parameters())


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "zb_h1"])
@pytest.mark.parametrize(("size", "num_stages"), [(2, 2), (2, 1), (4, 2)])
def test_steps_of_stages_inside_of_the_program_are_those_after_it(
    world, schedule, size, num_stages
):
    step = partial(_step_in_program, num_stages=num_stages, schedule=schedule)
    inside = world(size, partial(step, in_program=True))
    after = world(size, partial(step, in_program=False))
    for own, expected in zip(inside, after, strict=True):
        for name, param in own.items():
            assert torch.equal(param, expected[name]), name


def _predict(group: Group) -> torch.Tensor | None:
    pipeline = Pipeline(model(), num_microbatches=3, group=group)
    return pipeline.eval().predict(batch_of(7)[0])


def test_prediction_returns_the_whole_batch_on_the_last_rank(world):
    first, second = world(2, _predict)
    assert first is None
    torch.testing.assert_close(second, model().eval()(batch_of(7)[0]))


def test_programs_with_steps_are_valid_and_steps_come_last():
    for name in TRAINING:
        program = with_steps(SCHEDULES[name](3, 6))
        assert not validate(program, RULES)
        assert from_text(to_text(program), VOCABULARIES) == program
        steps = [a for own in program.ranks for a in own if a.kind == "STEP"]
        assert sorted(a.unit for a in steps) == list(range(program.header.num_units))
    early = from_text(
        "program pipeline mine train units 1 indices 2\nrank 0\nF0.0 B0.0 STEP0.0 F0.1 B0.1",
        VOCABULARIES,
    )
    assert "comes before the backward of micro-batch 1" in str(validate(early, RULES)[0])
