"""Models and calls that a pipeline once got wrong, or left others waiting with."""

from __future__ import annotations

import copy
import gc
import pickle
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from training import linear, said_by

import braid
from braid.comm import Group
from braid.errors import CommError, ConfigError, PeerLostError
from braid.parallel.hybrid import HybridParallel
from braid.parallel.pipeline import DevicePipeline, Pipeline
from braid.parallel.pipeline.skip import pop, skippable, stash
from braid.parallel.tensor_parallel import parallelize
from braid.programs.schedule.pipeline import StageWork, gpipe, looped, pipeline_program

WIDTH = 4
mse = functional.mse_loss


def batch_of(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, WIDTH, generator=generator)
    return x, torch.randn(rows, WIDTH, generator=generator)


def make(group: Group, layers: Any, **options: Any) -> Pipeline:
    return Pipeline(layers, **{"num_microbatches": 2, "group": group} | options)


def _repeated(group: Group) -> tuple[float, float, tuple[int, ...]]:
    act, twice = nn.Tanh(), linear(WIDTH, WIDTH)
    model = nn.Sequential(twice, act, linear(WIDTH, WIDTH), act, twice)
    pipeline = make(group, model)
    return (
        pipeline.evaluate(*batch_of(), loss=mse).item(),
        mse(model(batch_of()[0]), batch_of()[1]).item(),
        pipeline.balance,
    )


def test_a_layer_that_comes_twice_runs_twice(world):
    for loss, expected, balance in world(2, _repeated):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert sum(balance) == 5
    act = nn.Tanh()
    row = nn.Sequential(linear(WIDTH, WIDTH), act, linear(WIDTH, WIDTH), act)
    device = DevicePipeline(row, ["cpu"] * 2, balance=[2, 2], num_microbatches=2)
    torch.testing.assert_close(device(batch_of()[0]), row(batch_of()[0]))


