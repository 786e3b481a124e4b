"""Whole models on divided sequences, without changes: losses and gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from training import said_by

from braid.comm import Group
from braid.context import mesh
from braid.errors import ConfigError
from braid.parallel.context_parallel import (
    context_parallel,
    gather_sequence,
    mean_over_sequence,
    shifted_labels,
    split_sequence,
)
from support.seeded import filled

WIDTH, VOCABULARY, LENGTH = 16, 13, 24


class Layer(nn.Module):
    """Attention with half as many heads of keys, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.utils.skip_init(nn.Linear, WIDTH, 2 * WIDTH)
        self.out = nn.utils.skip_init(nn.Linear, WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, dropout: float, mask: torch.Tensor | None) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, 4)).transpose(1, 2)
        q, k, v = heads.split_with_sizes([4, 2, 2], 1)
        y = functional.scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal=mask is None, enable_gqa=True
        )
        return x + self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.token = nn.utils.skip_init(nn.Embedding, VOCABULARY, WIDTH)
        self.position = nn.utils.skip_init(nn.Embedding, LENGTH, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(Wrapped()) for _ in range(2))
        filled(self)
        self.double()

    def forward(
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        dropout: float = 0.0,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1])[None]
        x = self.token(tokens) + self.position(position_ids)
        for layer in self.layers:
            args = (x, dropout, mask)
            x = (
                checkpoint(layer[0], *args, use_reentrant=False)
                if self.recomputes
                else layer[0](*args)
            )
        return x @ self.token.weight.T


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Layer()

    def forward(self, *args: Any) -> torch.Tensor:
        return self.inner(*args)


def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def _train(group: Group, way: str, recomputes: bool) -> list[float]:
    whole, model = Model(), Model(recomputes)
    labels = shifted_labels(tokens())
    logits = whole(tokens())
    expected = functional.cross_entropy(logits.mT, labels)
    expected.backward()
    divided = context_parallel(model, group, attention=way, inputs={"tokens": 1})
    own = model(tokens())
    targets = split_sequence(group.size, group.rank, labels)
    losses = functional.cross_entropy(own.mT, targets, reduction="none")
    loss = mean_over_sequence(group, losses, targets != -100)
    loss.backward()
    gaps = [loss - expected, gather_sequence(group, own) - logits]
    for param, reference in zip(model.parameters(), whole.parameters(), strict=True):
        gaps.append(group.all_reduce(param.grad, op="avg") - reference.grad)
    divided.remove()
    gaps.append(model(tokens()) - logits)
    return [gap.abs().max().item() for gap in gaps]


@pytest.mark.parametrize(
    ("size", "way", "recomputes"),
    [
        (1, "ring", False),
        (2, "ring", True),
        (3, "ring", False),
        (4, "ring", False),
        (2, "all_to_all", True),
    ],
)
def test_a_model_runs_on_divided_sequences_unchanged(world, size, way, recomputes):
    for gaps in world(size, _train, way, recomputes):
        assert max(gaps) < 1e-12


def _refusals(group: Group) -> list[str]:
    model = Model()
    texts = [
        said_by(lambda: context_parallel(model, group), ConfigError),
        said_by(
            lambda: context_parallel(model, group, attention="rings", inputs={"ids": 1}),
            ConfigError,
        ),
    ]
    silent = nn.utils.skip_init(nn.Linear, 2, 2)
    with context_parallel(silent, group, inputs={"input": 0}):
        texts.append(said_by(lambda: silent(torch.ones(4, 2)), ConfigError))
    mask = torch.ones(4, 4, dtype=torch.bool)
    with context_parallel(model, group, inputs={"tokens": 1}):
        texts += [
            said_by(lambda: model(tokens()[:, :7]), ConfigError),
            said_by(lambda: model(tokens()[:, :8], mask=mask, dropout=0.1), ConfigError),
            said_by(lambda: model(None), ConfigError),
            said_by(
                lambda: context_parallel(model, mesh({"cp": group.size}, group), inputs={"ids": 1}),
                ConfigError,
            ),
        ]
    assert not torch.overrides._get_current_function_mode_stack()
    texts.append(str(model(tokens()).shape))
    return texts


def test_models_that_cannot_run_on_divided_sequences_are_refused(world):
    first, second = world(2, _refusals)
    assert first == second
    names, wrong, calls, length, masked, missing, twice, shape = first
    assert "has no argument input_ids, inputs_embeds" in names
    assert "(tokens, position_ids, dropout, mask) as inputs, such as" in names
    assert (
        "attention must be ring or all_to_all, got 'rings'; forward of Model has no argument ids"
        in wrong
    )
    assert "Linear has not called torch's scaled_dot_product_attention" in calls
    assert "7 positions cannot be divided over 2 ranks in 4 equal chunks" in length
    assert "a mask of shape [4, 4] is not supported" in masked
    assert "dropout of attention is not supported, got 0.1" in masked
    assert "Model was called without a sequence to shard: pass one of tokens" in missing
    assert 'such as braid.mesh("cp=2")["cp"], got MeshGroups' in twice
    assert "sequences of Model are sharded already: call remove()" in twice
    assert shape == f"torch.Size([2, {LENGTH}, {VOCABULARY}])"
