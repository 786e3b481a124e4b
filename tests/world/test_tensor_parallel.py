"""Layers divided over ranks compute what whole ones do: outputs, gradients, losses."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from training import said_by

from braid.comm import Group
from braid.context import mesh
from braid.errors import ConfigError
from braid.parallel.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    Slicing,
    VocabParallelEmbedding,
    clip_grad_norm_,
    parallelize,
    slicing_of,
    undivide,
    vocab_parallel_cross_entropy,
)
from support.seeded import filled

WIDTH, HEADS, KV_HEADS, VOCABULARY = 16, 4, 4, 24


def empty(make: type[nn.Module], *args: Any, **options: Any) -> nn.Module:
    """A module that has drawn nothing from the default generator."""
    return nn.utils.skip_init(make, *args, **options)


class Attention(nn.Module):
    """Attention with separate projections, as Llama's: heads come from the width of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.q_proj = empty(nn.Linear, WIDTH, WIDTH)
        self.k_proj = empty(nn.Linear, WIDTH, self.head_dim * KV_HEADS)
        self.v_proj = empty(nn.Linear, WIDTH, self.head_dim * KV_HEADS)
        self.o_proj = empty(nn.Linear, WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = empty(nn.Linear, WIDTH, 4 * WIDTH)
        self.down = empty(nn.Linear, 4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = empty(nn.Embedding, VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = empty(nn.Linear, WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


PLAN = {
    r"\.(q|k|v)_proj$": "column",
    r"\.o_proj$": "row",
    r"\.up$": "column",
    r"\.down$": "row",
    r"^embed$": "vocab",
    r"^head$": "head",
}


def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (3, 5), generator=torch.Generator().manual_seed(5))


def loss_of(model: nn.Module) -> torch.Tensor:
    logits = model(tokens())
    return functional.cross_entropy(logits.flatten(0, 1), tokens().flatten())


def _train(group: Group, dtype: torch.dtype) -> Any:
    model = filled(Model().to(dtype))
    kinds = parallelize(model, group, PLAN)
    before = group.statistics()
    loss = loss_of(model)
    loss.backward()
    after = group.statistics()
    grads = {}
    for name, param in model.named_parameters():
        slicing = slicing_of(param)
        if slicing is None:
            grads[name] = param.grad.clone()
        else:
            parts = group.all_gather(param.grad.flatten())
            shape = param.shape
            grads[name] = slicing.whole_of([p.view(shape) for p in parts.chunk(group.size)])
    norm = clip_grad_norm_(model, 0.1, group)
    return loss.detach(), grads, norm, kinds, after["num_operations"] - before["num_operations"]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_a_model_has_the_loss_and_gradients_of_one_process(world, size, dtype, tolerance):
    model = filled(Model().to(dtype))
    loss = loss_of(model)
    loss.backward()
    expected = {name: param.grad for name, param in model.named_parameters()}
    largest = max(grad.abs().max().item() for grad in expected.values())
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in expected.values()]))
    for own_loss, grads, own_norm, kinds, _ in world(size, _train, dtype):
        assert len(kinds) == 2 * 6 + 2
        assert abs(own_loss - loss.detach()) <= tolerance * abs(loss.detach())
        assert grads.keys() == expected.keys()
        for name, grad in grads.items():
            assert (grad - expected[name]).abs().max() <= tolerance * largest, name
        torch.testing.assert_close(own_norm, norm, rtol=1e-5, atol=0)


def test_a_layer_costs_two_all_reduces_forward_and_two_backward(world):
    (*_, count), *_ = world(2, _train, torch.float32)
    layers = 2 * (2 + 2)  # attention and perceptron, forward and backward
    embedding, head = 1, 2  # q, k and v add up their gradients before one all_reduce
    compared = 4  # inputs, losses, outputs and their gradients, in the first calls
    assert count == layers + embedding + head + compared


