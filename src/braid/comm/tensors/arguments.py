"""Checks of arguments from users, and their conversion to tensors that an operation can use.

Tensors, numpy arrays and raw memory (`Buffer`) are accepted, with any strides; results need a
tensor whose elements do not overlap. Tensors that are not contiguous are copied and copied back
(`copies`). Tensors that require grad are used without recording gradients; `braid.comm.autograd`
has collectives with gradients. Empty and zero-dim tensors are allowed. In a group in shared memory,
CUDA tensors are copied through pinned memory.

`Parts` are data to divide among the members: one tensor that is cut into equal slices along dim 0,
or a sequence with one tensor per member, of any sizes.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from braid.errors import ConfigError

__all__ = ["MOST_TAG", "Buffer", "Data", "Parts", "as_tensor", "dense"]

MOST_TAG = 1 << 61  # tags of messages are smaller


@dataclass(frozen=True, slots=True)
class Buffer:
    """Raw memory; the caller keeps it alive until the operation has ended.

    Attributes:
        pointer: Address in this process.
        count: Number of elements.
        dtype: Dtype of the elements.
    """

    pointer: int
    count: int
    dtype: torch.dtype


Data: TypeAlias = "torch.Tensor | np.ndarray[Any, Any] | Buffer"
Parts: TypeAlias = "Data | Sequence[torch.Tensor]"


def as_tensor(x: Data, *, written: bool = False) -> torch.Tensor:
    """Return a tensor over the same memory.

    Args:
        x: Tensor, array or raw memory.
        written: Whether a result will be written to it.

    Raises:
        ConfigError: `x` has another type, or its memory cannot be used.
    """
    if isinstance(x, torch.Tensor):
        return ordinary(x)
    if isinstance(x, Buffer):
        return _from_pointer(x)
    if isinstance(x, np.ndarray):
        return _from_array(x, written=written)
    msg = (  # type: ignore[unreachable]  # users without a type checker
        f"{type(x).__name__} is not a torch.Tensor, a numpy array or a Buffer: wrap numbers "
        "with torch.tensor"
    )
    raise ConfigError(msg)


def dense(x: Data, devices: frozenset[str]) -> torch.Tensor | None:
    """Return `x` as a flat tensor over the same memory; None if it needs checks or a copy.

    Args:
        x: Value that the user passed.
        devices: Device types of tensors that need no copy to another device.
    """
    if (
        not isinstance(x, torch.Tensor)
        or x.layout is not torch.strided
        or x.device.type not in devices
        or not x.is_contiguous()
        or x.is_inference()
        or x.is_conj()
        or x.is_neg()
        or x.is_quantized
    ):
        return None
    if x.requires_grad:
        x = x.detach()
    flat = x if x.dim() == 1 else x.view(-1)
    # torch calls a tensor of one element contiguous for any stride, but with a stride other than 1
    # its bytes cannot be viewed
    return flat if flat.stride(0) == 1 else flat.as_strided((flat.numel(),), (1,))


def ordinary(x: torch.Tensor) -> torch.Tensor:
    """Return `x` as a tensor that may be written outside `torch.inference_mode`.

    Any thread that waits may take the steps of an operation, in any mode.
    """
    if not x.is_inference() or x.layout != torch.strided:
        return x
    with torch.inference_mode(False):
        same = torch.empty(0, dtype=x.dtype, device=x.device)
        return same.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


def like(x: Data, tensor: torch.Tensor) -> Any:
    """Return `tensor` as the type that the user passed: an array for arrays."""
    return tensor.numpy() if isinstance(x, np.ndarray) else tensor


class _Elements:
    """Addresses of a tensor's elements as a numpy array interface; the elements are not read."""

    def __init__(self, x: torch.Tensor) -> None:
        size = x.element_size()
        self.__array_interface__ = {
            "shape": tuple(x.shape),
            "strides": tuple(stride * size for stride in x.stride()),
            "typestr": f"|V{size}",
            "data": (x.data_ptr(), False),
            "version": 3,
        }


def overlap(one: torch.Tensor, other: torch.Tensor, *, exactly: bool) -> bool:
    """Return whether two tensors share memory.

    Args:
        one: Strided tensor.
        other: Another strided tensor.
        exactly: Whether to compare all elements, which is slow for large tensors, rather than only
            the ranges of addresses.
    """
    if not (one.numel() and other.numel()):
        return False
    arrays = np.asarray(_Elements(one)), np.asarray(_Elements(other))
    return np.may_share_memory(*arrays) and (not exactly or np.shares_memory(*arrays))


def result(out: Data | None, shape: tuple[int, ...], x: torch.Tensor) -> torch.Tensor:
    """Return the tensor for a result: the user's, or a new one like `x`.

    Raises:
        ConfigError: `out` has another shape or dtype.
    """
    if out is None:
        return ordinary(torch.empty(shape, dtype=x.dtype, device=x.device))
    tensor = as_tensor(out, written=True)
    fits = tuple(tensor.shape) == shape
    if isinstance(out, Buffer):
        fits = out.count == math.prod(shape)
    if not fits or tensor.dtype != x.dtype:
        msg = (
            f"out must have shape {list(shape)} and dtype {x.dtype}, got {list(tensor.shape)} "
            f"and {tensor.dtype}: leave it out, or pass a tensor that fits"
        )
        raise ConfigError(msg)
    return tensor


