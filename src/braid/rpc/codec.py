"""Packs the values of a call into bytes, with tensors beside them.

Problem: pickle runs code that a peer sends, and copies each tensor. Values that arrive as another
type, such as tuples that become lists, cause errors far from their origin.

Idea: plain data is msgpack. Types that msgpack lacks are extensions with a small number: tuples,
sets, dtypes, references, dataclasses by name. Each tensor is an index into a list, and its bytes
are a buffer of the message. A value of any other type raises an error unless pickle is permitted.

Source: the MessagePack specification, "Extension types".
"""

from __future__ import annotations

import dataclasses
import enum
import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from itertools import count, repeat
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch

from braid.errors import BraidError, CommError
from braid.rpc.arrays import array_of, bytes_of_array, bytes_of_scalar, is_number, scalar_of
from braid.rpc.bodies import Packed
from braid.rpc.layers import layer_of, parts_of
from braid.rpc.names import Names
from braid.rpc.options import placed
from braid.rpc.outcomes import RpcError
from braid.rpc.records import dataclass_of, fields_of, key_of, member_of, other_attributes
from braid.types import dtype_name

__all__ = ["Codec"]

_TUPLE, _SET, _FROZENSET, _DICT, _INT, _COMPLEX = range(1, 7)
_TENSOR, _REFERENCE = 7, 9
_DTYPE, _DEVICE, _SIZE, _LAYOUT = range(10, 14)
_TARGET, _DATACLASS, _NAMED_TUPLE, _ENUM, _SLICE, _BYTEARRAY = range(14, 20)
_STATEFUL, _ARRAY, _SCALAR, _LAYER = range(20, 24)
_PICKLE = 99
ADVICE = (
    "pass plain data, tensors, numpy arrays, layers of torch.nn, remote references or dataclasses "
    "(of a module that both sides allow), or permit pickle with RpcOptions(allow_pickle=True)"
)
_INT_RANGE = range(-(1 << 63), 1 << 64)
_NAMED_OF_TORCH = {
    name: value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype | torch.layout)
}
_PLAIN = frozenset({type(None), bool, float, str, bytes})
# types with plain content: code of the extension, and function from the value to the content
_WITH_PLAIN_CONTENT: dict[type, tuple[int, Callable[[Any], Any]]] = {
    complex: (_COMPLEX, lambda value: [value.real, value.imag]),
    torch.Size: (_SIZE, list),
    torch.dtype: (_DTYPE, dtype_name),
    torch.device: (_DEVICE, str),
    torch.layout: (_LAYOUT, lambda value: str(value).removeprefix("torch.")),
    bytearray: (_BYTEARRAY, bytes),
}
# functions from the unpacked content to the value; other codes need the codec
_FROM_CONTENT: dict[int, Callable[[Any], Any]] = {
    _TUPLE: tuple,
    _SET: set,
    _FROZENSET: frozenset,
    _DICT: lambda content: dict(zip(*content, strict=True)),
    _INT: int,
    _COMPLEX: lambda content: complex(*content),
    _DTYPE: _NAMED_OF_TORCH.__getitem__,
    _DEVICE: torch.device,
    _SIZE: torch.Size,
    _LAYOUT: _NAMED_OF_TORCH.__getitem__,
    _SLICE: lambda content: slice(*content),
    _BYTEARRAY: lambda content: bytearray(memoryview(content)),  # a number would be a size
    _SCALAR: lambda content: scalar_of(*content),
    _LAYER: lambda content: layer_of(*content),
}
_FIRST_TENSORS = [msgspec.msgpack.Ext(_TENSOR, bytes([place])) for place in range(64)]

# Noun for a part of a value: the noun for the whole, and the index or key of the part.
Where: TypeAlias = "str | tuple[Where, object]"


class _Packing:
    """Values that are being packed for a node.

    Attributes:
        receiver: Number of the node.
        tensors: Tensors of the values.
        shared: References of the values, as plain data.
    """

    def __init__(self, receiver: int, share: Callable[[Any, int], Any]) -> None:
        self.receiver = receiver
        self.tensors: list[torch.Tensor] = []
        self.shared: list[Any] = []
        self._share = share

    def share(self, value: Any) -> Any:
        """Return the plain data that represents a remote reference; None for other values."""
        shared = self._share(value, self.receiver)
        if shared is not None:
            self.shared.append(shared)
        return shared


