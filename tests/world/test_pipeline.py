"""A pipeline has the gradients of one process that runs the micro-batches in turn, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from training import linear, said_by

from braid.comm import Group
from braid.errors import CommError, ConfigError
from braid.parallel.graph import capture
from braid.parallel.pipeline import Pipeline
from braid.parallel.pipeline.microbatches import num_rows, scatter, sizes_of
from graph_model import Model, tokens

NUM_LAYERS = 8
TRAINING = [
    "gpipe",
    "1f1b",
    "breadth_first",
    "interleaved",
    "zb_h1",
    "zb_h2",
    "zbv",
    "v_half",
]


class Layer(nn.Module):
    """Takes and returns containers: a dict with activations, and rows that need no gradient."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.linear = linear(4, 4)
        with torch.no_grad():
            self.linear.weight.mul_(1 + index / 10)

    def forward(self, value: Any) -> dict[str, Any]:
        if isinstance(value, torch.Tensor):
            value = {"x": value, "rows": torch.arange(len(value)), "unused": value * 2}
        x = torch.tanh(self.linear(value["x"])) + value["rows"].unsqueeze(1) / 8
        return {"x": x, "rows": value["rows"] + 1, "unused": x * 3, "text": ("a", 1)}


def layers() -> nn.Sequential:
    return nn.Sequential(*(Layer(i) for i in range(NUM_LAYERS)))


def loss_of(output: dict[str, Any], target: torch.Tensor) -> torch.Tensor:
    return (output["x"] - target).square().mean()


def batch_of(rows: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rows + step)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 4, generator=generator)


