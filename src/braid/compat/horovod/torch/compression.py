"""Compression: gradients are sent as 16-bit floats."""

from __future__ import annotations

import torch

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class Compressor:
    """Base of conversions of a tensor before sending and after receiving."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, object]:
        """Return the tensor to send, and the context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: object) -> torch.Tensor:
        """Return a received tensor in its original form."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Compressor that does not change tensors."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, object]:
        """Return the tensor."""
        return tensor, None

    @staticmethod
    # `ctx` is part of the interface
    def decompress(tensor: torch.Tensor, ctx: object) -> torch.Tensor:  # noqa: ARG004
        """Return the tensor."""
        return tensor


class _Cast(Compressor):
    dtype = torch.float16

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, object]:
        """Return floating-point tensors in 16 bits, and others unchanged."""
        if tensor.dtype.is_floating_point:
            return tensor.to(cls.dtype), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: object) -> torch.Tensor:
        """Return the tensor in its original dtype."""
        return tensor.to(ctx) if isinstance(ctx, torch.dtype) else tensor


class FP16Compressor(_Cast):
    """Compressor to float16."""


class BF16Compressor(_Cast):
    """Compressor to bfloat16: the range of float32, a third of its digits."""

    dtype = torch.bfloat16


class Compression:
    """The compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