class Codec:
    """Packs and unpacks the values of one node.

    Args:
        names: Names of functions and classes; public.
        share: Function of a value and a receiver that returns plain data for a remote reference,
            and None for other values.
        unshare: Called with that data if the message is not sent; withdraws the reference.
        receive: Called with that data, its sender, and whether its message will be answered;
            returns the reference.
        device_for: Function of a device and a receiver that returns the device on which tensors
            arrive; raises if the device is not mapped.
        allow_pickle: Whether values without another form are pickled, and unpickled from peers.
        advice: Hint for errors about values that cannot be sent.
    """

    def __init__(
        self,
        names: Names,
        share: Callable[[Any, int], Any],
        unshare: Callable[[Any], None],
        receive: Callable[[Any, str, bool], Any],
        device_for: Callable[[torch.device, int], str],
        *,
        allow_pickle: bool = False,
        advice: str = ADVICE,
    ) -> None:
        self._advice = advice
        self.names = names
        self._share = share
        self._unshare = unshare
        self._receive = receive
        self._device_for = device_for
        self._allow_pickle = allow_pickle
        self._encode = msgspec.msgpack.Encoder().encode

    def pack(self, value: Any, receiver: int, where: str = "a value") -> Packed:
        """Pack a value for a node.

        Args:
            value: The value.
            receiver: Number of the node.
            where: Noun for the value, for errors.

        Raises:
            RpcError: A part of the value cannot be sent; the message names it.
        """
        packing = _Packing(receiver, self._share)
        try:
            data = self._encode(self._tree(value, packing, where))
            return Packed(data, packing.tensors, packing.shared)
        except BaseException as exc:
            for reference in packing.shared:
                self._unshare(reference)
            if not isinstance(exc, RecursionError):
                raise
            msg = f"{where} is nested too deeply to be sent, or contains itself: send it in parts"
            raise RpcError(msg) from None

    def unpack(
        self,
        data: bytes,
        tensors: Sequence[torch.Tensor],
        sender: str,
        *,
        will_answer: bool = False,
    ) -> Any:
        """Return the value that `pack` made into `data` and `tensors`.

        Args:
            data: The bytes.
            tensors: The tensors.
            sender: Name of the node that has sent them.
            will_answer: Whether their message will be answered, which confirms references.

        Raises:
            CommError: The bytes are malformed.
            RpcError: This node does not know a name in the value, or peers may not use it.
        """
        try:
            return _Unpacking(self, tensors, sender, will_answer).decode(data)
        except BraidError:
            raise
        except Exception as exc:  # a peer may send any bytes, and each of them is its mistake
            msg = f"{sender} sent values that cannot be unpacked: {type(exc).__name__}: {exc}"
            raise CommError(msg) from exc

    # -- inside

    def _tree(self, value: Any, packing: _Packing, where: Where) -> Any:  # noqa: C901, PLR0911, PLR0912 - one for each type
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is int:
            return value if value in _INT_RANGE else self._extension(_INT, str(value))
        if kind is torch.Tensor:
            return self._tensor(value, packing, where)
        if kind is list:
            return self._trees(value, packing, where)
        if kind is tuple:
            return self._extension(_TUPLE, self._trees(value, packing, where))
        if kind is dict:
            if not value:
                return value
            parts = {key: self._tree(one, packing, (where, key)) for key, one in value.items()}
            if all(type(key) is str for key in parts):
                return parts
            keys = [self._tree(key, packing, f"a key of {_noun(where)}") for key in parts]
            return self._extension(_DICT, [keys, list(parts.values())])
        if isinstance(value, torch.Tensor):
            return self._tensor(value, packing, where)
        shared = packing.share(value)
        if shared is not None:
            return self._extension(_REFERENCE, shared)
        if self._allow_pickle and not _has_plain_form(value):
            return self._extension(_PICKLE, self._pickled(value, packing, where))
        if kind is np.ndarray:
            content, dtype, shape = bytes_of_array(value, _noun(where))
            packing.tensors.append(content)
            return self._extension(_ARRAY, [len(packing.tensors) - 1, dtype, shape])
        if isinstance(value, np.generic):
            return self._extension(_SCALAR, bytes_of_scalar(value, _noun(where)))
        if kind in (set, frozenset):
            code = _SET if kind is set else _FROZENSET
            return self._extension(code, self._trees(value, packing, where))
        if kind in _WITH_PLAIN_CONTENT:
            code, content_of = _WITH_PLAIN_CONTENT[kind]
            return self._extension(code, content_of(value))
        if kind is slice:
            bounds = [value.start, value.stop, value.step]
            return self._extension(_SLICE, self._trees(bounds, packing, where))
        if isinstance(value, enum.Enum):
            return self._extension(_ENUM, [self.names.name_of(kind), key_of(value)])
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            inner = self._trees(value, packing, where)
            return self._extension(_NAMED_TUPLE, [self.names.name_of(kind), inner])
        is_module = isinstance(value, torch.nn.Module)
        if dataclasses.is_dataclass(value) and not isinstance(value, type) and not is_module:
            inner = self._tree(fields_of(value, _noun(where)), packing, where)
            return self._extension(_DATACLASS, [self.names.name_of(kind), inner])
        if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
            return self._extension(_TARGET, self.names.name_of(value))
        if _has_plain_state(value):
            plain = self._trees(value._plain_state(), packing, where)  # noqa: SLF001 - see `RemoteModule`
            return self._extension(_STATEFUL, [self.names.name_of(kind), plain])
        if is_module:
            layers = parts_of(value, _noun(where))
            return self._extension(_LAYER, self._trees(layers, packing, where))
        if self._allow_pickle:
            return self._extension(_PICKLE, self._pickled(value, packing, where))
        msg = (
            f"{_noun(where)} is a {kind.__module__}.{kind.__qualname__}, which cannot be sent: "
            f"{self._advice}"
        )
        raise RpcError(msg)

    def _trees(self, values: Iterable[Any], packing: _Packing, where: Where) -> list[Any]:
        wheres = zip(repeat(where), count())
        return list(map(self._tree, values, repeat(packing), wheres))

    def _pickled(self, value: Any, packing: _Packing, where: Where) -> list[Any]:
        """Return a pickle, and the list of tensors and references that it contains."""
        beside: list[Any] = []

        def put_beside(part: Any) -> int | None:
            packed = packing.share(part)
            if packed is not None:
                packed = self._extension(_REFERENCE, packed)
            elif type(part) is torch.Tensor or _has_plain_state(part):
                packed = self._tree(part, packing, where)
            else:
                return None
            beside.append(packed)
            return len(beside) - 1

        file = io.BytesIO()
        try:
            _Pickler(file, put_beside).dump(value)
        except BraidError:
            raise
        except Exception as exc:
            msg = f"{_noun(where)} cannot be pickled: {type(exc).__name__}: {exc}"
            raise RpcError(msg) from exc
        return [file.getvalue(), beside]

    def _tensor(self, value: torch.Tensor, packing: _Packing, where: Where) -> Any:
        device = "" if value.is_cpu else self._device_for(value.device, packing.receiver)
        is_plain = value.layout is torch.strided or value.layout is torch.sparse_coo
        if not is_plain or value.is_quantized or value.is_meta:
            msg = (
                f"{_noun(where)} is a tensor of {value.layout} {value.dtype} on {value.device}, "
                "which cannot be sent: send a dense tensor, or its indices and values"
            )
            raise RpcError(msg)
        packing.tensors.append(value)
        place = len(packing.tensors) - 1
        if not device and place < len(_FIRST_TENSORS):
            return _FIRST_TENSORS[place]
        return self._extension(_TENSOR, [place, device] if device else place)

    def _extension(self, code: int, value: Any) -> msgspec.msgpack.Ext:
        return msgspec.msgpack.Ext(code, self._encode(value))

    def from_extension(self, code: int, value: Any, unpacking: _Unpacking) -> Any:  # noqa: C901, PLR0911 - one for each type
        """Return the value of the msgpack extension `code` with the unpacked content `value`."""
        sender = unpacking.sender
        if code in _FROM_CONTENT:
            return _FROM_CONTENT[code](value)
        if code == _TENSOR:
            if isinstance(value, int):
                return unpacking.take(value)
            return placed(unpacking.take(value[0]), value[1], sender)
        if code == _REFERENCE:
            return self._receive(value, sender, unpacking.will_answer)
        if code == _ARRAY:
            return array_of(unpacking.take(value[0]), *value[1:])
        if code == _TARGET:
            return self.names.find(value)
        if code == _PICKLE:
            if not self._allow_pickle:
                msg = (
                    f"{sender} sent a pickle, which this node refuses: pass "
                    "RpcOptions(allow_pickle=True) to both"
                )
                raise CommError(msg)
            try:
                return _Unpickler(io.BytesIO(value[0]), value[1]).load()
            except Exception as exc:
                msg = f"{sender} sent a pickle that cannot be read here: {exc!r}"
                raise CommError(msg) from exc
        kind = self.names.find(value[0])
        if code == _STATEFUL and hasattr(kind, "_of_state"):
            return kind._of_state(value[1])  # noqa: SLF001 - the other half of `_plain_state`
        if code == _ENUM and issubclass(kind, enum.Enum):
            return member_of(kind, value[1])
        if code == _NAMED_TUPLE and issubclass(kind, tuple):
            return kind._make(value[1])
        if code == _DATACLASS and isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return dataclass_of(kind, value[1])
        msg = (
            f"{sender} sent a value with the unknown code {code}: install the same version of "
            "braid on all nodes"
        )
        raise CommError(msg)


