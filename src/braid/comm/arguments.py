"""What users pass -> flat tensors as algorithms want them.

Tensors, numpy arrays and raw memory (`Buffer`) are welcome. Any strided tensor will do (results need one whose elements do
not overlap): non-contiguous ones are copied and copied back, those that require grad are used without autograd noticing
(collectives with gradients are another room), empty and zero-dim ones are ordinary. CUDA tensors of a group in shared
memory travel through a copy in pinned memory.

`Parts` are what an operation divides among the members: one tensor whose dim 0 is cut into equal slices, or a sequence
with one tensor per member, whose sizes may differ.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from braid.errors import ConfigError

__all__ = ["Buffer", "Data", "Flat", "Parts", "apart", "as_tensor", "flatten", "flatten_parts"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """Raw memory: `count` numbers of `dtype` at `pointer`. The caller keeps it alive until the operation has ended.

    Attributes:
        pointer: Address in this process.
        count: Number of elements.
        dtype: torch's type.
    """

    pointer: int
    count: int
    dtype: torch.dtype


Data: TypeAlias = "torch.Tensor | np.ndarray[Any, Any] | Buffer"
Parts: TypeAlias = "Data | Sequence[torch.Tensor]"
Flat = tuple[torch.Tensor, Callable[[], object] | None]  # and what copies it back


def as_tensor(x: Data, *, written: bool = False) -> torch.Tensor:
    """A tensor over the same memory.

    Args:
        x: Tensor, array or raw memory.
        written: Whether a result goes there.

    Raises:
        ConfigError: Something else, or memory that cannot be used so.
    """
    if isinstance(x, torch.Tensor):
        return ordinary(x)
    if isinstance(x, Buffer):
        return _from_pointer(x)
    if isinstance(x, np.ndarray):
        return _from_array(x, written=written)
    msg = (  # type: ignore[unreachable]  # users without a type checker
        f"expected a torch.Tensor, a numpy array or a Buffer, found {type(x).__name__}: wrap numbers with torch.tensor"
    )
    raise ConfigError(msg)


def ordinary(x: torch.Tensor) -> torch.Tensor:
    """`x`, or the same memory as a tensor that may be written outside of `torch.inference_mode`.

    The steps of an operation are taken by whoever waits, in whatever mode that is.
    """
    if not x.is_inference() or x.layout != torch.strided:
        return x
    with torch.inference_mode(False):
        same = torch.empty(0, dtype=x.dtype, device=x.device)
        return same.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


def like(x: Data, tensor: torch.Tensor) -> Any:
    """`tensor` as what the user works with: an array for arrays."""
    return tensor.numpy() if isinstance(x, np.ndarray) else tensor


def flatten(x: torch.Tensor, device_types: frozenset[str], *, written: bool) -> Flat:
    """A flat tensor for an algorithm to read and write.

    Args:
        x: As the user passed it.
        device_types: Devices on which the group's engine works; tensors on CUDA are copied to the CPU for others.
        written: Whether a result goes there.

    Returns:
        The flat tensor, and what to call afterwards if it is a copy.

    Raises:
        ConfigError: One that cannot be communicated.
    """
    if x.device.type not in device_types and x.device.type != "cuda":
        msg = (
            f"expected a tensor on {' or '.join(sorted(device_types))}, found one on {x.device}: this group has no "
            "engine for that device; move the tensor, or make a group with a backend for it"
        )
        raise ConfigError(msg)
    if x.layout != torch.strided or x.is_quantized:
        kind = "quantized" if x.is_quantized else str(x.layout)
        msg = f"expected an ordinary strided tensor, found a {kind} one: convert it first (to_dense, dequantize)"
        raise ConfigError(msg)
    if x.requires_grad:
        x = x.detach()
    if x.device.type not in device_types:
        return _pinned(x)
    if x.is_contiguous() and not x.is_conj() and not x.is_neg():
        flat = x.view(-1)
        # a tensor of one element counts as contiguous whatever its stride, but its bytes cannot be viewed
        return (flat if flat.stride(0) == 1 else x.as_strided((x.numel(),), (1,))), None
    if written and any(
        stride == 0 and n > 1 for stride, n in zip(x.stride(), x.shape, strict=True)
    ):
        msg = (
            f"expected a tensor whose elements each have their own memory, found shape {list(x.shape)} with strides "
            f"{x.stride()}: pass x.clone(), an expanded tensor cannot hold a result"
        )
        raise ConfigError(msg)
    flat = x.resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.data_ptr() == x.data_ptr():
        flat = flat.clone()
    flat = ordinary(flat)
    shape = x.shape
    return flat, lambda: x.copy_(flat.view(shape))


def flatten_parts(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One flat tensor that holds flat `parts` one after the other; no copy if they already lie so."""
    first = parts[0]
    end = first.data_ptr()
    for part in parts:
        if part.data_ptr() != end and part.numel():
            return torch.cat(list(parts))
        end += part.numel() * part.element_size()
    numel = sum(part.numel() for part in parts)
    storage = first.untyped_storage()
    if first.storage_offset() * first.element_size() + numel * first.element_size() > len(storage):
        return torch.cat(list(parts))  # neighbours in memory by chance
    return first.as_strided((numel,), (1,))


