"""Cuts of sequences, blocks that meet, and kernels of one block, without ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import ConfigError
from braid.parallel.context_parallel import (
    join_sequence,
    pad_sequence,
    padded_length,
    position_ids,
    split_sequence,
)
from braid.parallel.context_parallel.blocks import block_of
from braid.parallel.context_parallel.kernels import (
    FlashKernelCUDA,
    KernelInputs,
    MatmulKernel,
    kernel_for,
    merge,
)

SIZES, CHUNKS = st.integers(1, 6), st.integers(1, 4)


@given(size=SIZES, width=CHUNKS, dim=st.integers(-2, 1), balanced=st.booleans())
def test_joining_the_parts_of_a_sequence_gives_the_sequence(size, width, dim, balanced):
    length = padded_length(size, size * width, balanced=balanced)
    x = torch.arange(length * length).view(length, length)
    parts = [split_sequence(size, rank, x, dim, balanced=balanced) for rank in range(size)]
    assert len({part.shape for part in parts}) == 1
    assert torch.equal(join_sequence(parts, dim, balanced=balanced), x)


@given(size=SIZES, length=st.integers(1, 40), balanced=st.booleans())
def test_padding_reaches_the_next_length_that_can_be_divided(size, length, balanced):
    x = torch.ones(2, length)
    padded = pad_sequence(size, x, 7.0, balanced=balanced)
    assert padded.shape[1] == padded_length(size, length, balanced=balanced) >= length
    assert torch.equal(padded[:, :length], x)
    assert (padded[:, length:] == 7).all()
    assert padded_length(size, length - 1, balanced=balanced) <= padded.shape[1]
    assert split_sequence(size, 0, padded, balanced=balanced).shape[1] == padded.shape[1] // size


def test_positions_of_three_ranks_are_an_early_and_a_late_chunk():
    positions = [position_ids(3, rank, 12).tolist() for rank in range(3)]
    assert positions == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert position_ids(3, 1, 12, balanced=False).tolist() == [4, 5, 6, 7]


def test_lengths_that_cannot_be_divided_are_named():
    with pytest.raises(ConfigError, match=r"13 positions .* over 3 ranks in 6 .* pad it to 18"):
        split_sequence(3, 0, torch.ones(2, 13))
    with pytest.raises(ConfigError, match=r"in 3 equal chunks.* pad it to 15"):
        split_sequence(3, 0, torch.ones(2, 13), balanced=False)
    with pytest.raises(ConfigError, match=r"parts of \[4, 2\] positions"):
        join_sequence([torch.ones(1, 4), torch.ones(1, 2)])
    with pytest.raises(ConfigError, match="no dim 2"):
        split_sequence(1, 0, torch.ones(2, 4), 2)


@given(size=SIZES, width=CHUNKS, causal=st.booleans(), balanced=st.booleans())
def test_the_blocks_that_meet_are_the_pairs_that_a_mask_allows(size, width, causal, balanced):
    """Each query meets each key that it may see once; with the balanced cut ranks do equal work."""
    length = size * width * 2
    own = length // size
    seen = torch.zeros(length, length, dtype=torch.int64)
    products = []
    for rank in range(size):
        products.append(0)
        for source in range(size):
            block = block_of(rank, source, own, causal=causal, balanced=balanced)
            if block is None:
                continue
            queries = position_ids(size, rank, length, balanced=balanced)[block.queries]
            keys = position_ids(size, source, length, balanced=balanced)[block.keys]
            pairs = torch.ones(len(queries), len(keys), dtype=torch.int64)
            pairs = pairs.tril() if block.is_causal else pairs
            seen[queries[:, None], keys] += pairs
            products[-1] += int(pairs.sum())
    every = torch.ones(length, length, dtype=torch.int64)
    assert torch.equal(seen, every.tril() if causal else every)
    assert len(set(products)) == 1 or not balanced


def _drawn(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)],
)
def test_torch_s_kernel_computes_what_plain_products_do(dtype, tolerance, kv_heads, causal):
    q, grad, out = (_drawn(2, 4, 6, 8, seed=seed, dtype=dtype) for seed in range(3))
    k, v = (_drawn(2, kv_heads, 6, 8, seed=seed, dtype=dtype) for seed in (3, 4))
    kernel, plain = kernel_for(q, v), MatmulKernel()
    assert not isinstance(kernel, MatmulKernel)
    inputs = KernelInputs(q, k, v, causal, 0.4)
    expected = plain.forward(inputs)
    results = list(zip(kernel.forward(inputs), expected, strict=True))
    saved = (inputs, grad, out, expected[1])
    results += zip(kernel.backward(*saved), plain.backward(*saved), strict=True)
    for ours, theirs in results:
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_widths_without_a_kernel_are_computed_by_plain_products():
    q, v = torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 6)
    assert isinstance(kernel_for(q, v), MatmulKernel)
    assert isinstance(kernel_for(q.to("meta"), q.to("meta")), MatmulKernel)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_of_gpus_has_the_shapes_of_plain_products(dtype):
    """On tensors without data, as its numbers need a GPU."""
    q, kv = (torch.empty(2, *shape, 8, dtype=dtype, device="meta") for shape in [(4, 6), (2, 3)])
    results = []
    for kernel in (FlashKernelCUDA(), MatmulKernel()):
        inputs = KernelInputs(q, kv, kv, causal=False, scale=0.4)
        out, lse = kernel.forward(inputs)
        grads = kernel.backward(inputs, q, q, lse)
        results.append([x.shape for x in (out, lse, *grads)])
    assert results[0] == results[1]


@given(seed=st.integers(0, 99), size=st.integers(1, 5), shift=st.sampled_from([0.0, 200.0, -200.0]))
def test_blocks_of_keys_are_joined_by_their_logsumexps(seed, size, shift):
    """Also where the scores of one block are so large that their exponentials overflow."""
    q = _drawn(1, 2, 3, 4, seed=seed, dtype=torch.float64)
    k, v = (_drawn(1, 2, 2 * size, 4, seed=s, dtype=torch.float64) for s in (seed + 1, seed + 2))
    k[:, :, 0] *= shift or 1.0
    plain = MatmulKernel()
    expected, total = plain.forward(KernelInputs(q, k, v, causal=False, scale=9.0))
    parts = [
        plain.forward(KernelInputs(q, *pair, causal=False, scale=9.0))
        for pair in zip(k.chunk(size, 2), v.chunk(size, 2), strict=True)
    ]
    out, lse = parts[0]
    for part in parts[1:]:
        merge(out, lse, *part)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(lse, total)