def _noun(where: Where) -> str:
    return where if isinstance(where, str) else f"{_noun(where[0])}[{where[1]!r}]"


def _has_plain_form(value: Any) -> bool:
    """Return whether a value that pickle could carry is sent in another form if pickle is off."""
    if isinstance(value, np.ndarray | np.generic):
        return is_number(value.dtype)
    if isinstance(value, torch.nn.Module):
        return _has_plain_state(value)
    return not dataclasses.is_dataclass(value) or not other_attributes(value)


def _has_plain_state(value: Any) -> bool:
    return hasattr(value, "_plain_state") and not isinstance(value, type)


class _Pickler(pickle.Pickler):
    """Pickles a value, except for parts that are stored separately.

    Args:
        file: File for the pickle.
        put_beside: Function that stores a part and returns its index; None for parts to pickle.
    """

    def __init__(self, file: io.BytesIO, put_beside: Callable[[Any], int | None]) -> None:
        super().__init__(file)
        self._put_beside = put_beside

    def persistent_id(self, obj: Any) -> int | None:
        return self._put_beside(obj)


class _Unpickler(pickle.Unpickler):
    """Reads a pickle written by `_Pickler`."""

    def __init__(self, file: io.BytesIO, beside: Sequence[Any]) -> None:
        super().__init__(file)
        self._beside = beside

    def persistent_load(self, pid: int) -> Any:
        return self._beside[pid]


