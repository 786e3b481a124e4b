"""Tensors as users pass them -> flat tensors as algorithms want them.

Any strided CPU tensor is welcome (results need one whose elements do not overlap): non-contiguous ones are copied and
copied back, those that require grad are used without autograd noticing (collectives with gradients are another room),
empty and zero-dim ones are ordinary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from braid.errors import ConfigError

__all__ = ["Flat", "apart", "check_peer", "flatten", "result", "slice_shape"]

Flat = tuple[torch.Tensor, Callable[[], object] | None]  # and what copies it back


def flatten(x: torch.Tensor, device_types: frozenset[str], *, written: bool) -> Flat:
    """A flat tensor for an algorithm to read and write.

    Args:
        x: As the user passed it.
        device_types: Devices for which the group has an engine.
        written: Whether a result goes there.

    Returns:
        The flat tensor, and what to call afterwards if it is a copy.

    Raises:
        ConfigError: Not a tensor, or one that cannot be communicated.
    """
    if not isinstance(x, torch.Tensor):
        msg = (  # type: ignore[unreachable]  # users without a type checker
            f"expected a torch.Tensor, found {type(x).__name__}: wrap numbers with torch.tensor"
        )
        raise ConfigError(msg)
    if x.device.type not in device_types:
        msg = (
            f"expected a tensor on {' or '.join(sorted(device_types))}, found one on {x.device}: this group has no "
            "engine for that device; move the tensor, or make a group with a backend for it"
        )
        raise ConfigError(msg)
    if x.layout != torch.strided or x.is_quantized:
        kind = "quantized" if x.is_quantized else str(x.layout)
        msg = f"expected an ordinary strided tensor, found a {kind} one: convert it first (to_dense, dequantize)"
        raise ConfigError(msg)
    if written and any(
        stride == 0 and n > 1 for stride, n in zip(x.stride(), x.shape, strict=True)
    ):
        msg = (
            f"expected a tensor whose elements each have their own memory, found shape {list(x.shape)} with strides "
            f"{x.stride()}: pass x.clone(), an expanded tensor cannot hold a result"
        )
        raise ConfigError(msg)
    if x.requires_grad:
        x = x.detach()
    if x.is_contiguous() and not x.is_conj() and not x.is_neg():
        return x.view(-1), None
    flat = x.resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.data_ptr() == x.data_ptr():
        flat = flat.clone()
    shape = x.shape
    return flat, lambda: x.copy_(flat.view(shape))


def apart(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Flat `x`, or a copy of it if flat `out` shares memory with it: results are stored while peers still read."""
    start, end = x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()
    out_start, out_end = out.data_ptr(), out.data_ptr() + out.numel() * out.element_size()
    return x.clone() if start < out_end and out_start < end else x


def result(out: torch.Tensor | None, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """The tensor for a result: the user's if it fits, else a new one.

    Raises:
        ConfigError: `out` has another shape or dtype.
    """
    if out is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    if tuple(out.shape) != shape or out.dtype != like.dtype:
        msg = (
            f"expected out of shape {list(shape)} and dtype {like.dtype}, found {list(out.shape)} and "
            f"{out.dtype}: leave it out, or pass a tensor that fits"
        )
        raise ConfigError(msg)
    return out


def check_peer(peer: int, size: int, role: str) -> None:
    """Refuse a group rank that is none.

    Raises:
        ConfigError: Out of range.
    """
    if not 0 <= peer < size:
        msg = f"expected a {role} out of 0..{size - 1} (group ranks), found {peer}"
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
            f"(shape {list(x.shape)}): pad it"
        )
        raise ConfigError(msg)
    return (x.shape[0] // size, *x.shape[1:])
