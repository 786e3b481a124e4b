"""Attention over divided sequences is that of one process: outputs, gradients, bytes, refusals."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from training import said_by

from braid.comm import Group
from braid.errors import ConfigError, MismatchError
from braid.parallel.context_parallel import (
    all_to_all_attention,
    all_to_all_costs,
    gather_sequence,
    mean_over_sequence,
    position_ids,
    ring_attention,
    ring_costs,
    shifted_labels,
    split_sequence,
)
from braid.parallel.context_parallel.travel import SMALL_BYTES

TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-13, torch.bfloat16: 2e-2}
WAYS = {"ring": ring_attention, "all_to_all": all_to_all_attention}


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def tensors(length: int, heads: int, kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of the output, of two whole sequences."""
    counts = (heads, kv_heads, kv_heads, heads)
    return [drawn(2, n, length, 8, seed=seed, dtype=dtype) for seed, n in enumerate(counts)]


def whole_attention(
    tensors: list[torch.Tensor], causal: bool, scale: float | None
) -> list[torch.Tensor]:
    """Output and gradients of q, k and v in one process, in float64."""
    q, k, v = (x.double().clone().requires_grad_() for x in tensors[:3])
    out = functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=True
    )
    out.backward(tensors[3].double())
    return [out.detach(), q.grad, k.grad, v.grad]


def attention(
    group: Group,
    way: str,
    whole: list[torch.Tensor],
    causal: bool,
    balanced: bool = True,
    scale: float | None = None,
) -> list[torch.Tensor]:
    """Output and gradients of q, k and v of this rank's positions."""
    own = [split_sequence(group.size, group.rank, x, 2, balanced=balanced) for x in whole]
    q, k, v = (x.requires_grad_() for x in own[:3])
    out = WAYS[way](group, q, k, v, causal=causal, balanced=balanced, scale=scale)
    out.backward(own[3])
    return [out.detach(), q.grad, k.grad, v.grad]


def gaps(
    group: Group,
    way: str,
    whole: list[torch.Tensor],
    causal: bool,
    balanced: bool = True,
    scale: float | None = None,
) -> list[float]:
    """Largest difference from one process, relative to the largest number of a tensor."""
    expected = whole_attention(whole, causal, scale)
    own = attention(group, way, whole, causal, balanced, scale)
    pairs = [
        (x, split_sequence(group.size, group.rank, y, 2, balanced=balanced), y)
        for x, y in zip(own, expected, strict=True)
    ]
    assert all(x.dtype == whole[0].dtype for x in own)
    return [((x - y).abs().max() / z.abs().max()).item() for x, y, z in pairs]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_ring_attention_is_that_of_one_process(world, size, causal, dtype):
    for found in world(size, gaps, "ring", tensors(24, 4, 2, dtype), causal):
        assert max(found) <= TOLERANCES[dtype]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_all_to_all_attention_is_that_of_one_process(world, size, causal, dtype):
    for found in world(size, gaps, "all_to_all", tensors(16, 8, 4, dtype), causal):
        assert max(found) <= TOLERANCES[dtype]


@given(
    size=st.integers(1, 4),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3)),
    masked=st.sampled_from([(False, False), (False, True), (True, False), (True, True)]),
    scale=st.sampled_from([None, 0.1, 3.0]),
    way=st.sampled_from(["ring", "all_to_all"]),
)
@settings(max_examples=20)
def test_any_lengths_and_heads_give_the_attention_of_one_process(
    world, size, shape, masked, scale, way
):
    (width, kv_heads, share), (causal, balanced) = shape, masked
    kv_heads *= size if way == "all_to_all" else 1
    length = size * width * (2 if balanced else 1)
    whole = tensors(length, kv_heads * share, kv_heads, torch.float64)
    for found in world(size, gaps, way, whole, causal, balanced, scale):
        assert max(found) <= 1e-12


def test_long_messages_are_sent_by_the_progress_thread(world):
    whole = [drawn(1, 4, 2048, 32, seed=seed, dtype=torch.float32) for seed in range(4)]
    assert whole[1].nbytes > SMALL_BYTES * 2
    for found in world(2, gaps, "ring", whole, True):
        assert max(found) <= 2e-6  # sums of 2048 terms


