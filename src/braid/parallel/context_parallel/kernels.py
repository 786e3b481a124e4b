"""Attention of one block of queries and keys: forward with its logsumexp, and backward from it.

    S = scale Q K^T     L = log sum_j exp(S_j)     P = exp(S - L)     O = P V

Blocks of the same queries are merged by their logsumexps alone: with L = log(exp(L1) + exp(L2)),

    O = exp(L1 - L) O1 + exp(L2 - L) O2

Backward of a block needs L and O of *all* keys, and is then exact:

    D = rowsum(dO * O)    dV = P^T dO    dS = scale P * (dO V^T - D)    dQ = dS K    dK = dS^T Q

torch's flash kernels compute exactly this. Without such a kernel, `MatmulKernel` computes it with
plain products; it is also the reference for tests of the kernels.

    B batch, H heads of queries, K heads of keys and values (H is a multiple), S and T positions,
    D width of a head

Source: T. Dao et al., FlashAttention, 2022, sections 3.1 and B.4; M. Milakov, N. Gimelshein, Online
normalizer calculation for softmax, 2018.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, cast

import torch

from braid.runtime.torch_internals import (
    flash_attention,
    flash_attention_backward,
    flash_attention_backward_on_cpu,
    flash_attention_on_cpu,
)

__all__ = ["FlashKernelCUDA", "Kernel", "KernelInputs", "MatmulKernel", "kernel_for", "merge"]

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
HALF = (torch.float16, torch.bfloat16)


class KernelInputs(NamedTuple):
    """Queries, keys and values of a block.

    Attributes:
        q: Queries.
        k: Keys.
        v: Values.
        causal: Whether query i attends to keys up to i only.
        scale: Factor of the products.

    Shape:
        q: (B, H, S, D); k and v: (B, K, T, D).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool
    scale: float


class Kernel(Protocol):
    """Attention kernel for one block; results may have a wider dtype than the inputs."""

    def forward(self, inputs: KernelInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block's output (B, H, S, D) and logsumexp (B, H, S)."""

    def backward(
        self, inputs: KernelInputs, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> Tensors:
        """Return this block's terms of the gradients of q, k and v.

        Args:
            inputs: Inputs of the forward.
            grad: Gradient of the output.
            out: Output over all keys, in the dtype of q.
            lse: Logsumexp over all keys.
        """


class MatmulKernel:
    """Attention kernel of plain matrix products, at least in float32, for any device and dtype."""

    def forward(self, inputs: KernelInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block's output and logsumexp; see `Kernel.forward`."""
        scores = _scores(inputs)
        lse = scores.logsumexp(-1)
        return (scores - lse.unsqueeze(-1)).exp() @ _repeated(inputs.v, inputs.q.shape[1]), lse

    def backward(
        self, inputs: KernelInputs, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> Tensors:
        """Return this block's terms of the gradients of q, k and v; see `Kernel.backward`."""
        q, k, v, _, scale = inputs
        heads, kv_heads = q.shape[1], k.shape[1]
        p = (_scores(inputs) - lse.unsqueeze(-1)).exp()
        grad, out = _wide(grad), _wide(out)
        total = (grad * out).sum(-1, keepdim=True)
        ds = p * (grad @ _repeated(v, heads).mT - total) * scale
        dq = ds @ _repeated(k, heads)
        dk, dv = ds.mT @ _wide(q), p.mT @ grad
        return dq, _summed(dk, kv_heads), _summed(dv, kv_heads)


class FlashKernelCPU:
    """Kernel of torch's flash attention on the CPU, for float32, float64, bfloat16 and float16."""

    def forward(self, inputs: KernelInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block's output and logsumexp; see `Kernel.forward`."""
        q, k, v, causal, scale = inputs
        out, lse = flash_attention_on_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, lse

    def backward(
        self, inputs: KernelInputs, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> Tensors:
        """Return this block's terms of the gradients of q, k and v; see `Kernel.backward`."""
        q, k, v, causal, scale = inputs
        flash = flash_attention_backward_on_cpu
        return cast("Tensors", flash(grad, q, k, v, out, lse, 0.0, causal, scale=scale))


class FlashKernelCUDA:
    """Kernel of torch's flash attention on GPUs, for bfloat16 and float16."""

    def forward(self, inputs: KernelInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block's output and logsumexp; see `Kernel.forward`."""
        q, k, v, causal, scale = inputs
        k, v = _repeated_as_is(k, q.shape[1]), _repeated_as_is(v, q.shape[1])
        out, lse, *_ = flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse

    def backward(
        self, inputs: KernelInputs, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> Tensors:
        """Return this block's terms of the gradients of q, k and v; see `Kernel.backward`."""
        q, k, v, causal, scale = inputs
        heads = q.shape[1]
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # for dropout, which is 0
        none: Any = None
        dq, dk, dv = flash_attention_backward(
            *(grad, q, _repeated_as_is(k, heads), _repeated_as_is(v, heads), out, lse),
            *(none, none, q.shape[2], k.shape[2], 0.0, causal, seed, seed[:0]),
            scale=scale,
        )
        return dq, _summed(dk, k.shape[1]), _summed(dv, k.shape[1])


def kernel_for(q: torch.Tensor, v: torch.Tensor) -> Kernel:
    """Return the kernel for tensors of this device, dtype and width."""
    width = q.shape[-1]
    if width == v.shape[-1] and q.numel():
        if q.device.type == "cpu" and q.dtype in {torch.float32, torch.float64, *HALF}:
            return FlashKernelCPU()
        if q.device.type == "cuda" and q.dtype in HALF and width % 8 == 0 and width <= 256:
            return FlashKernelCUDA()
    return MatmulKernel()


def merge(
    out: torch.Tensor, lse: torch.Tensor, block_out: torch.Tensor, block_lse: torch.Tensor
) -> None:
    """Merge the attention to another block of keys into `out` and `lse` (logsumexp), in place."""
    total = torch.logaddexp(lse, block_lse)
    out.mul_((lse - total).exp().unsqueeze(-1))
    out.addcmul_(block_out.to(out.dtype), (block_lse - total).exp().unsqueeze(-1))
    lse.copy_(total)


def _scores(inputs: KernelInputs) -> torch.Tensor:
    q, k, _, causal, scale = inputs
    scores = _wide(q) @ _repeated(k, q.shape[1]).mT * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def _repeated(x: torch.Tensor, heads: int) -> torch.Tensor:
    return _wide(_repeated_as_is(x, heads))


def _repeated_as_is(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Return keys or values with each head repeated for its query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _summed(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return the gradient of key or value heads, summed over their repetitions."""
    if x.shape[1] == kv_heads:
        return x
    return _wide(x).view(x.shape[0], kv_heads, -1, *x.shape[2:]).sum(2)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in HALF else x
