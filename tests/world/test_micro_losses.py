"""The loss of a batch that micro-batches and replicas share: weights, random numbers, and warnings."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from training import linear, said_by

from braid.comm import Group
from braid.errors import CommError, ConfigError
from braid.parallel.hybrid import HybridParallel
from braid.parallel.pipeline import Pipeline
from braid.programs.layout import Mesh
from braid.train.config import MODELS
from braid.train.gpt import GPT
from support.worlds import run_threads

ROWS, LENGTH, IGNORED = 8, 8, -100


def tokens(number: int) -> torch.Tensor:
    return torch.randint(256, (ROWS, LENGTH), generator=torch.Generator().manual_seed(number))


def padded(number: int) -> torch.Tensor:
    """Targets with padding: one row has none, one has only padding."""
    targets, lengths = tokens(number), torch.tensor([8, 0, 1, 5, 2, 8, 3, 7])
    targets[torch.arange(LENGTH) >= lengths[:, None]] = IGNORED
    return targets


def mean_of_tokens(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def num_tokens(target: torch.Tensor) -> torch.Tensor:
    return (target != IGNORED).sum()


def gpt() -> GPT:
    return GPT(MODELS["tiny"], LENGTH).double()


def _of_tokens(group: Group, mesh: str, shard: int, cuts: tuple[int, ...]) -> Any:
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    hybrid = HybridParallel(
        model, mesh, group, layers=model.layers(), num_microbatches=4, shard=shard
    )
    hybrid.attach(optimizer)
    mine = torch.arange(ROWS).tensor_split(cuts)[hybrid.groups["dp"].rank]
    batch = tokens(0)[mine], padded(1)[mine]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing to say about a loss that is weighed
        options = {"loss": mean_of_tokens, "loss_weight": num_tokens}
        losses = [hybrid.evaluate(*batch, **options).item(), hybrid.step(*batch, **options).item()]
    optimizer.step()
    hybrid.make_whole()
    return losses, [param.detach() for param in model.parameters()]


@pytest.mark.parametrize(
    ("mesh", "shard", "cuts"),
    [
        ("pp=2", 0, ()),
        ("dp=2", 0, (3,)),
        ("dp=2", 1, (3,)),
        ("dp=2", 2, (6,)),
        ("dp=2", 3, (3,)),
        ("cp=2", 0, ()),
        ("cp=2", 1, ()),
        ("pp=2,dp=2", 0, (5,)),
        ("pp=2,dp=2", 3, (5,)),
        ("dp=2,tp=2", 2, (2,)),
    ],
)
def test_a_mean_over_tokens_is_the_mean_of_one_process(world, mesh, shard, cuts):
    model = gpt()
    expected = mean_of_tokens(model(tokens(0)), padded(1))
    expected.backward()
    params = [param.detach() - param.grad for param in model.parameters()]
    for losses, mine in world(Mesh.parse(mesh).size, _of_tokens, mesh, shard, cuts):
        assert losses == pytest.approx([expected.item()] * 2, rel=1e-12)
        for own, param in zip(mine, params, strict=True):
            assert (own - param).abs().max() < 1e-12


class Blocks(nn.Module):
    """Layers with dropout, as units of sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.utils.skip_init(nn.Linear, 6, 6), nn.Dropout(0.5)) for _ in range(2)
        )
        generator = torch.Generator().manual_seed(0)
        for param in self.double().parameters():
            nn.init.normal_(param, generator=generator)


