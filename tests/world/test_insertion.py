"""Models divided by their graph compute what one process does, and say what they send."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from training import said_by

from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.tensor_parallel import Shard, clip_grad_norm_, parallelize, slicing_of, undivide
from braid.parallel.tensor_parallel.insertion.explain import totals
from braid.programs.layout import Layout, Mesh
from braid.runtime.seeding import Draws
from support import seeded

WIDTH, HEADS, VOCABULARY = 16, 4, 24
BATCH = torch.randint(VOCABULARY, (3, 6), generator=torch.Generator().manual_seed(5))


def filled(module: nn.Module) -> nn.Module:
    """The module in float64 with values that every rank draws alike."""
    return seeded.filled(module.double())


def empty(make: type[nn.Module], *args: Any, **options: Any) -> nn.Module:
    """A module that has drawn nothing from the default generator."""
    return nn.utils.skip_init(make, *args, **options)


class Attention(nn.Module):
    """Attention with a packed projection and heads by number, as GPT-2's."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.qkv = empty(nn.Linear, WIDTH, 3 * WIDTH)
        self.out = empty(nn.Linear, WIDTH, WIDTH)
        self.drop = drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)
            for part in self.qkv(x).split(WIDTH, dim=2)
        )
        drop = self.drop if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))


class Layer(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.attention = Attention(drop)
        self.norm = nn.LayerNorm(WIDTH)
        self.second_norm = nn.LayerNorm(WIDTH)
        self.up = empty(nn.Linear, WIDTH, 4 * WIDTH)
        self.down = empty(nn.Linear, 4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm(x)))
        hidden = self.drop(functional.gelu(self.up(self.second_norm(x))))
        return x + self.drop(self.down(hidden))


