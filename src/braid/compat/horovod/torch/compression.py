"""Fewer bytes on the wire: gradients as 16-bit floats while they travel."""

from __future__ import annotations

import torch

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class Compressor:
    """What is done to a tensor before it leaves, and after it has come; to be derived from."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, object]:
        """The tensor that travels, and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: object) -> torch.Tensor:
        """The tensor as it was, from what has come and what `compress` said."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves it."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, object]:
        """The tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: object) -> torch.Tensor:  # noqa: ARG004 - the interface
        """The tensor."""
        return tensor


class _Cast(Compressor):
    dtype = torch.float16

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, object]:
        """Floats in 16 bits; other dtypes stay."""
        if tensor.dtype.is_floating_point:
            return tensor.to(cls.dtype), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: object) -> torch.Tensor:
        """In its own dtype."""
        return tensor.to(ctx) if isinstance(ctx, torch.dtype) else tensor


class FP16Compressor(_Cast):
    """float16."""


class BF16Compressor(_Cast):
    """bfloat16: the range of float32, a third of its digits."""

    dtype = torch.bfloat16


class Compression:
    """Those that there are."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
