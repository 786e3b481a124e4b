"""Tensors beside messages: no copy at the sender, and memory of the receiver's choice.

    class Gradients(msgspec.Struct, tag="gradients"):
        specs: list[TensorSpec]

    specs, buffers = as_buffers(tensors)
    van.send("server:0", Gradients(specs), buffers=buffers)

    delivery = van.recv()
    tensors = from_buffers(delivery.message.specs, delivery.buffers)

To receive into existing tensors: `van.receive_into(Gradients, lambda sender, message, sizes:
[memory_of(t) for t in mine])`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np
import torch

from braid.errors import CommError, ConfigError
from braid.types import TensorSpec, dtype_name

__all__ = ["as_buffers", "bytes_of", "checksum", "from_buffers", "memory_of"]

NUM_COLUMNS = 509  # of a checksum

_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_NAMES = {dtype: dtype_name(dtype) for dtype in _DTYPES.values()}
# numpy has these dtypes, so their bytes need no view of another dtype.
_SIMPLE = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bool, torch.uint8),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
    }
)


def as_buffers(tensors: Sequence[torch.Tensor]) -> tuple[list[TensorSpec], list[memoryview]]:
    """Return the specs to write into a message, and the buffers to send beside it.

    Contiguous tensors on the CPU are not copied: do not change them until the sending is `done`.
    Other tensors are copied once.

    Raises:
        ConfigError: A tensor has no plain memory: it is sparse, quantized, or on meta.
    """
    specs, buffers = [], []
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            msg = (
                f"cannot send a tensor of {tensor.layout} {tensor.dtype} on {tensor.device}, "
                "which is not dense: send its indices and values, or a dense tensor"
            )
            raise ConfigError(msg)
        specs.append(TensorSpec(tuple(tensor.shape), _NAMES[tensor.dtype], tensor.requires_grad))
        buffers.append(bytes_of(tensor))
    return specs, buffers


def from_buffers(specs: Sequence[TensorSpec], buffers: Sequence[memoryview]) -> list[torch.Tensor]:
    """Return the tensors that `as_buffers` described, as views of `buffers`.

    Raises:
        CommError: The buffers do not have the sizes of the specs (the sender's mistake).
    """
    if len(specs) != len(buffers):
        msg = (
            f"{len(specs)} tensors need the same number of buffers, got {len(buffers)}: send both "
            "as as_buffers returned them"
        )
        raise CommError(msg)
    tensors = []
    for spec, buffer in zip(specs, buffers, strict=True):
        dtype = _DTYPES.get(spec.dtype)
        if dtype is None or min(spec.shape, default=0) < 0:
            msg = f"{spec} is not the spec of a tensor: send the specs from as_buffers"
            raise CommError(msg)
        nbytes = math.prod(spec.shape) * dtype.itemsize
        if nbytes != buffer.nbytes:
            msg = f"{spec} has {nbytes} bytes, but its buffer has {buffer.nbytes}"
            raise CommError(msg)
        if nbytes:
            flat = torch.frombuffer(buffer, dtype=dtype)
            tensors.append(flat if len(spec.shape) == 1 else flat.reshape(spec.shape))
        else:
            tensors.append(torch.empty(spec.shape, dtype=dtype))
    return tensors


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of any dense tensor, from a copy if its memory is not plain.

    Plain memory is contiguous, on the CPU, and without lazy conjugation or negation.
    """
    # `detach` only if needed: it may switch to another thread, and then waits
    tensor = tensor.detach() if tensor.requires_grad else tensor
    is_plain = tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()
    if is_plain and tensor.dtype in _SIMPLE and tensor.numel():
        return tensor.numpy().data.cast("B")
    return memory_of(tensor.resolve_conj().resolve_neg().to("cpu").contiguous())


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, to send from or to receive into.

    Raises:
        ConfigError: Its memory is on another device, or not contiguous.
    """
    is_lazy = tensor.is_conj() or tensor.is_neg()
    if not tensor.is_cpu or not tensor.is_contiguous() or is_lazy:
        msg = (
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} on "
            f"{tensor.device} is not contiguous memory on the CPU: use a contiguous copy"
        )
        raise ConfigError(msg)
    if not tensor.numel():
        return memoryview(b"")
    # dims of length 1 may have any stride in a contiguous tensor
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def checksum(tensor: torch.Tensor) -> int:
    """Return a checksum of a tensor's bits; 0 if it is empty.

    It is the CRC-32 of the sums of 64-bit words by column, which takes a sixth of the time of the
    CRC-32 of all words. The number of columns is a prime, so that a permutation of a tensor's rows
    changes the sums.
    """
    if not tensor.numel():
        return 0
    words = np.frombuffer(bytes_of(tensor), np.uint8)
    end = len(words) // (8 * NUM_COLUMNS) * 8 * NUM_COLUMNS
    sums = words[:end].view(np.uint64).reshape(-1, NUM_COLUMNS).sum(0)
    return zlib.crc32(words[end:].data, zlib.crc32(sums.data))