class Language(nn.Module):
    """A small GPT with a shared embedding, whose forward returns its loss and logits."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.embed = empty(nn.Embedding, VOCABULARY, WIDTH)
        self.places = empty(nn.Embedding, 8, WIDTH)
        self.layers = nn.ModuleList(Layer(drop) for _ in range(2))
        self.head = empty(nn.Linear, WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        loss = functional.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))
        return {"loss": loss, "logits": logits}


def drawn(model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    with Draws(3, 0, range(len(ids))).layer("model"):
        return model(ids=ids.contiguous(), labels=ids.contiguous())


def grads_of(model: nn.Module, group: Group) -> dict[str, torch.Tensor]:
    """Whole gradients of a divided model."""
    grads = {}
    for name, param in model.named_parameters():
        slicing = slicing_of(param)
        grad = param.grad
        if slicing is not None:
            parts = group.all_gather(grad.reshape(1, -1).contiguous())
            grad = slicing.whole_of([part.view(grad.shape) for part in parts])
        grads[name] = grad.clone()
    return grads


def _language(group: Group, drop: float, options: dict[str, Any], lengths: list[int]) -> Any:
    model = filled(Language(drop))
    found = parallelize(model, group, inputs={"ids": BATCH, "labels": BATCH}, **options)
    results = []
    for length in lengths:
        model.zero_grad()
        before = group.statistics()["num_operations"]
        out = drawn(model, BATCH[:, :length])
        out["loss"].backward()
        sent = group.statistics()["num_operations"] - before
        results.append((out["loss"].detach(), out["logits"].detach(), grads_of(model, group), sent))
    sums = totals(found.rows)
    return dict(found), results, sum((sums.forward + sums.backward).values())


@pytest.mark.parametrize(
    ("size", "drop", "options", "lengths"),
    [
        (1, 0.3, {}, [6]),
        (2, 0.0, {}, [6, 5]),
        (2, 0.3, {"sequence_parallel": True, "gather_outputs": False}, [6, 4]),
        (4, 0.3, {"sequence_parallel": True}, [4]),
    ],
)
def test_a_model_without_a_plan_has_the_gradients_of_one_process(
    world, size, drop, options, lengths
):
    model = filled(Language(drop))
    ranks = world(size, _language, drop, options, lengths)
    compared = 4 * (size > 1)  # inputs, losses, outputs and gradients, in the first calls
    for step, length in enumerate(lengths):
        model.zero_grad()
        expected = drawn(model, BATCH[:, :length])
        expected["loss"].backward()
        largest = max(param.grad.abs().max() for param in model.parameters())
        for rank, (kinds, results, counted) in enumerate(ranks):
            loss, logits, grads, sent = results[step]
            assert kinds["layers.0.attention.qkv"] == "column:3"
            assert kinds["layers.1.down"] == "row"
            assert sent == counted + compared, "the explanation counts what is sent"
            assert abs(loss - expected["loss"]) <= 1e-13 * expected["loss"]
            whole = expected["logits"].detach()
            own = whole if options.get("gather_outputs", True) else whole.chunk(size, -1)[rank]
            torch.testing.assert_close(logits, own, rtol=0, atol=1e-12)
            for name, param in model.named_parameters():
                assert (grads[name] - param.grad).abs().max() <= 1e-13 * largest, name


def _outside(group: Group) -> list[str]:
    model = filled(Language())
    parallelize(model, group, inputs={"ids": BATCH, "labels": BATCH})
    inside = {"ids": BATCH.contiguous(), "labels": BATCH.contiguous()}
    wrong = [
        {**inside, name: BATCH.clone().fill_(number)}
        for name in inside
        for number in (VOCABULARY, -1)
    ]
    return [said_by(lambda x=x: model(**x), IndexError) for x in wrong]


def test_ids_and_labels_outside_of_the_vocabulary_are_an_index_error(world):
    for row, before, label, other in world(2, _outside):
        assert "index out of range in self" in row
        assert row == before
        assert "targets must be from 0 to 23" in label
        assert "got -1" in other


def _modes(group: Group) -> tuple[float, bool, float]:
    """Gaps in evaluation, whether undividing restores the model, and the gap of a norm."""
    whole, model = filled(Language(0.3)), filled(Language(0.3))
    parallelize(model, group, inputs={"ids": BATCH, "labels": BATCH})
    model.eval()
    gap = drawn(model, BATCH)["logits"] - drawn(whole.eval(), BATCH)["logits"]
    drawn(model, BATCH)["loss"].backward()
    drawn(whole, BATCH)["loss"].backward()
    norm = clip_grad_norm_(model, 1.0, group)
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    undivide(model, group)
    same = all(
        torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters(), strict=True)
    )
    again = drawn(model, BATCH)["logits"]
    same = same and torch.equal(again, drawn(whole, BATCH)["logits"])
    return gap.abs().max().item(), same, abs(norm - expected).item()


def test_another_mode_is_captured_anew_and_a_division_is_undone(world):
    for gap, same, norm_gap in world(2, _modes):
        assert gap < 1e-13
        assert same
        assert norm_gap < 1e-12


class Book(nn.Module):
    """A data parallel operator that feeds a model parallel one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Shard(torch.matmul, ((4, 1), (1, 1)))
        self.second = Shard(torch.matmul, ((1, 1), (1, 4)))
        self.w = nn.Parameter(torch.empty(6, 8))
        self.v = nn.Parameter(torch.empty(8, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, self.w), self.v)


def _book(group: Group) -> Any:
    model = filled(Book())
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = parallelize(model, group, inputs=x, gather_outputs=False)
    y = model(x)
    y.square().sum().backward()
    forward = [c for row in found.rows for c in row.collectives if not c.backward]
    return y.detach(), model.w.grad, model.v.grad, [(c.name, c.nbytes) for c in forward]