@pytest.mark.parametrize("way", ["ring", "all_to_all"])
def test_two_runs_are_equal_bitwise(world, way):
    whole = tensors(24, 6, 3, torch.float32)
    first, second = (world(3, attention, way, whole, True) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _bytes(group: Group, way: str, whole: list[torch.Tensor]) -> list[int]:
    own = [split_sequence(group.size, group.rank, x, 2) for x in whole]
    q, k, v = (x.requires_grad_() for x in own[:3])
    counts = [group.statistics()["nbytes"]]
    out = WAYS[way](group, q, k, v, causal=True)
    counts.append(group.statistics()["nbytes"])
    out.backward(own[3])
    counts.append(group.statistics()["nbytes"])
    return [b - a for a, b in pairwise(counts)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("dtype", "wide"), [(torch.float64, 1), (torch.bfloat16, 2)])
def test_a_ring_sends_the_bytes_of_its_closed_form(world, size, dtype, wide):
    whole = tensors(24, 4, 2, dtype)
    costs = ring_costs(size, (whole[1].nbytes + whole[2].nbytes) // size, wide=wide)
    for counted in world(size, _bytes, "ring", whole):
        assert counted == [2 * cost.nbytes for cost in costs]  # sent and received


@pytest.mark.parametrize("size", [2, 4])
def test_all_to_all_attention_moves_the_bytes_of_its_closed_form(world, size):
    whole = tensors(16, 8, 4, torch.float32)
    costs = all_to_all_costs(
        size, whole[0].nbytes // size, (whole[1].nbytes + whole[2].nbytes) // size
    )
    for counted in world(size, _bytes, "all_to_all", whole):
        # the group counts whole tensors, of which a rank keeps a part
        assert counted == [cost.nbytes * size / (size - 1) for cost in costs]


def _without_grad(group: Group) -> tuple[bool, bool]:
    q, k, v, _ = (
        split_sequence(group.size, group.rank, x, 2) for x in tensors(8, 2, 2, torch.float32)
    )
    with torch.no_grad():
        plain = ring_attention(group, q, k, v)
    taking_part = ring_attention(group, q if group.rank else q.requires_grad_(), k, v)
    taking_part.sum().backward()  # on every rank, though one only has an input that needs it
    return plain.requires_grad, taking_part.requires_grad


def test_every_rank_takes_part_in_a_backward_that_one_needs(world):
    assert world(2, _without_grad) == [(False, True)] * 2


def _autocast(group: Group) -> list[Any]:
    whole = tensors(8, 4, 4, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        own = [split_sequence(group.size, group.rank, x, 2).requires_grad_() for x in whole[:3]]
        outs = [attend(group, *own, causal=True) for attend in WAYS.values()]
    sum(out.float().sum() for out in outs).backward()
    return [*(out.dtype for out in outs), *(x.grad.dtype for x in own)]


def test_autocast_gives_attention_its_dtype(world):
    for dtypes in world(2, _autocast):
        assert dtypes == [torch.bfloat16] * 2 + [torch.float32] * 3


def _loss(group: Group) -> tuple[float, float, float, bool]:
    """A loss whose labels are left out unevenly: only some positions of the last chunk count."""
    labels = torch.randint(9, (2, 24), generator=torch.Generator().manual_seed(1))
    labels[0, :19] = -100
    following = shifted_labels(labels)
    weight = drawn(8, 9, seed=2).requires_grad_()
    x = drawn(2, 24, 8, seed=3)
    expected = functional.cross_entropy((x @ weight)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    expected.backward()
    mine = weight.detach().clone().requires_grad_()
    own, targets = (split_sequence(group.size, group.rank, t) for t in (x, following))
    losses = functional.cross_entropy((own @ mine).mT, targets, reduction="none")
    loss = mean_over_sequence(group, losses, targets != -100)
    loss.backward()
    grad = group.all_reduce(mine.grad, op="avg")
    logits = gather_sequence(group, own @ mine)
    same = torch.equal(logits, x @ mine) or torch.allclose(logits, x @ mine, atol=1e-12)
    return loss.item(), expected.item(), (grad - weight.grad).abs().max().item(), same


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_loss_of_uneven_labels_is_the_mean_over_the_whole_sequence(world, size):
    for loss, expected, gap, same in world(size, _loss):
        assert abs(loss - expected) <= 1e-13 * expected
        assert gap <= 1e-13
        assert same


def _refusals(group: Group) -> list[str]:
    q, k, v, _ = (
        split_sequence(group.size, group.rank, x, 2) for x in tensors(8, 2, 2, torch.float32)
    )
    return [
        said_by(lambda: ring_attention(group, q, k[:, :, :2], v.double()), ConfigError),
        said_by(lambda: ring_attention(group, q[0], k, v), ConfigError),
        said_by(
            lambda: ring_attention(group, q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], causal=True),
            ConfigError,
        ),
        said_by(lambda: ring_attention(group, q, k.repeat(1, 2, 1, 1), v), ConfigError),
        said_by(lambda: all_to_all_attention(group, q, k[:, :1], v[:, :1]), ConfigError),
        said_by(
            lambda: mean_over_sequence(group, torch.ones(3), torch.zeros(3, dtype=torch.bool)),
            ConfigError,
        ),
        said_by(
            lambda: mean_over_sequence(group, torch.ones(3), torch.ones(2, dtype=torch.bool)),
            ConfigError,
        ),
    ]


def test_what_does_not_fit_is_named_before_anything_is_sent(world):
    first, second = world(2, _refusals)
    assert first == second
    several, dims, odd, heads, ulysses, empty, shapes = first
    assert (
        "the same floating-point dtype, got torch.float32, torch.float32 and torch.float64"
        in several
    )
    assert "numbers of positions differ" in several
    assert "k [2, 2, 2, 8]" in several
    assert "[batch, heads, positions, head width]" in dims
    assert "3 positions cannot be halved into an early and a late chunk" in odd
    assert (
        "2 heads of queries must be a multiple of the heads of keys and values, got 4 and 2"
        in heads
    )
    assert (
        "2 query heads and 1 key-value heads cannot be divided over 2 ranks; valid numbers of ranks: 1"
        in ulysses
    )
    assert "all positions of all ranks are ignored" in empty
    assert "must have the same shape" in shapes


def _lengths(group: Group, way: str) -> str:
    q, k, v, _ = tensors(4 + 2 * group.rank, 2, 2, torch.float32)
    return said_by(lambda: WAYS[way](group, q, k, v), MismatchError)


def test_different_lengths_on_ranks_are_named(world):
    for rank, text in enumerate(world(2, _lengths, "ring")):
        assert f"this rank has keys [2, 2, {4 + 2 * rank}, 8]" in text
        assert "rank 0  message(float32[2, 2, 2, 4, 8])" in text
        assert "rank 1  message(float32[2, 2, 2, 6, 8])" in text
    for rank, text in enumerate(world(2, _lengths, "all_to_all")):
        assert f"this rank has keys [2, 2, {4 + 2 * rank}, 8]" in text


def test_positions_are_those_of_the_cut():
    assert position_ids(2, 0, 8).tolist() == [0, 1, 6, 7]