def _linear(group: Group, blocks: int) -> list[float]:
    whole = filled(empty(nn.Linear, 6, 12))
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1), requires_grad=True)
    expected = whole(x)
    expected.square().sum().backward()
    column = ColumnParallelLinear.shard(
        copy.deepcopy(whole), group, gather_output=True, blocks=blocks
    )
    row_whole = filled(empty(nn.Linear, 12, 6))
    row = RowParallelLinear.shard(copy.deepcopy(row_whole), group, input_is_parallel=False)
    mine = x.detach().clone().requires_grad_()
    y = column(mine)
    y.square().sum().backward()
    gaps = [(y - expected).abs().max(), (mine.grad - x.grad).abs().max()]
    part = Slicing(0, blocks).part_of(whole.weight.grad, group.rank, group.size)
    gaps.append((column.weight.grad - part).abs().max())
    z = expected.detach().requires_grad_()
    again = expected.detach().clone().requires_grad_()
    row_whole(z).square().sum().backward()
    row(again).square().sum().backward()
    gaps += [(again.grad - z.grad).abs().max(), (row.bias.grad - row_whole.bias.grad).abs().max()]
    return [gap.item() for gap in gaps]


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("size", [1, 2])
def test_column_and_row_layers_are_linear_layers(world, size, blocks):
    for gaps in world(size, _linear, blocks):
        assert max(gaps) < 1e-5


def _embed(group: Group) -> bool:
    whole = filled(empty(nn.Embedding, 8, 3, padding_idx=5))
    divided = VocabParallelEmbedding.shard(copy.deepcopy(whole), group)
    ids = torch.tensor([[0, 7, 5], [3, 4, 0]])
    expected, rows = whole(ids), divided(ids)
    (expected * 2).sum().backward()
    (rows * 2).sum().backward()
    part = Slicing(0).part_of(whole.weight.grad, group.rank, group.size)
    return torch.equal(rows, expected) and torch.equal(divided.weight.grad, part)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_embedding_divided_by_rows_is_the_whole_one(world, size):
    assert all(world(size, _embed))


def _outside(group: Group) -> list[tuple[int, str, str]]:
    """Ids and targets, with what the whole layer raises and what the divided one does."""
    whole = filled(empty(nn.Embedding, 8, 3))
    divided = VocabParallelEmbedding.shard(copy.deepcopy(whole), group)
    logits = torch.zeros(1, 8)
    part = Slicing(1).part_of(logits, group.rank, group.size)

    def raised(call: Any, number: int) -> str:
        try:
            call(torch.tensor([number]))
        except Exception as exc:  # noqa: BLE001 - it is compared
            return type(exc).__name__
        return "nothing"

    def loss(target: torch.Tensor) -> torch.Tensor:
        return vocab_parallel_cross_entropy(group, part, target)

    pairs = (whole, divided), (lambda target: functional.cross_entropy(logits, target), loss)
    return [
        (n, raised(one, n), raised(other, n))
        for one, other in pairs
        for n in (*range(-17, 18), -100)
    ]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ids_and_targets_outside_of_the_whole_raise_what_torch_raises(world, size):
    for found in world(size, _outside):
        assert [n for n, one, other in found if one != other] == []
        assert {one for _, one, _ in found} == {"IndexError", "nothing"}


def _cross_entropy(group: Group, smoothing: float, dtype: torch.dtype) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(6, 8, generator=generator) * 9).to(dtype).requires_grad_()
    target = torch.randint(8, (6,), generator=generator)
    weights = torch.arange(6.0)
    wide = logits if dtype == torch.float64 else logits.float()
    expected = functional.cross_entropy(wide, target, reduction="none", label_smoothing=smoothing)
    (expected * weights).sum().backward()
    part = Slicing(1).part_of(logits.detach(), group.rank, group.size).requires_grad_()
    losses = vocab_parallel_cross_entropy(group, part, target, label_smoothing=smoothing)
    (losses * weights).sum().backward()
    grad = Slicing(1).part_of(logits.grad, group.rank, group.size)
    return (losses - expected).abs().max().item(), (part.grad - grad).abs().max().item()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_cross_entropy_needs_no_gathered_logits(world, size, smoothing, dtype):
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 4e-2}[dtype]
    for gaps in world(size, _cross_entropy, smoothing, dtype):
        assert max(gaps) < tolerance


def _refusals(group: Group) -> list[str]:
    def refused(plan: dict[str, str] | None, model: nn.Module | None = None) -> str:
        own = filled(Model()) if model is None else model
        text = said_by(lambda: parallelize(own, group, plan), ConfigError)
        assert not any(slicing_of(param) for param in own.parameters())
        return text

    odd = filled(nn.Sequential(empty(nn.Linear, 4, 9), empty(nn.Linear, 9, 5)))
    return [
        refused(None),
        refused({r"\.nothing$": "column", r"\.up$": "colum"}),
        refused({r"^0$": "column", r"^1$": "row"}, odd),
        refused({r"^embed$": "vocab", r"^head$": "row"}),
        refused({r"norm$": "column", r"attention$": "row"}),
        refused({r"\.up$": "column"}),
        said_by(
            lambda: RowParallelLinear.shard(empty(nn.Linear, 4, 4), group)(torch.ones(1, 4)),
            ConfigError,
        ),
        said_by(
            lambda: vocab_parallel_cross_entropy(group, torch.ones(2, 3), torch.zeros(3)),
            ConfigError,
        ),
    ]


