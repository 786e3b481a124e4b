"""Ring attention: keys and values are passed around the ranks, which compute in the meantime.

    step     rank 0        rank 1        rank 2        rank 3
    0        q0 with k0    q1 with k1    q2 with k2    q3 with k3        each sends its k, v
    1        q0 with k3    q1 with k0    q2 with k1    q3 with k2        while it computes
    2        q0 with k2    q1 with k3    q2 with k0    q3 with k1
    3        q0 with k1    q1 with k2    q2 with k3    q3 with k0

In addition to its own, a rank holds keys and values of at most two other ranks, so the length of a
sequence is limited by the memory of all ranks together. Outputs of the steps are merged by their
logsumexps (see `kernels`).

Backward is a second pass around the ring. It uses the logsumexps, but no outputs of single steps.
The gradients of keys and values are sent with them: each rank adds its term, in the order of the
ring, and the last rank sends the sum to the owner. All sums have a fixed order, so two runs are
bitwise equal.

Bytes that a rank sends, for n ranks; kv: bytes of a rank's keys and values; wide: bytes of a number
in sums divided by bytes of a number (2 for bfloat16):

    forward (n-1) kv        backward (n-1) (1 + wide) kv

With equal numbers of key and query heads, a ring sends n/2 times as many bytes in forward as
all-to-all attention (`heads`); with g times fewer key heads, n/(g+1) times.

Source: H. Liu, M. Zaharia, P. Abbeel, Ring attention with blockwise transformers for near-infinite
context, 2023; `sequence` describes the balanced chunks.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch

from braid.comm import Group
from braid.comm.autograd.phony import phony
from braid.parallel.context_parallel.arguments import as_autocast, check_attention
from braid.parallel.context_parallel.blocks import AttentionBlock, block_of
from braid.parallel.context_parallel.kernels import HALF, Kernel, KernelInputs, kernel_for, merge
from braid.parallel.context_parallel.travel import GRADIENTS, Arriving, Pair, pass_on, travelling
from braid.programs.cost import Cost

__all__ = ["ring_attention", "ring_costs"]


def ring_attention(
    group: Group,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    balanced: bool = True,
) -> torch.Tensor:
    """Return the attention of this rank's queries to the keys and values of all ranks.

    Args:
        group: Ranks that share the sequences.
        q: Queries of this rank's positions.
        k: Keys of this rank's positions; the number of query heads is a multiple of key heads.
        v: Values of this rank's positions, with the same number of heads as keys.
        causal: Whether a position attends to no later positions.
        scale: Factor of the products; None for one over the square root of the width.
        balanced: Whether a rank's positions are an early and a late chunk (see `split_sequence`);
            only used with `causal`.

    Shape:
        q: (B, H, s, D); k and v: (B, K, s, D) with s the positions of each rank. Result: as q.

    Returns:
        The output, in the dtype of q; float16 and bfloat16 are summed in float32.

    Backward: another pass around the ring; every rank must call it.

    Raises:
        ConfigError: Shapes are invalid; the message has all problems.
        MismatchError: Numbers of positions or heads, or dtypes, differ between ranks.

    Cost: forward n-1 messages with the bytes of k and v; backward the same, and n-1 messages with
        their gradients (float32 for float16 and bfloat16). They overlap with n blocks of products.
    """
    q, k, v = as_autocast(q, k, v)
    check_attention(group, q, k, v, halves=causal and balanced)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    options = _Options(group, causal, balanced, factor)
    edge = phony(q.device, True)
    return cast("torch.Tensor", _Ring.apply(options, edge, q, k, v))  # type: ignore[no-untyped-call]


class _Options(NamedTuple):
    """Arguments of a call that are not tensors."""

    group: Group
    causal: bool
    balanced: bool
    scale: float

    def block(self, step: int, length: int) -> AttentionBlock | None:
        """Return the attention block of a step of the ring; None if all of it is masked."""
        rank = self.group.rank
        source = (rank - step) % self.group.size
        return block_of(rank, source, length, causal=self.causal, balanced=self.balanced)


class _Ring(torch.autograd.Function):
    """Autograd function of both passes around the ring."""

    @staticmethod
    def forward(
        ctx: Any,
        options: _Options,
        edge: torch.Tensor,  # noqa: ARG004 - so that backward runs on every rank
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        with torch.autocast(q.device.type, enabled=False):
            out, lse = _forward_pass(options, kernel_for(q, v), q, k, v)
        out = out.to(q.dtype)
        ctx.options = options
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            kernel = kernel_for(saved[0], saved[2])
            grads = _backward_pass(ctx.options, kernel, grad, *saved)
        return None, None, *grads


def _forward_pass(
    options: _Options, kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and logsumexp over all keys, in float32 at least, after a pass of the ring."""
    local_pair = Pair.of(k, v)
    out = lse = None
    for step, pair in enumerate(travelling(options.group, local_pair)):
        block = options.block(step, q.shape[2])
        if block is None:
            continue
        inputs = _inputs(options, q, pair, block)
        block_out, block_lse = kernel.forward(inputs)
        if out is None or lse is None:  # step 0: each query attends to some of the rank's own keys
            wide = torch.float32 if block_out.dtype in HALF else block_out.dtype
            out, lse = block_out.to(wide, copy=True), block_lse.clone()
        else:
            merge(out[:, :, block.queries], lse[:, :, block.queries], block_out, block_lse)
    assert out is not None
    assert lse is not None
    return out, lse


def _backward_pass(
    options: _Options,
    kernel: Kernel,
    grad: torch.Tensor,
    *saved: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of the saved q, k and v, after another pass of the ring."""
    q, k, v, out, lse = saved
    group, wide = options.group, lse.dtype
    grad_q = torch.zeros_like(q, dtype=wide)
    local_grads = Pair.of(torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide))
    arriving: Arriving | None = None  # sums for the keys of the next step
    for step, pair in enumerate(travelling(group, Pair.of(k, v))):
        # the first rank that receives another rank's keys starts their sum
        terms = local_grads if step == 0 else local_grads.like(torch.zeros_like(local_grads.flat))
        block = options.block(step, q.shape[2])
        if block is not None:
            rows = block.queries
            inputs = _inputs(options, q, pair, block)
            dq, dk, dv = kernel.backward(inputs, grad[:, :, rows], out[:, :, rows], lse[:, :, rows])
            grad_q[:, :, rows].add_(dq)
            grad_k, grad_v = terms.rows(block.keys)
            grad_k += dk
            grad_v += dv
        if step == 0:
            continue
        if arriving is not None:
            arriving.wait_and_add_to(terms)
        arriving = pass_on(group, terms, GRADIENTS)
    if arriving is not None:
        arriving.wait_and_add_to(local_grads)
    return grad_q.to(q.dtype), local_grads.keys.to(k.dtype), local_grads.values.to(v.dtype)


def _inputs(options: _Options, q: torch.Tensor, pair: Pair, block: AttentionBlock) -> KernelInputs:
    """Return the queries, keys and values of a block."""
    keys, values = pair.rows(block.keys)
    return KernelInputs(q[:, :, block.queries], keys, values, block.is_causal, options.scale)


def ring_costs(size: int, kv_bytes: int, *, wide: int = 1) -> tuple[Cost, Cost]:
    """Return the costs of `ring_attention`, forward and backward.

    Args:
        size: Number of ranks.
        kv_bytes: Bytes of a rank's keys and values.
        wide: Size of a number in gradient sums, divided by its size in keys: 2 for 16-bit dtypes.
    """
    hops = size - 1
    return Cost(hops, hops * kv_bytes), Cost(2 * hops, hops * (1 + wide) * kv_bytes)
