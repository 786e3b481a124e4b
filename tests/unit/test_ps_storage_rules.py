"""Rules step as torch's optimizers do, whatever rows lie beside a row."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from braid.errors import ConfigError
from braid.ps.storage import FTRL, SGD, Adagrad, Adam, AdamW, RowWiseAdagrad
from braid.ps.storage.steppers import allocate

RULES = {
    "sgd": SGD(0.1),
    "momentum": SGD(0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": SGD(0.1, momentum=0.9, nesterov=True),
    "adagrad": Adagrad(0.1, weight_decay=0.01, initial_accumulator_value=0.1),
    "adam": Adam(0.1, weight_decay=0.01),
    "adamw": AdamW(0.1),
    "row_wise": RowWiseAdagrad(0.1, weight_decay=0.01),
    "ftrl": FTRL(0.1, 1.0, 0.05, 0.01),
}
TORCH = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": partial(
        torch.optim.Adagrad, lr=0.1, weight_decay=0.01, initial_accumulator_value=0.1
    ),
    "adam": partial(torch.optim.Adam, lr=0.1, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.1),
}


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", TORCH)
def test_rows_touched_by_each_update_have_the_bits_of_torch(name, dtype):
    rule, rows = RULES[name], numbers(7, 5, dtype=dtype)
    state = allocate(rule, (7, 5), dtype)
    param = nn.Parameter(rows.clone())
    optimizer = TORCH[name]([param])
    for step in range(20):
        grads = numbers(7, 5, seed=step + 1, dtype=dtype)
        param.grad = grads.clone()
        optimizer.step()
        before = grads.clone()
        rule.step(rows, grads, state)
        assert torch.equal(grads, before)
    assert torch.equal(rows, param.detach())


@pytest.mark.parametrize("name", RULES)
def test_a_row_does_not_depend_on_the_rows_beside_it(name):
    rule, rows = RULES[name], numbers(9, 33)
    alone = rows[4:5].clone()
    state, own = allocate(rule, (9, 33), torch.float32), allocate(rule, (1, 33), torch.float32)
    for step in range(5):
        grads = numbers(9, 33, seed=step + 1)
        rule.step(rows, grads, state)
        rule.step(alone, grads[4:5], own)
    assert torch.equal(rows[4:5], alone)


def test_adam_counts_the_steps_of_each_row():
    rule, rows = Adam(0.1), torch.zeros(2, 3)
    state = allocate(rule, (2, 3), torch.float32)
    state["step"][1] = 10**9  # beyond which the correction is 1
    rule.step(rows, torch.ones(2, 3), state)
    assert torch.allclose(rows[0], torch.full((3,), -0.1))
    assert torch.allclose(rows[1], torch.full((3,), -0.1 * 0.1 / 0.001**0.5), rtol=1e-4)
    assert state["step"].flatten().tolist() == [1, 10**9 + 1]


def test_row_wise_adagrad_has_one_sum_for_each_row():
    rule, rows = RowWiseAdagrad(0.1), torch.zeros(2, 4)
    state = allocate(rule, (2, 4), torch.float32)
    grads = torch.tensor([[1.0, 1.0, 1.0, 1.0], [4.0, 0.0, 0.0, 0.0]])
    rule.step(rows, grads, state)
    assert state["sum"].tolist() == [[1.0], [4.0]]
    assert torch.allclose(rows, -0.1 * grads / torch.tensor([[1.0], [2.0]]))


def ftrl_by_element(rule, w, grads):
    z = n = 0.0
    for g in grads:
        sigma = ((n + g * g) ** 0.5 - n**0.5) / rule.alpha
        z, n = z + g - sigma * w, n + g * g
        sign = (z > 0) - (z < 0)
        w = 0.0
        if abs(z) > rule.l1:
            w = -(z - sign * rule.l1) / ((rule.beta + n**0.5) / rule.alpha + rule.l2)
    return w


def test_ftrl_follows_its_paper_and_has_weights_of_zero():
    rule, grads = RULES["ftrl"], numbers(10, 3, 4, dtype=torch.float64)
    grads[:, 0, 0] = torch.tensor([0.04, -0.04] * 5)  # whose sum stays below l1
    rows = torch.zeros(3, 4, dtype=torch.float64)
    state = allocate(rule, (3, 4), torch.float64)
    for each in grads:
        rule.step(rows, each, state)
    for i in range(3):
        for j in range(4):
            expected = ftrl_by_element(rule, 0.0, grads[:, i, j].tolist())
            assert rows[i, j].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert rows[0, 0] == 0
    assert (rows != 0).sum() == 11


def test_ftrl_without_beta_has_no_nan_where_gradients_are_zero():
    rule, rows = FTRL(0.1, beta=0.0), torch.zeros(1, 3)
    rule.step(rows, torch.zeros(1, 3), allocate(rule, (1, 3), torch.float32))
    assert rows.tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("name", RULES)
def test_the_learning_rate_is_replaced_in_a_new_rule(name):
    changed = RULES[name].with_learning_rate(0.5)
    assert (changed.learning_rate, RULES[name].learning_rate) == (0.5, 0.1)
    assert changed.with_learning_rate(0.1) == RULES[name]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (partial(SGD, -0.1), r"SGD: lr must be in \[0, inf\), got -0.1"),
        (partial(SGD, float("nan")), r"lr must be in"),
        (partial(SGD, 0.1, momentum=1.0), r"momentum must be in \[0, 1\), got 1.0"),
        (partial(SGD, 0.1, nesterov=True), "nesterov=True needs a momentum above 0"),
        (partial(Adagrad, -1, eps=-1), r"lr must be .* got -1; eps must be .* got -1"),
        (partial(RowWiseAdagrad, -1), "RowWiseAdagrad: lr must be"),
        (partial(Adam, 0.1, betas=(0.9, 1.0)), r"Adam: betas must be two numbers in \[0, 1\)"),
        (partial(AdamW, 0.1, weight_decay=-1), "AdamW: weight_decay must be"),
        (partial(FTRL, 0.0), "FTRL: alpha must be above 0"),
    ],
)
def test_values_out_of_range_are_named(make, text):
    with pytest.raises(ConfigError, match=text):
        make()