def apart(x: torch.Tensor, outs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Flat `x`, or a copy of it if one of `outs` shares memory with it: results are stored while peers still read."""
    start, end = x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()
    for out in outs:
        out_start = out.data_ptr()
        if start < out_start + out.numel() * out.element_size() and out_start < end:
            return x.clone()
    return x


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors may have memory in common, whatever their strides."""
    storages = sorted(
        (x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for x in (one, other)
    )
    return sum(storages[0]) > storages[1][0]


def result(out: Data | None, shape: tuple[int, ...], x: torch.Tensor) -> torch.Tensor:
    """The tensor for a result: the user's if it fits, else a new one like `x`.

    Raises:
        ConfigError: `out` has another shape or dtype.
    """
    if out is None:
        return ordinary(torch.empty(shape, dtype=x.dtype, device=x.device))
    found = as_tensor(out, written=True)
    fits = tuple(found.shape) == shape
    if isinstance(out, Buffer):
        count = 1
        for extent in shape:
            count *= extent
        fits = out.count == count
    if not fits or found.dtype != x.dtype:
        msg = (
            f"expected out of shape {list(shape)} and dtype {x.dtype}, found {list(found.shape)} and "
            f"{found.dtype}: leave it out, or pass a tensor that fits"
        )
        raise ConfigError(msg)
    return found


def check_peer(peer: int, size: int, role: str) -> None:
    """Refuse a group rank that is none.

    Raises:
        ConfigError: Out of range, or no whole number.
    """
    if not hasattr(peer, "__index__") or not 0 <= peer < size:
        msg = f"expected a {role} out of 0..{size - 1} (group ranks), found {peer!r}"
        raise ConfigError(msg)


def check_parts(parts: Sequence[torch.Tensor], size: int, x: torch.Tensor, role: str) -> None:
    """Refuse a sequence that has not one tensor per member, all of one dtype and device.

    Raises:
        ConfigError: Says what is wrong with which.
    """
    if len(parts) != size:
        msg = f"expected {size} tensors as {role}, one for every member, found {len(parts)}"
        raise ConfigError(msg)
    odd = [
        f"part {r}: {part.dtype} on {part.device}"
        for r, part in enumerate(parts)
        if part.dtype != x.dtype or part.device != x.device
    ]
    if odd:
        msg = f"expected {role} of dtype {x.dtype} on {x.device}, found {'; '.join(odd)}"
        raise ConfigError(msg)


def slice_shape(x: torch.Tensor, size: int, kind: str) -> tuple[int, ...]:
    """Shape of one of `size` equal slices of dim 0.

    Raises:
        ConfigError: dim 0 cannot be divided.
    """
    if x.dim() == 0 or x.shape[0] % size:
        found = "a zero-dim tensor" if x.dim() == 0 else f"{x.shape[0]}"
        msg = (
            f"expected dim 0 of the {kind} input to be a multiple of the group's size {size}, found {found} "
            f"(shape {list(x.shape)}): pad it, or pass a list with one tensor per rank"
        )
        raise ConfigError(msg)
    return (x.shape[0] // size, *x.shape[1:])


def _pinned(x: torch.Tensor) -> Flat:
    """A copy of a CUDA tensor in page-locked memory, and the way back.

    Both copies are ordered with the stream that is current when they are made, and the host waits for them: shared memory
    knows nothing of streams.
    """
    host = ordinary(torch.empty(x.numel(), dtype=x.dtype, pin_memory=True))
    stream = torch.cuda.current_stream(x.device)
    host.view(x.shape).copy_(x, non_blocking=True)
    stream.synchronize()

    def back() -> None:
        with torch.cuda.stream(stream):
            x.copy_(host.view(x.shape), non_blocking=True)
        stream.synchronize()

    return host, back


def _from_pointer(x: Buffer) -> torch.Tensor:
    if x.count < 0 or (x.count and not x.pointer):
        msg = f"expected an address and a count, found {x}"
        raise ConfigError(msg)
    if not x.count:
        return torch.empty(0, dtype=x.dtype)
    memory = (ctypes.c_char * (x.count * x.dtype.itemsize)).from_address(x.pointer)
    return torch.frombuffer(memory, dtype=x.dtype)


def _from_array(x: np.ndarray[Any, Any], *, written: bool) -> torch.Tensor:
    if not x.flags.writeable:
        if written:
            msg = "expected an array that can hold the result, found a read-only one: pass x.copy()"
            raise ConfigError(msg)
        x = x.copy()  # torch warns of tensors over memory that must not be written
    try:
        return torch.from_numpy(x)
    except (TypeError, ValueError) as exc:
        msg = f"expected an array that torch can share, found dtype {x.dtype} with strides {x.strides}: {exc}"
        raise ConfigError(msg) from exc