def test_annotated_operators_gather_what_lies_between_them_once(world):
    model = filled(Book())
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y = model(x)
    y.square().sum().backward()
    for rank, (own, w, v, forward) in enumerate(world(4, _book)):
        assert forward == [("all_gather", 8 * 8 * 8 * 3 // 4)]
        torch.testing.assert_close(own, y.detach().chunk(4, 1)[rank], rtol=0, atol=1e-13)
        torch.testing.assert_close(w, model.w.grad, rtol=1e-13, atol=1e-12)
        torch.testing.assert_close(v, model.v.grad, rtol=1e-13, atol=1e-12)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = empty(nn.Linear, 8, 12)
        self.down = empty(nn.Linear, 12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.relu(self.up(x)))


STRATEGIES = [
    {"up": ((2, 1), (2, 1)), "down": ((2, 2), (1, 2))},
    {"up": ((1, 2), (2, 2)), "down": ((4, 1), (1, 1))},
    {"up": ((1, 4), (1, 4)), "down": ((2, 1), (2, 1))},
    {"up": ((2, 1), (1, 1))},
]


def _annotated(group: Group, strategies: dict[str, Any]) -> Any:
    model = filled(Two())
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    parallelize(model, group, strategies, inputs=x)
    y = model(x)
    y.square().sum().backward()
    return y.detach(), [param.grad for param in model.parameters()]


@pytest.mark.parametrize("strategies", STRATEGIES)
def test_operators_may_be_split_in_any_way_that_fits_the_ranks(world, strategies):
    model = filled(Two())
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y = model(x)
    y.square().sum().backward()
    for own, grads in world(4, _annotated, strategies):
        torch.testing.assert_close(own, y.detach(), rtol=1e-13, atol=1e-12)
        for grad, param in zip(grads, model.parameters(), strict=True):
            torch.testing.assert_close(grad, param.grad, rtol=1e-12, atol=1e-12)


class Images(nn.Module):
    """Convolutions, of which the first can be divided by outputs and the second by inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = empty(nn.Conv2d, 3, 8, 3)
        self.second = empty(nn.Conv2d, 8, 6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(functional.relu(self.first(x))).mean((2, 3))


def _images(group: Group) -> Any:
    model = filled(Images())
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    kinds = parallelize(model, group, inputs=x)
    y = model(x)
    y.square().sum().backward()
    return kinds, y.detach(), grads_of(model, group)


def test_convolutions_are_paired_too(world):
    model = filled(Images())
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y = model(x)
    y.square().sum().backward()
    for kinds, own, grads in world(2, _images):
        assert kinds == {"first": "column", "second": "row"}
        torch.testing.assert_close(own, y.detach(), rtol=1e-13, atol=1e-13)
        for name, param in model.named_parameters():
            torch.testing.assert_close(grads[name], param.grad, rtol=1e-11, atol=1e-12)


class Unknown(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.cummax(self.up(x), dim=-1).values)


class Branching(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(x) if x.sum() > 0 else self.up(x)


class ThreeHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = empty(nn.Linear, 8, 12)
        self.out = empty(nn.Linear, 12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.q(x).view(len(x), 3, 4).softmax(-1)
        return self.out(heads.flatten(1))


def _mistakes(group: Group) -> list[str]:
    x = torch.ones(4, 8, dtype=torch.float64)
    both = {"up": "column", "down": "row"}

    def refused(model: nn.Module, plan: Any = None, **options: Any) -> str:
        own = copy.deepcopy(model)
        text = said_by(lambda: parallelize(own, group, plan, **options), ConfigError)
        assert not any(slicing_of(param) for param in own.parameters())
        assert "forward" not in own.__dict__
        return text

    return [
        refused(filled(Unknown()), both, inputs=x, strict=True),
        refused(filled(Branching()), inputs=x),
        refused(filled(ThreeHeads()), {"q": "column", "out": "row"}, inputs=x),
        refused(filled(Two()), {"up": ((2, 1), (1, 2))}, inputs=x),
        refused(filled(Two()), {"up": ((3, 1), (1, 1))}, inputs=x),
        refused(filled(Two()), both, sequence_parallel=True),
        refused(filled(ThreeHeads()), inputs=x),
    ]


def test_mistakes_are_named_before_anything_is_changed(world):
    unknown, branch, heads, odd, parts, options, none = world(2, _mistakes)[0]
    assert "no rule can shard aten.cummax" in unknown
    assert "test_insertion.py" in unknown
    assert "torch.export cannot capture Branching" in branch
    assert "leave inputs out" in branch
    assert "has a dim of 3 in aten.reshape of shape [4, 3, 4]" in heads
    assert "cannot be split over 2 ranks; valid numbers of ranks: 1, 3" in heads
    assert "dim 1 of input 1 should have 2 shards" in odd
    assert "3 shards cannot be distributed over 2 ranks" in parts
    assert "only with inputs" in options
    assert "no layer can be sharded over 2 ranks" in none
    assert "q.weight: the model has a dim of 3" in none


def _layouts(group: Group) -> Any:
    mesh = Mesh({"tp": 2})
    plan = {"up": Layout.parse(mesh, "tp | -"), "down": Layout.parse(mesh, "- | tp")}
    return dict(parallelize(filled(Two()), group, plan))


def test_a_plan_may_say_the_layouts_of_weights(world):
    assert world(2, _layouts) == [{"up": "column", "down": "row"}] * 2


def _unknown(group: Group) -> Any:
    model, whole = filled(Unknown()), filled(Unknown())
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = parallelize(model, group, {"up": "column"}, inputs=x)
    return found.explain(), found.to_svg(), (model(x) - whole(x)).abs().max().item()


@pytest.mark.filterwarnings("ignore:no rule can shard")
def test_an_operation_without_a_rule_gathers(world):
    for text, picture, gap in world(2, _unknown):
        assert gap < 1e-14
        assert "all_gather tp" in text
        assert "forward: 1 all_gather" in text
        assert picture.startswith("<svg")


def thrice(operation: Any, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = operation(x, x, x)
    return y


TWICE = {
    "einsum of rows": lambda h: torch.einsum("bi,bj->b", h, h),
    "einsum of products": lambda h: torch.einsum("bi,bj->bij", h, h),
    "einsum of columns": lambda h: torch.einsum("bi,ci->bc", h, h),
    "three of an einsum": lambda h: torch.einsum("bi,ij,bj->b", h, h, h),
    "matmul": lambda h: h @ h,
    "mm": torch.mm,
    "mm of a transposed": lambda h: h @ h.T,
    "bmm": lambda h: torch.bmm(h[None], h[None]),
    "bmm of one view": lambda h: thrice(lambda a, b, _c: torch.bmm(a, b), h[None]),
    "addmm": lambda h: torch.addmm(h, h, h),
    "baddbmm": lambda h: thrice(torch.baddbmm, h.view(1, 4, 4)),
    "linear": lambda h: functional.linear(h, h),
    "add": lambda h: h + h,
    "where": lambda h: torch.where(h > 0, h, h),
    "cat": lambda h: torch.cat([h, h], dim=1),
    "stack": lambda h: torch.stack([h, h]),
    "attention": lambda h: thrice(functional.scaled_dot_product_attention, h[None]),
    "outer": lambda h: torch.outer(h[0], h[0]),
}


class Twice(nn.Module):
    """An operation that takes one value several times."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.up = empty(nn.Linear, 3, 4)
        self.operation = TWICE[name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.operation(h, h) if self.operation is torch.mm else self.operation(h)


def _twice(group: Group, name: str) -> Any:
    model = filled(Twice(name))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = parallelize(model, group, {"up": "column"}, inputs=x)
    y = model(x)
    y.square().sum().backward()
    return dict(found), y.detach(), grads_of(model, group)


@pytest.mark.filterwarnings("ignore:no rule can shard")
@pytest.mark.parametrize("name", TWICE)
def test_a_value_that_an_operation_takes_twice_may_be_split_differently_each_time(world, name):
    model = filled(Twice(name))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y = model(x)
    y.square().sum().backward()
    for kinds, own, grads in world(2, _twice, name):
        assert kinds == {"up": "column"}
        torch.testing.assert_close(own, y.detach(), rtol=1e-12, atol=1e-12)
        for key, param in model.named_parameters():
            torch.testing.assert_close(grads[key], param.grad, rtol=1e-11, atol=1e-12)


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad / 2


class WithFunction(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Halved.apply(super().forward(x))


def _with_function(group: Group) -> str:
    x = torch.ones(2, 6, WIDTH)
    return said_by(lambda: parallelize(WithFunction(0.0), group, inputs=x), ConfigError)


def test_a_function_whose_backward_the_graph_would_lose_is_refused(world):
    (text,) = world(1, _with_function)
    assert "the backward of the autograd.Function Halved, called at " in text
    assert f"{__file__}:{WithFunction.forward.__code__.co_firstlineno + 1}" in text