class _Unpacking(msgspec.Struct, frozen=True, eq=False):
    """Values that are being unpacked; free of reference cycles, which would keep tensors alive."""

    codec: Codec
    tensors: Sequence[torch.Tensor]
    sender: str
    will_answer: bool
    taken: set[int] = msgspec.field(default_factory=set)

    def take(self, place: int) -> torch.Tensor:
        """Return a tensor of the message, which `pack` names once.

        Layers copy their tensors, so a second name is refused: a short message of a stranger
        would fill the memory.

        Raises:
            CommError: The tensor was taken before.
        """
        if place in self.taken or place < 0:
            msg = (
                f"{self.sender} sent values that name tensor {place} of {len(self.tensors)} twice "
                "or out of range: install the same version of braid on all nodes"
            )
            raise CommError(msg)
        self.taken.add(place)
        return self.tensors[place]

    def decode(self, data: bytes) -> Any:
        """Return the value that `data` encodes."""
        return msgspec.msgpack.decode(data, ext_hook=self.extension)

    def extension(self, code: int, inner: memoryview) -> Any:
        """Return the value of a msgpack extension whose content contains packed values."""
        if code == _TENSOR and len(inner) == 1:
            return self.take(inner[0])
        value = self.decode(bytes(inner))
        return self.codec.from_extension(code, value, self)