def check_peer(peer: int, size: int, role: str) -> None:
    """Raise if `peer` is not a group rank; the message names its `role`, such as root.

    Raises:
        ConfigError: `peer` is out of range, or not an integer.
    """
    if (type(peer) is not int and not is_number(peer)) or not 0 <= peer < size:
        msg = f"{peer!r} is not a {role} of this group: group ranks go from 0 to {size - 1}"
        raise ConfigError(msg)


def is_number(n: object) -> bool:
    """Return whether `n` is an integer of any type."""
    return hasattr(n, "__index__")


def check_seconds(timeout_s: Any, *, zero: bool = False) -> float | None:
    """Check a number of seconds from the user; None stays None.

    Args:
        timeout_s: Value that was passed.
        zero: Whether 0 is allowed.

    Raises:
        ConfigError: `timeout_s` is not a number of seconds.
    """
    if timeout_s is None:
        return None
    if not isinstance(timeout_s, int | float) or not (timeout_s > 0 or (zero and timeout_s == 0)):
        least = "of at least 0" if zero else "above 0"
        msg = (
            f"timeout_s must be a number of seconds, {least}, got {timeout_s!r}: for a timedelta "
            "pass total_seconds()"
        )
        raise ConfigError(msg)
    return float(timeout_s)


def check_movable(x: object) -> None:
    """Raise if a value has no storage in CPU memory.

    Raises:
        ConfigError: `x` is not a tensor on the CPU.
    """
    if not isinstance(x, torch.Tensor) or x.device.type != "cpu":
        description = f"one on {x.device}" if isinstance(x, torch.Tensor) else type(x).__name__
        msg = (
            f"only a dense tensor on the CPU can be moved to shared memory, got {description}: "
            "pass tensor.cpu()"
        )
        raise ConfigError(msg)


def check_parts(parts: Sequence[torch.Tensor], size: int, x: torch.Tensor, role: str) -> None:
    """Raise unless a sequence has one tensor per member, all like `x` in dtype and device.

    `role` is the text with which the error message begins.

    Raises:
        ConfigError: The number, a dtype or a device is wrong; the message names the parts.
    """
    if len(parts) != size:
        msg = f"{role} needs {size} tensors, one per rank, got {len(parts)}"
        raise ConfigError(msg)
    odd = [
        f"part {r}: {part.dtype} on {part.device}"
        for r, part in enumerate(parts)
        if part.dtype != x.dtype or part.device != x.device
    ]
    if odd:
        msg = (
            f"{role} mixes dtypes or devices: the first tensor is {x.dtype} on {x.device}, "
            f"except for {'; '.join(odd)}"
        )
        raise ConfigError(msg)


def slice_shape(x: torch.Tensor, size: int, kind: str) -> tuple[int, ...]:
    """Return the shape of one of `size` equal slices of dim 0.

    `kind` names the operation in the error message.

    Raises:
        ConfigError: dim 0 cannot be divided.
    """
    if x.dim() == 0 or x.shape[0] % size:
        length = "a zero-dim tensor" if x.dim() == 0 else f"{x.shape[0]}"
        msg = (
            f"dim 0 of the {kind} input is {length} (shape {list(x.shape)}), not a multiple of "
            f"the group's size {size}: pad it, or pass a list with one tensor per rank"
        )
        raise ConfigError(msg)
    return (x.shape[0] // size, *x.shape[1:])


def _from_pointer(x: Buffer) -> torch.Tensor:
    if not isinstance(x.dtype, torch.dtype):
        msg = f"a Buffer needs a dtype of torch, such as torch.float32, got {x.dtype!r}"  # type: ignore[unreachable]
        raise ConfigError(msg)
    if x.count < 0 or (x.count and not x.pointer):
        msg = f"a Buffer needs an address of memory and a count of at least 0 elements, got {x}"
        raise ConfigError(msg)
    if not x.count:
        return torch.empty(0, dtype=x.dtype, device="cpu")
    memory = (ctypes.c_char * (x.count * x.dtype.itemsize)).from_address(x.pointer)
    return torch.frombuffer(memory, dtype=x.dtype)


def _from_array(x: np.ndarray[Any, Any], *, written: bool) -> torch.Tensor:
    if not x.flags.writeable:
        if written:
            msg = "the array is read-only, so it cannot receive the result: pass x.copy()"
            raise ConfigError(msg)
        x = x.copy()  # torch warns about tensors on read-only memory
    try:
        return torch.from_numpy(x)
    except (TypeError, ValueError) as exc:
        msg = (
            f"torch cannot use the memory of a numpy array of dtype {x.dtype} with strides "
            f"{x.strides}: {exc}"
        )
        raise ConfigError(msg) from exc