class Residual(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Mask(nn.Module):
    def forward(self, value: Any) -> Any:
        x, n = value
        n += 1
        return x * n


class Counts(nn.Module):
    """Reads a buffer, and replaces it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear(WIDTH, WIDTH)
        self.register_buffer("n", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.n
        self.n = self.n + 1
        return self.linear(x).tanh() * scale


def _grads(group: Group, recompute: str | int) -> dict[str, torch.Tensor]:
    layers = [Counts(), nn.ReLU(inplace=True), Counts(), nn.Identity(), nn.ReLU(inplace=True)]
    pipeline = make(group, layers, recompute=recompute, schedule="gpipe", num_microbatches=4)
    pipeline.step(*batch_of(), loss=mse)
    return {name: p.grad for name, p in pipeline.named_parameters()} | {
        name: buffer.clone() for name, buffer in pipeline.named_buffers()
    }


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("recompute", ["always", "except_last", 1, 2])
def test_recomputation_sees_the_buffers_of_its_micro_batch(world, size, recompute):
    plain = {k: v for own in world(size, _grads, "never") for k, v in own.items()}
    again = {k: v for own in world(size, _grads, recompute) for k, v in own.items()}
    assert plain.keys() == again.keys()
    for name, value in plain.items():
        assert torch.equal(value, again[name]), name


def _masked(group: Group) -> str:
    pipeline = make(group, [Mask(), linear(WIDTH, WIDTH)], recompute="always")
    x, target = batch_of()
    given = (x, torch.zeros(8, 1, dtype=torch.int64))
    return said_by(lambda: pipeline.step(given, target, loss=mse), ConfigError)


def test_an_input_that_is_changed_in_place_cannot_be_recomputed(world):
    assert (
        "stage 0 changes its input in place, so its forward cannot be recomputed"
        in world(1, _masked)[0]
    )


@skippable(stash=["s"])
class Stashes(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        yield stash("s", x)
        return x * 2


@skippable(pop=["s"])
class Pops(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        s = yield pop("s")
        return x + s


def swapped(num_ranks: int, num_microbatches: int) -> Any:
    """GPipe whose forwards run last micro-batch first, except in the first stage."""
    order = list(range(num_microbatches))
    work = [
        [StageWork("F", rank, i) for i in (order if not rank else reversed(order))]
        + [StageWork("B", rank, i) for i in order]
        for rank in range(num_ranks)
    ]
    return pipeline_program("swapped", work, looped(num_ranks), num_microbatches)


def _skips(group: Group, schedule: Any) -> float:
    layers = [linear(WIDTH, WIDTH), Stashes(), linear(WIDTH, WIDTH), Pops(), linear(WIDTH, WIDTH)]
    pipeline = make(group, layers, schedule=schedule, balance=[2, 1, 2])
    return pipeline.step(*batch_of(), loss=mse).item()


def test_what_is_stashed_belongs_to_its_micro_batch_in_any_order(world):
    assert world(3, _skips, swapped) == pytest.approx(world(3, _skips, "gpipe"), rel=1e-6)


def _hooks(group: Group, schedule: str) -> int:
    layers = [linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)]
    pipeline = make(group, layers, schedule=schedule)
    calls: list[torch.Tensor] = []
    for param in pipeline.parameters():
        param.register_post_accumulate_grad_hook(calls.append)
    pipeline.step(*batch_of(), loss=mse)
    return len(calls)


def test_hooks_after_accumulation_run_under_every_schedule(world):
    assert world(2, _hooks, "1f1b") == world(2, _hooks, "zb_h1") == [4, 4]


def _wrong_calls(group: Group) -> list[str]:
    def step(loss: Any = mse, target: Any = None, **options: Any) -> str:
        fresh = group.split(0)
        pipeline = make(fresh, [linear(WIDTH, WIDTH), nn.Tanh()], **options)
        x, own = batch_of()
        target = own if target is None else target
        return said_by(lambda: pipeline.step(x, target, loss=loss), (ConfigError, CommError))

    def broken(ranks: int, microbatches: int) -> Any:
        program = gpipe(ranks, microbatches)
        return program._replace(ranks=(program.ranks[0], program.ranks[1][:-1]))

    return [
        step(lambda o, t: (o - t).square().mean(1)),
        step(lambda _o, _t: None),
        step(target=torch.zeros(3, WIDTH)),
        said_by(lambda: make(group, [nn.Tanh(), nn.Tanh()], schedule=broken), ConfigError),
        said_by(lambda: make(group, Residual(nn.Tanh(), nn.Tanh())), ConfigError),
        said_by(
            lambda: make(group, nn.Sequential(OrderedDict(stages=nn.Tanh(), step=nn.Tanh()))),
            ConfigError,
        ),
    ]


def test_wrong_losses_targets_schedules_and_models_are_errors_on_all_ranks(world):
    first, last = world(2, _wrong_calls)
    for texts in (first, last):
        assert (
            "must return one floating point number, the mean over the micro-batch, got a tensor of shape [4]"
            in texts[0]
        )
        assert "the mean over the micro-batch, got NoneType" in texts[1]
        assert "the target has 3 rows, but the batch has 8" in texts[2]
        assert "the schedule is not valid" in texts[3]
        assert "Residual is not an nn.Sequential or a list of modules" in texts[4]
        assert "layers cannot have the names stages, step" in texts[5]


class Fails(nn.Module):
    def forward(self, _x: torch.Tensor) -> torch.Tensor:
        raise KeyError("shard")


def _replica_fails(group: Group) -> tuple[str, float]:
    replica, stage = group.rank % 2, group.rank // 2
    layers = [linear(WIDTH, WIDTH), Fails() if group.rank == 3 else nn.Tanh()]
    pipeline = make(group.split(replica), layers, replicas=group.split(stage))
    began = time.monotonic()
    said = said_by(
        lambda: pipeline.step(*batch_of(), loss=mse), (KeyError, CommError, PeerLostError)
    )
    seconds = time.monotonic() - began
    time.sleep(1.0)  # it is told by the failure, and not by ranks that end
    return said, seconds


@pytest.mark.procs
def test_a_failure_is_named_in_the_other_replicas_too(procs):
    ranks = procs(4, _replica_fails)
    assert all(seconds < 1.0 for _, seconds in ranks)
    for said, _ in ranks[:3]:
        assert "rank 3 failed in layer 1 (Fails), F of stage 1 in micro-batch 0: KeyError" in said


def _no_batch(group: Group) -> list[str]:
    said = []
    for call in ("evaluate", "predict"):
        pipeline = make(group.split(0), [linear(WIDTH, WIDTH), nn.Tanh()])
        batch, target = batch_of() if group.rank else ("nothing", None)
        run = partial(pipeline.predict, batch)
        if call == "evaluate":
            run = partial(pipeline.evaluate, batch, target, loss=mse)
        said.append(said_by(run, (ConfigError, CommError)))
        group.barrier()  # no rank has ended
    return said


def test_a_batch_that_one_rank_cannot_read_is_an_error_on_all_ranks(world):
    first, second = world(2, _no_batch)
    for text, here, call in zip(second, first, ("an evaluation", "a prediction"), strict=True):
        assert f"rank 0 failed in {call}: {here}" in text


def _saves(group: Group, directory: str) -> list[str]:
    pipeline = make(group, [linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)])
    divided = nn.Sequential(OrderedDict(up=linear(WIDTH, WIDTH), down=linear(WIDTH, WIDTH)))
    parallelize(divided, group, {"up": "column", "down": "row"})
    return [
        said_by(partial(braid.save, directory, model=model, step=0, group=group), ConfigError)
        for model in (pipeline, divided)
    ]


def test_parts_of_a_model_are_not_saved_as_the_whole(world, tmp_path):
    for pipeline, divided in world(2, _saves, str(tmp_path)):
        assert "a Pipeline has different layers on each rank" in pipeline
        assert "the model is sharded over ranks" in divided
    assert list(tmp_path.iterdir()) == []


def _other_lengths(group: Group) -> str:
    pipeline = make(group, [linear(WIDTH, WIDTH), nn.Tanh()])
    x, target = batch_of(8 if group.rank == 0 else 2)
    return said_by(lambda: pipeline.step(x, target, loss=mse), ConfigError)


def test_batches_of_other_lengths_are_refused_on_all_ranks(world):
    for said in world(2, _other_lengths):
        assert "ranks of a pipeline got batches of different sizes, [8, 2] rows by rank" in said


def _infers(group: Group) -> float:
    pipeline = make(group, [linear(WIDTH, WIDTH), nn.Tanh()])
    with torch.inference_mode():
        return pipeline.evaluate(*batch_of(), loss=mse).item()


def test_evaluation_in_inference_mode(world):
    first, second = world(2, _infers)
    assert first == second > 0


class Leaves(nn.Module):
    def forward(self, _x: torch.Tensor) -> torch.Tensor:
        raise SystemExit(3)


def test_an_exit_in_a_thread_of_a_device_ends_the_others():
    pipeline = DevicePipeline(
        nn.Sequential(nn.Tanh(), Leaves(), nn.Tanh()), ["cpu"] * 3, balance=[1, 1, 1]
    )
    with pytest.raises(SystemExit):
        pipeline(batch_of()[0])
    del pipeline
    gc.collect()  # ends its threads


def _warned(call: Callable[[], object]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return "\n".join(str(w.message) for w in caught)


def _stepped(group: Group, frozen: bool = False) -> tuple[HybridParallel, nn.Module, nn.Module]:
    model = nn.Sequential(*(linear(WIDTH, WIDTH) for _ in range(4)))
    for layer in (model[0], model[2]):
        layer.requires_grad_(not frozen)
    hybrid = HybridParallel(model, "pp=2", group, num_microbatches=2)
    average = copy.deepcopy(model)
    assert not _warned(lambda: model(batch_of()[0]))
    hybrid.step(*batch_of(), loss=mse)
    return hybrid, model, average


def _old_layers(group: Group) -> list[str]:
    x, _ = batch_of()
    hybrid, model, _ = _stepped(group)
    said = [_warned(lambda: model(x)), _warned(lambda: model(x))]  # once
    _, _, average = _stepped(group)
    said.append(_warned(lambda: average(x)))
    _, other, _ = _stepped(group)
    said.append(_warned(other.state_dict))
    said.append(_warned(lambda: other[2 * group.rank](x)))  # of this rank
    _, frozen, _ = _stepped(group, frozen=True)
    said.append(_warned(lambda: frozen[2 * (1 - group.rank)](x)))
    hybrid, model, average = _stepped(group)
    hybrid.make_whole()
    said += [_warned(lambda: model(x)), _warned(lambda: average(x)), _warned(model.state_dict)]
    pickle.dumps(model)
    _, model, _ = _stepped(group)
    take = partial(Pipeline, list(model), num_microbatches=1, group=group)
    same = _warned(partial(take, balance=[2, 2]))
    said.append(_warned(lambda: model(x)))
    _, model, _ = _stepped(group)
    take = partial(Pipeline, list(model), num_microbatches=1, group=group)
    shifted = [_warned(partial(take, balance=[1, 3])), _warned(partial(take, balance=[1, 3]))]
    return [*said, same, *shifted]


def test_layers_that_other_ranks_have_trained_warn_of_old_values(procs):
    ranks = procs(2, _old_layers)
    assert [rank[-2].startswith("a second pipeline of") for rank in ranks] == [False, True]
    for called, again, copied, state, *others in [[*rank[:-2], rank[-1]] for rank in ranks]:
        for text, use in ((called, "a call"), (copied, "a call"), (state, "state_dict()")):
            assert text.startswith(f"{use} of a model on pipeline stages uses old values")
        assert not again
        assert not any(others)


def _penalties(group: Group) -> list[int]:
    model = nn.Sequential(*(linear(WIDTH, WIDTH) for _ in range(4)))
    counts = []
    for num_penalized in (0, 1, 2):
        pipeline = make(group, model)
        params = [p for p in pipeline.parameters() if p.dim() > 1][:num_penalized]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pipeline.step(
                *batch_of(),
                loss=lambda y, t, ps=params: mse(y, t) + sum(p.square().sum() for p in ps),
            )
        counts.append(sum("like a penalty on weights" in str(w.message) for w in caught))
    return counts


def test_a_penalty_on_the_weights_of_the_last_stage_alone_is_a_warning(procs):
    assert procs(2, _penalties) == [[0, 0, 0], [0, 0, 1]]
