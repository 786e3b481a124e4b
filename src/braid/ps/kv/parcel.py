"""A parcel contains the tensors of a request or an answer by name, and their encodings.

    keys [n] uint64    vals [m]    lens [n] int64    places [k], if only some values are sent

Filters encode the tensors in turn, and each one appends a head. The receiver undoes the heads in
reverse order, and checks all numbers in them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from braid.errors import CommError, ConfigError
from braid.ps.kv.messages import Compressed, FixedPointed, Head
from braid.runtime.tensor_buffers import as_buffers, bytes_of, from_buffers, memory_of
from braid.types import TensorSpec, dtype_name

__all__ = ["MAX_BYTES", "Parcel"]

MAX_BYTES = 1 << 30  # largest decoded tensor; the same as VanConfig's largest message


@dataclass(slots=True)
class Parcel:
    """Tensors by name, with headers of the filters, such as compression, that have encoded them.

    Attributes:
        tensors: Tensors by name.
        heads: Headers of the encodings, in the order in which they were applied.
        digest: Digest of the keys, if the receiver must cache them or has them cached.
        keys: Keys that are not sent, since the receiver has them.
    """

    tensors: dict[str, torch.Tensor]
    heads: list[Head] = field(default_factory=list)
    digest: bytes = b""
    keys: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def pack(self) -> tuple[list[str], list[TensorSpec], list[memoryview]]:
        """Return the tensors' names, their specs (shape and dtype), and their buffers to send."""
        return [*self.tensors], *as_buffers(list(self.tensors.values()))

    @classmethod
    def unpack(
        cls,
        names: Sequence[str],
        specs: Sequence[TensorSpec],
        buffers: Sequence[memoryview],
        heads: Sequence[Head],
    ) -> Parcel:
        """Return the parcel of a received message.

        Raises:
            CommError: Names repeat, or the numbers of names and specs differ.
        """
        if len(names) != len(specs) or len({*names}) != len(names):
            msg = f"{len(specs)} tensors with the names {list(names)}"
            raise CommError(msg)
        return cls(dict(zip(names, from_buffers(specs, buffers), strict=True)), list(heads))

    def decode(self, on_saved: Callable[[Head, int], None] | None = None) -> None:
        """Undo all filters.

        Args:
            on_saved: Called with each header, and the number of bytes that its filter has saved.

        Raises:
            CommError: The headers do not fit the tensors.
        """
        while self.heads:
            head, before = self.heads.pop(), self.nbytes
            try:
                self._undo(head)
            except (KeyError, RuntimeError, ValueError, TypeError, zlib.error) as exc:
                msg = f"tensors {list(self.tensors)} are not encoded as in {head}: {exc}"
                raise CommError(msg) from exc
            if on_saved is not None:
                on_saved(head, self.nbytes - before)

    def _undo(self, head: Head) -> None:
        tensors = self.tensors
        if isinstance(head, Compressed):
            tensors[head.name] = _decompress(head, tensors[head.name])
        elif isinstance(head, FixedPointed):
            vals = tensors["vals"].to(dtype_of(head.dtype))
            tensors["vals"] = vals * head.scale
        else:
            _check_size(head.numel, tensors["vals"].dtype)
            places = tensors.pop("places").long()
            dense = torch.zeros(head.numel, dtype=tensors["vals"].dtype)
            if len(places) and int(places.min()) < 0:
                msg = f"an index of the values is {int(places.min())}, but indices begin with 0"
                raise ValueError(msg)
            tensors["vals"] = dense.index_copy_(0, places, tensors["vals"])


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype with a name.

    Raises:
        CommError: The dtype does not exist.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        msg = f"{name!r} is not a dtype"
        raise CommError(msg)
    return dtype


def compress(name: str, tensor: torch.Tensor, level: int) -> tuple[torch.Tensor, Head]:
    """Return the compressed bytes of the tensor `name`, and the header to decompress them."""
    data = bytearray(zlib.compress(bytes_of(tensor), level))
    dtype = dtype_name(tensor.dtype)
    return torch.frombuffer(data, dtype=torch.uint8), Compressed(name, dtype, tensor.numel())


def _decompress(head: Compressed, data: torch.Tensor) -> torch.Tensor:
    dtype = dtype_of(head.dtype)
    nbytes = _check_size(head.numel, dtype)
    if data.dtype != torch.uint8:
        msg = f"compressed bytes are uint8, got {data.dtype}"
        raise ValueError(msg)
    worker = zlib.decompressobj()
    plain = bytearray(worker.decompress(memory_of(data), nbytes + 1))  # never more memory
    if len(plain) != nbytes or not worker.eof:
        msg = f"expected {nbytes} bytes, got {len(plain)}{'' if worker.eof else ' or more'}"
        raise ValueError(msg)
    if not nbytes:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(plain, dtype=torch.uint8).view(dtype)


def _check_size(numel: int, dtype: torch.dtype) -> int:
    nbytes = numel * dtype.itemsize
    if not 0 <= nbytes <= MAX_BYTES:
        msg = f"{numel} elements of {dtype} are more than {MAX_BYTES} bytes"
        raise ValueError(msg)
    return nbytes


def refuse_nonfinite(vals: torch.Tensor) -> None:
    """Check that all values are finite, so that they have a fixed-point form.

    Raises:
        ConfigError: A value is infinite or nan; the message has its place.
    """
    finite = vals.isfinite()
    if not bool(finite.all()):
        place = int((~finite).nonzero()[0])
        msg = (
            f"FixedPoint cannot encode {float(vals[place])}, the value at index {place}: check "
            "the values before the push, or push without the filter"
        )
        raise ConfigError(msg)