def reference(
    rows: Sequence[int], num_microbatches: int, make: Callable[[], nn.Sequential] = layers
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Gradients and losses of one process, over several batches without zeroing."""
    model = make()
    losses = []
    for step, count in enumerate(rows):
        x, target = batch_of(count, step)
        sizes, total = sizes_of(count, num_microbatches), torch.zeros((), dtype=torch.float64)
        parts = zip(scatter(x, sizes), scatter(target, sizes), sizes, strict=True)
        for part, wanted, size in parts:
            loss = loss_of(model(part), wanted) * (size / count)
            loss.backward()
            total += loss.detach().double()
        losses.append(total.item())
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, losses


def _train(group: Group, schedule: str, rows: list[int], num_microbatches: int) -> Any:
    pipeline = Pipeline(layers(), num_microbatches=num_microbatches, schedule=schedule, group=group)
    losses = [
        pipeline.step(*batch_of(count, step), loss=loss_of).item()
        for step, count in enumerate(rows)
    ]
    return {name: p.grad for name, p in pipeline.named_parameters()}, losses


@pytest.mark.parametrize("schedule", TRAINING)
@pytest.mark.parametrize(
    ("size", "rows", "num_microbatches"),
    [(1, [6], 3), (2, [8, 8], 4), (2, [5, 9, 1], 4), (3, [7], 2), (4, [12, 3], 5)],
)
def test_gradients_have_the_bits_of_one_process(world, schedule, size, rows, num_microbatches):
    expected, losses = reference(rows, num_microbatches)
    found: dict[str, torch.Tensor] = {}
    for grads, own_losses in world(size, _train, schedule, rows, num_microbatches):
        found |= grads
        assert own_losses == losses
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def shared_layers() -> nn.Sequential:
    """The first, the fourth and the last layer have one weight."""
    model = layers()
    model[3].linear.weight = model[7].linear.weight = model[0].linear.weight
    return model


def _train_shared(group: Group, schedule: str) -> tuple[dict[str, torch.Tensor], float, float]:
    pipeline = Pipeline(shared_layers(), num_microbatches=4, schedule=schedule, group=group)
    pipeline.step(*batch_of(6, 0), loss=loss_of)
    before = {name: p.grad.clone() for name, p in pipeline.named_parameters()}
    norm = pipeline.clip_grad_norm_(0.5).item()
    return before, norm, pipeline.clip_grad_norm_(9.0).item()


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_shared_weights_have_the_sum_of_their_gradients_and_count_once_in_the_norm(
    world, schedule, size
):
    expected, _ = reference([6], 4, shared_layers)
    whole = torch.linalg.vector_norm(torch.stack([g.norm() for g in expected.values()]))
    holders = 0
    for grads, norm, clipped in world(size, _train_shared, schedule):
        for name, grad in grads.items():
            known = name if name in expected else "0.linear.weight"
            torch.testing.assert_close(grad, expected[known])
            holders += known == "0.linear.weight"
        assert (norm, clipped) == (
            pytest.approx(whole.item(), rel=1e-5),
            pytest.approx(0.5, rel=1e-4),
        )
    assert holders == {1: 1, 2: 2, 3: 3 if schedule == "1f1b" else 2}[size]


def layers_used_twice() -> nn.Sequential:
    """Each layer comes twice, in one stage; two layers of each stage also share a weight."""
    model = layers()
    for first in (0, 4):
        a, b = model[first], model[first + 1]
        b.linear.weight = a.linear.weight
        model[first + 2], model[first + 3] = b, a
    return model


def _train_used_twice(group: Group, schedule: str) -> dict[str, torch.Tensor]:
    pipeline = Pipeline(layers_used_twice(), num_microbatches=2, schedule=schedule, group=group)
    pipeline.step(*batch_of(6, 0), loss=loss_of)
    return {name: p.grad for name, p in pipeline.named_parameters()}


@pytest.mark.parametrize("schedule", TRAINING)
def test_layers_that_a_stage_uses_twice_have_their_gradients_once(world, schedule):
    expected, _ = reference([6], 2, layers_used_twice)
    model = layers_used_twice()
    firsts = {param: name for name, param in model.named_parameters()}
    names = {name: firsts[param] for name, param in model.named_parameters(remove_duplicate=False)}
    found = {}
    for grads in world(2, _train_used_twice, schedule):
        found |= {names[name]: grad for name, grad in grads.items()}
    torch.testing.assert_close(found, expected)


class SparseHead(nn.Module):
    """A linear layer with the weight of an embedding."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


def _shared_by_one_rank(group: Group, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    found = []
    for step in ("pipeline", "plain"):
        token = nn.Embedding.from_pretrained(
            torch.arange(15.0).view(5, 3) / 9, freeze=False, sparse=kind == "sparse"
        )
        if kind == "hook":
            token.weight.register_hook(lambda grad: 2 * grad)
        model = nn.Sequential(token, SparseHead(token.weight))
        ids = torch.tensor([0, 2, 2, 4])
        if step == "pipeline":
            pipeline = Pipeline(model, num_microbatches=2, group=group)
            pipeline.step(ids, ids, loss=nn.functional.cross_entropy)
        else:
            nn.functional.cross_entropy(model(ids), ids).backward()
        found.append(token.weight.grad.to_dense())
    return found[0], found[1]


@pytest.mark.parametrize("kind", ["hook", "sparse"])
def test_a_weight_that_layers_of_one_rank_share_may_have_hooks_and_sparse_gradients(world, kind):
    ((found, expected),) = world(1, _shared_by_one_rank, kind)
    torch.testing.assert_close(found, expected)


def _accumulate_shared(group: Group) -> list[torch.Tensor]:
    pipeline = Pipeline(shared_layers(), num_microbatches=4, group=group)
    for _ in range(2):
        pipeline.step(*batch_of(6, 0), loss=loss_of)
    twice = dict(pipeline.named_parameters())
    return [p.grad for name, p in twice.items() if name.endswith("0.linear.weight")]


def test_shared_weights_accumulate_over_steps(world):
    expected, _ = reference([6], 4, shared_layers)
    (grad,) = world(2, _accumulate_shared)[0]
    torch.testing.assert_close(grad, 2 * expected["0.linear.weight"])


def _evaluate(group: Group, schedule: str) -> tuple[float, bool]:
    pipeline = Pipeline(layers(), num_microbatches=3, schedule=schedule, group=group)
    value = pipeline.evaluate(*batch_of(7, 0), loss=loss_of).item()
    return value, all(p.grad is None for p in pipeline.parameters())


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_evaluation_gives_the_loss_and_no_gradients(world, schedule):
    _, (expected,) = reference([7], 3)
    assert world(2, _evaluate, schedule) == [(expected, True)] * 2


class Breaks(nn.Module):
    """Raises for its second micro-batch, in forward or in backward."""

    def __init__(self, *, backward: bool) -> None:
        super().__init__()
        self.backward_breaks = backward
        self.count = 0

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        self.count += 1
        if self.count == 2 and self.backward_breaks:
            value["x"].register_hook(self._fail)
        elif self.count == 2:
            self._fail(value["x"])
        return value

    @staticmethod
    def _fail(_x: torch.Tensor) -> None:
        msg = "shard 7 is missing"
        raise FileNotFoundError(msg)


def _break(group: Group, backward: bool) -> str:
    model = layers()
    model[5] = Breaks(backward=backward)
    pipeline = Pipeline(model, num_microbatches=4, group=group)
    return said_by(
        lambda: pipeline.step(*batch_of(8, 0), loss=loss_of), (FileNotFoundError, CommError)
    )


@pytest.mark.parametrize(
    ("backward", "where"),
    [
        (False, "layer 5 (Breaks), F of stage 1 in micro-batch 1"),
        (True, "B of stage 1 in micro-batch 1"),
    ],
)
def test_an_exception_is_named_on_all_ranks_with_layer_stage_micro_batch_and_action(
    world, backward, where
):
    first, second = world(2, _break, backward)
    assert second == "FileNotFoundError: shard 7 is missing"
    assert first.startswith("CommError")
    assert f"rank 1 failed in {where}: FileNotFoundError: shard 7 is missing" in first


def _refusals(group: Group) -> list[str]:
    def make(model: Any = None, **options: Any) -> str:
        options = {"num_microbatches": 2, "group": group} | options
        return said_by(
            lambda: Pipeline(layers() if model is None else model, **options), ConfigError
        )

    pipeline = Pipeline(layers(), num_microbatches=2, group=group)
    x, target = batch_of(4, 0)
    return [
        make(balance=[3, 3]),
        make(layers()[:1]),
        make(num_microbatches=0),
        make(schedule="2f2b"),
        said_by(lambda: pipeline(x), ConfigError),
        said_by(lambda: pipeline.step(x[:0], target[:0], loss=loss_of), ConfigError),
        said_by(lambda: pipeline.step([x, x[:1]], target, loss=loss_of), ConfigError),
    ]


def test_what_cannot_be_a_pipeline_is_refused_by_name(world):
    told = world(2, _refusals)
    assert told[0] == told[1]
    balance, few, none, unknown, called, empty, ragged = told[0]
    assert "add up to the number of layers, 8, got [3, 3], which add up to 6" in balance
    assert "1 layers cannot be divided into 2 stages" in few
    assert "at least 1 stage and 1 micro-batch, got 2 and 0" in none
    assert "unknown schedule '2f2b': choose one of gpipe, 1f1b" in unknown
    assert "use pipeline.step(batch, target, loss=...)" in called
    assert "a batch of 0 rows" in empty
    assert "must have the same length there, got tensors of [1, 4] rows" in ragged


def test_rows_are_divided_evenly_and_the_rest_comes_first():
    assert [sizes_of(7, 3), sizes_of(2, 5), sizes_of(0, 3)] == [[3, 2, 2], [1, 1], []]
    assert num_rows({"a": torch.ones(3, 2), "b": [torch.ones(3), torch.tensor(1.0)]}) == 3
    parts = scatter((torch.arange(5), torch.tensor(9)), [3, 2])
    assert [(a.tolist(), b.item()) for a, b in parts] == [([0, 1, 2], 9), ([3, 4], 9)]


def _train_captured(group: Group, schedule: str) -> tuple[dict[str, torch.Tensor], float]:
    model = captured_model()
    graph = capture(model, torch.zeros(3, 5, dtype=torch.int64))
    pipeline = Pipeline(graph, num_microbatches=3, schedule=schedule, group=group)
    loss = pipeline.step((tokens(7),), tokens(7), loss=captured_loss)
    return {name: p.grad for name, p in pipeline.named_parameters()}, loss.item()


def captured_model() -> nn.Module:
    model = Model().eval()
    for index, param in enumerate(model.parameters()):
        with torch.no_grad():
            param.copy_(
                torch.randn(param.shape, generator=torch.Generator().manual_seed(index)) / 3
            )
    return model


def captured_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())


@pytest.mark.procs  # dropout modules are made, and embeddings draw from the default generator
@pytest.mark.parametrize(("size", "schedule"), [(1, "1f1b"), (1, "zb_h1"), (2, "1f1b"), (2, "zbv")])
def test_a_captured_model_with_tied_weights_has_the_bits_of_the_ordered_reference(
    procs, size, schedule
):
    """The two uses of the weight are summed separately, on any number of stages."""
    model = captured_model()
    model.head.weight = nn.Parameter(
        model.token.weight.detach().clone()
    )  # a copy, as on another rank
    for part in torch.split(tokens(7), sizes_of(7, 3)):
        (captured_loss(model(part), part) * (len(part) / 7)).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    tied = expected.pop("token.weight") + expected.pop("head.weight")
    expected |= {"token.weight": tied, "head.weight": tied}
    found = procs(size, _train_captured, schedule)
    assert len({loss for _, loss in found}) == 1
    for grads, _ in found:
        for name, grad in grads.items():
            assert torch.equal(grad, expected[name]), name
    assert {name for grads, _ in found for name in grads} >= {*expected} - {"head.weight"}