def _dropped(group: Group, mesh: str, shard: int, cuts: tuple[int, ...]) -> Any:
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hybrid = HybridParallel(
        model, mesh, group, layers=list(model.blocks), num_microbatches=2, shard=shard, seed=3
    )
    hybrid.attach(optimizer)
    x, y = torch.randn(2, ROWS, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mine = torch.arange(ROWS).tensor_split(cuts)[hybrid.samples.rank]
    losses = []
    for _ in range(2):
        losses.append(hybrid.step(x[mine], y[mine], loss=functional.mse_loss).item())
        optimizer.step()
        hybrid.zero_grad()
    hybrid.make_whole()
    return losses, torch.cat([param.detach().flatten() for param in model.parameters()])


@pytest.mark.parametrize("shard", [0, 1, 3])
@pytest.mark.parametrize(("mesh", "cuts"), [("dp=2", (1,)), ("pp=2,dp=2", (3,)), ("dp=3", (3, 5))])
def test_replicas_draw_and_weigh_as_one_process(world, mesh, cuts, shard):
    ((losses, weights),) = world(1, _dropped, "dp=1", 0, ())
    for own_losses, own_weights in world(Mesh.parse(mesh).size, _dropped, mesh, shard, cuts):
        assert own_losses == pytest.approx(losses, rel=1e-12)
        assert (own_weights - weights).abs().max() < 1e-12


def _pipeline(group: Group, num_microbatches: int) -> Pipeline:
    layer = nn.utils.skip_init(nn.Linear, 3, 5).double()
    with torch.no_grad():
        layer.weight.copy_(torch.arange(15.0).view(5, 3) / 15)
        layer.bias.zero_()
    return Pipeline(nn.Sequential(layer), num_microbatches=num_microbatches, group=group)


def _random(group: Group, targets: list[int], num_microbatches: int) -> Any:
    generator = torch.Generator().manual_seed(len(targets))
    x = torch.randn(len(targets), 3, generator=generator, dtype=torch.float64)
    y = torch.tensor(targets)
    pipeline = _pipeline(group, num_microbatches)
    alone = nn.utils.skip_init(nn.Linear, 3, 5).double()
    alone.load_state_dict(pipeline.get_submodule("0").state_dict())
    expected = functional.cross_entropy(alone(x), y, ignore_index=-1)
    expected.backward()
    loss = pipeline.step(
        x,
        y,
        loss=partial(functional.cross_entropy, ignore_index=-1),
        loss_weight=lambda target: (target != -1).sum(),
    )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert (pipeline.get_parameter("0.weight").grad - alone.weight.grad).abs().max() < 1e-12


@given(st.lists(st.integers(-1, 4), min_size=1, max_size=9), st.integers(1, 5))
def test_any_padding_in_any_micro_batches(targets, num_microbatches):
    assume(max(targets) >= 0)
    run_threads(1, _random, targets, num_microbatches)


def _warnings_of(group: Group) -> list[list[str]]:
    x = torch.arange(18, dtype=torch.float64).view(6, 3)
    even, uneven = torch.tensor([0, -1, 1, 2, -1, 3]), torch.tensor([0, 1, 1, 2, -1, -1])
    classes = torch.tensor([1.0, 9.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    entropy = partial(functional.cross_entropy, ignore_index=-1)
    cases = [
        (even, {"loss": entropy}),
        (uneven, {"loss": entropy}),
        (uneven, {"loss": lambda y, t: entropy(y, t) * 1.0}),  # it may be weighed already
        (uneven, {"loss": entropy, "loss_weight": lambda t: (t != -1).sum()}),
        (even, {"loss": partial(entropy, weight=classes)}),
        (even, {"loss": partial(entropy, reduction="sum")}),
        (torch.zeros(6, 5, dtype=torch.float64), {"loss": functional.mse_loss}),
        (torch.zeros(6, 5, dtype=torch.float64), {"loss": nn.MSELoss(reduction="sum")}),
    ]
    said = []
    for num_microbatches in (2, 1):
        for target, options in cases:
            pipeline = _pipeline(group, num_microbatches)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                pipeline.evaluate(x, target, **options)
                for _ in range(2):
                    pipeline.step(x, target, **options)
            said.append([str(w.message) for w in caught])
    return said


def test_a_sum_and_a_mean_over_other_terms_are_warnings_once(procs):
    for said in procs(1, _warnings_of):
        halves, whole = said[:8], said[8:]
        assert [len(texts) for texts in halves] == [0, 1, 0, 0, 1, 1, 0, 1]
        text = "a mean over targets that weigh 1 a row in one micro-batch and 0.333333 in another"
        assert text in halves[1][0]
        assert "pass loss_weight=" in halves[1][0]
        assert halves[5] == halves[7]
        assert halves[5][0].startswith("the loss is a sum over a micro-batch")
        assert not any(whole), "one micro-batch is the whole batch"


def _warned_on_replicas(group: Group, targets: list[int], shard: int, cuts: tuple[int, ...]) -> Any:
    model = Blocks()
    hybrid = HybridParallel(model, "dp=2", group, layers=list(model.blocks), shard=shard)
    hybrid.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    mine = torch.arange(len(targets)).tensor_split(cuts)[hybrid.samples.rank]
    x = torch.ones(len(targets), 6, dtype=torch.float64)[mine]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            hybrid.step(x, torch.tensor(targets)[mine], loss=functional.cross_entropy)
    alone = (
        hybrid.pipeline.predict(x).shape[0] if shard in {1, 2} and not hybrid.samples.rank else 0
    )
    return [str(w.message) for w in caught], alone


@pytest.mark.parametrize("shard", [0, 2])
@pytest.mark.parametrize(
    ("targets", "is_even"), [([1, 2, 0, 3, 1, 1], True), ([1, IGNORED, 0, 3, 1, 1], False)]
)
def test_replicas_with_one_micro_batch_compare_their_means(procs, targets, is_even, shard):
    (said, alone), (other, _) = procs(2, _warned_on_replicas, targets, shard, (2,))
    assert [len(said), len(other)] == [int(not is_even)] * 2
    assert alone == (2 if shard else 0), "one replica may predict alone"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_counts_that_torch_has_rounded_are_no_warning(dtype):
    def main(group: Group) -> None:
        layer = nn.utils.skip_init(nn.Linear, 2, 7, dtype=dtype)
        for param in layer.parameters():
            nn.init.zeros_(param)
        pipeline = Pipeline([nn.Identity(), layer], num_microbatches=4, group=group)
        x, y = torch.ones(10, 1023, 2, dtype=dtype), torch.zeros(10, 1023, dtype=torch.int64)
        weight = torch.full((7,), 0.1, dtype=dtype)
        for options in ({}, {"weight": weight}):
            entropy = partial(functional.cross_entropy, **options)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                pipeline.step(x, y, loss=lambda out, t, of=entropy: of(out.mT, t))

    run_threads(1, main)


def _of_elastic(group: Group) -> list[str]:
    model = Blocks()
    hybrid = HybridParallel(model, "dp=1", group, layers=list(model.blocks), averages=False)
    x = torch.ones(4, 6, dtype=torch.float64)
    options = {"loss": functional.mse_loss, "loss_weight": len}
    return [said_by(partial(act, x, x, **options)) for act in (hybrid.step, hybrid.evaluate)]


def test_an_elastic_training_takes_no_weights():
    ((step, evaluate),) = run_threads(1, _of_elastic)
    assert step == evaluate
    assert "loss_weight= cannot be used in an elastic training" in step


def _refused(group: Group, weight: Any) -> str:
    layers = [linear(3, 5), nn.Tanh()]
    pipeline = Pipeline(nn.Sequential(*layers), num_microbatches=2, group=group)
    batch = torch.ones(6, 3), torch.zeros(6, dtype=torch.int64)
    options = {"loss": functional.cross_entropy, "loss_weight": weight}
    return said_by(lambda: pipeline.step(*batch, **options), (ConfigError, CommError))


@pytest.mark.parametrize(
    ("weight", "text"),
    [
        (lambda _: -1, "a loss weight must be finite and not negative, got -1"),
        (lambda _: float("nan"), "a loss weight must be finite and not negative, got nan"),
        (lambda _: "many", "a loss weight must be finite and not negative, got 'many'"),
        (lambda t: t, "a loss weight must be finite and not negative, got tensor"),
        (lambda _: 0, "loss_weight returned 0 for all micro-batches"),
    ],
)
def test_wrong_weights_are_errors(world, weight, text):
    for said in world(2, _refused, weight):
        assert text in said