def test_what_cannot_be_divided_is_named_before_anything_changes(world):
    first, second = world(2, _refusals)
    assert first == second
    family, wrong, sizes, tied, no_weight, alone, inputs, shapes = first
    assert "there is no built-in plan for Model" in family
    assert "'colum' is not a way to shard a layer: use column, row" in wrong
    assert "matches no module of the model" in wrong
    assert (
        "0 has 9 entries in dim 0, which cannot be divided over 2 ranks; valid numbers of ranks: 1, 3, 9"
        in sizes
    )
    assert "1 has 9 entries in dim 1" in sizes
    assert "head and embed share a weight but shard it in two ways" in tied
    assert "layers.0.attention (Attention) has no weight to shard" in no_weight
    assert "the outputs of layers.0.up, layers.1.up stay sharded" in alone
    assert "2 of 4 inputs on this rank, got 4" in inputs
    assert "need a target of shape [2], got [3]" in shapes


class OwnPlan(nn.Module):
    """A model with a configuration as transformers' models have."""

    def __init__(self, plan: dict[str, str]) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            model_type="new", base_model_tp_plan=plan, num_attention_heads=4, num_key_value_heads=4
        )
        self.layers = nn.ModuleList([Layer()])


def _own_plan(group: Group) -> Any:
    styles = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    model = filled(OwnPlan(styles))
    model.layers[0].up.weight.grad = torch.ones_like(model.layers[0].up.weight)
    kinds = dict(parallelize(model, group))
    refused = [
        said_by(lambda: copy.deepcopy(model), ConfigError),
        said_by(
            lambda: parallelize(filled(OwnPlan({**styles, "norm": "odd"})), group), ConfigError
        ),
    ]
    assert copy.deepcopy(group) is group
    return kinds, model.layers[0].up.weight.grad.shape, refused


def test_the_plan_of_a_configuration_is_used_and_a_divided_model_is_not_copied(world):
    for kinds, grad_shape, (copied, unknown) in world(2, _own_plan):
        assert kinds == {"layers.0.up": "column", "layers.0.down": "row"}
        assert grad_shape == (2 * WIDTH, WIDTH)
        assert "a sharded model cannot be copied" in copied
        assert "there is no built-in plan for OwnPlan: pass inputs=" in unknown


def _along_axes(group: Group) -> list[Any]:
    axes = mesh("dp=2,tp=2", group)
    return [
        axes["tp"].ranks,
        axes["dp"].ranks,
        axes["dp", "tp"].ranks,
        axes["tp"] is axes["tp"],
        axes.coordinates,
        said_by(lambda: axes["pp"], ConfigError),
        said_by(lambda: mesh({"tp": 3}, group), ConfigError),
        said_by(lambda: axes.size, AttributeError),
    ]


def test_a_mesh_has_the_groups_along_its_axes(world):
    ranks = world(4, _along_axes)
    assert [own[0] for own in ranks] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [own[1] for own in ranks] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    for own in ranks:
        assert own[2:4] == [(0, 1, 2, 3), True]
        assert "the mesh dp=2,tp=2 has no axis pp" in own[5]
        assert "the mesh tp=3 has 3 ranks, but the group has 4" in own[6]
        assert "a mesh has no 'size': pass the group along its axes, such as mesh['dp']" in own[7]
    assert ranks[2][4] == {"dp": 1, "tp": 0}


def _undivide(group: Group) -> bool:
    model, whole = filled(Model()), filled(Model())
    parallelize(model, group, PLAN)
    undivide(model, group)
    same = all(
        torch.equal(own, other)
        for own, other in zip(model.state_dict().values(), whole.state_dict().values(), strict=True)
    )
    return same and torch.equal(loss_of(model), loss_of(whole)) and repr(model) == repr(whole)


@pytest.mark.parametrize("size", [1, 2])
def test_a_model_that_was_divided_is_whole_again(world, size):
    assert all(world(size, _undivide))
