"""Collectives of Python objects: plain data as MessagePack, anything else behind a switch.

Problem: torch's object collectives unpickle what other ranks send, so whoever can send runs code here; and a typo in a
configuration travels as silently as the configuration.

Idea: None, bool, int, float, str, bytes, lists, tuples, sets and dictionaries of them travel as MessagePack (msgspec) and
come back as they were. Anything else raises and names its type and the place where it sits, unless the caller says
`allow_pickle=True`, on both sides.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from braid.errors import ConfigError

if TYPE_CHECKING:
    from braid.comm.group import Group

__all__ = ["Objects", "decode", "encode"]

TUPLE, SET, FROZENSET, PAIRS, BIG = (
    1,
    2,
    3,
    4,
    5,
)  # MessagePack extensions for what it does not have
PLAIN, PICKLE = 0, 1  # first byte of an encoded object
SMALLEST, LARGEST = -(1 << 63), (1 << 64) - 1  # integers of MessagePack


def encode(obj: object, *, allow_pickle: bool = False) -> bytes:
    """Bytes of an object.

    Args:
        obj: Plain data, or anything with `allow_pickle`.
        allow_pickle: Pickle it if it is not plain.

    Raises:
        ConfigError: It is not plain; names the type and where it was found.
    """
    try:
        plain = _plain(obj, "")
    except _NotPlainError as exc:
        if allow_pickle:
            return bytes([PICKLE]) + pickle.dumps(obj)
        where = f" at {exc.path}" if exc.path else ""
        msg = (
            f"expected plain data (None, bool, int, float, str, bytes, lists, tuples, sets, dictionaries), found "
            f"{exc.kind}{where}: send tensors with the tensor collectives, or pass allow_pickle=True on all ranks if "
            "you trust every one of them"
        )
        raise ConfigError(msg) from None
    return bytes([PLAIN]) + msgspec.msgpack.encode(plain)


def decode(raw: bytes, *, allow_pickle: bool = False) -> Any:
    """The object that `encode` was given.

    Raises:
        ConfigError: It was pickled, and `allow_pickle` is off.
    """
    if raw[0] == PICKLE:
        if not allow_pickle:
            msg = (
                "expected plain data, found a pickled object: pass allow_pickle=True here, too, if you trust the rank "
                "that sent it (unpickling runs code)"
            )
            raise ConfigError(msg)
        return pickle.loads(raw[1:])  # noqa: S301 - what the switch is for
    return _original(msgspec.msgpack.decode(raw[1:]))


class Objects:
    """Object collectives of one group; `Group.objects`.

    Args:
        group: Carries out the transfers.

    All members pass the same `allow_pickle`. Cost: two collectives, one for the sizes.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def all_gather(self, obj: object, *, allow_pickle: bool = False) -> list[Any]:
        """The objects of all members, in the order of ranks."""
        return [decode(raw, allow_pickle=allow_pickle) for raw in self._all(obj, allow_pickle)]

    def broadcast(self, obj: object = None, root: int = 0, *, allow_pickle: bool = False) -> Any:
        """The object of member `root`, on every member."""
        group = self._group
        mine = _bytes(encode(obj, allow_pickle=allow_pickle)) if group.rank == root else None
        size = torch.tensor([0 if mine is None else mine.numel()])
        group.broadcast(size, root)
        data = torch.empty(int(size), dtype=torch.uint8) if mine is None else mine
        group.broadcast(data, root)
        return obj if mine is not None else decode(_raw(data), allow_pickle=allow_pickle)

    def gather(self, obj: object, root: int = 0, *, allow_pickle: bool = False) -> list[Any] | None:
        """The objects of all members, on member `root`; None elsewhere."""
        group = self._group
        mine = _bytes(encode(obj, allow_pickle=allow_pickle))
        sizes = group.gather(torch.tensor([mine.numel()]), root)
        if sizes is None:
            group.gather(mine, root)
            return None
        outs = [torch.empty(size, dtype=torch.uint8) for size in sizes.tolist()]
        group.gather(mine, root, out=outs)
        return [decode(_raw(out), allow_pickle=allow_pickle) for out in outs]

    def scatter(
        self, objs: Sequence[object] | None = None, root: int = 0, *, allow_pickle: bool = False
    ) -> Any:
        """This member's one of the objects that member `root` has, one per member."""
        group = self._group
        size = torch.zeros(1, dtype=torch.int64)
        parts: list[torch.Tensor] | None = None
        if group.rank == root:
            if objs is None or len(objs) != group.size:
                found = "None" if objs is None else str(len(objs))
                msg = (
                    f"expected {group.size} objects to scatter, one for every member, found {found}"
                )
                raise ConfigError(msg)
            parts = [_bytes(encode(obj, allow_pickle=allow_pickle)) for obj in objs]
            group.scatter(torch.tensor([part.numel() for part in parts]), root, out=size)
        else:
            group.scatter(None, root, out=size)
        data = torch.empty(int(size), dtype=torch.uint8)
        group.scatter(parts, root, out=data)
        return decode(_raw(data), allow_pickle=allow_pickle)

    def send(self, obj: object, to: int, *, tag: int = 0, allow_pickle: bool = False) -> None:
        """Send an object to member `to`."""
        data = _bytes(encode(obj, allow_pickle=allow_pickle))
        self._group.send(torch.tensor([data.numel()]), to, tag=tag)
        self._group.send(data, to, tag=tag)

    def recv(self, source: int, *, tag: int = 0, allow_pickle: bool = False) -> Any:
        """The next object that member `source` sends."""
        size = torch.zeros(1, dtype=torch.int64)
        self._group.recv(size, source, tag=tag)
        data = torch.empty(int(size), dtype=torch.uint8)
        self._group.recv(data, source, tag=tag)
        return decode(_raw(data), allow_pickle=allow_pickle)

    def _all(self, obj: object, allow_pickle: bool) -> list[bytes]:
        mine = _bytes(encode(obj, allow_pickle=allow_pickle))
        sizes = self._group.all_gather(torch.tensor([mine.numel()])).tolist()
        longest = torch.zeros(max(sizes), dtype=torch.uint8)
        longest[: mine.numel()] = mine
        rows = self._group.all_gather(longest).view(self._group.size, -1)
        return [_raw(row) for row in rows]


class _NotPlainError(Exception):
    def __init__(self, kind: str, path: str) -> None:
        super().__init__(kind, path)
        self.kind = kind
        self.path = path


def _plain(obj: object, path: str) -> object:
    """`obj` in types that MessagePack has."""
    kind = type(obj)
    if obj is None or kind in (bool, float, str, bytes):
        return obj
    if isinstance(obj, int) and kind is int:
        if SMALLEST <= obj <= LARGEST:
            return obj
        return msgspec.msgpack.Ext(BIG, str(obj).encode())
    if isinstance(obj, list | tuple | set | frozenset) and kind in (list, tuple, set, frozenset):
        items = [_plain(item, f"{path}[{i}]") for i, item in enumerate(obj)]
        codes = {tuple: TUPLE, set: SET, frozenset: FROZENSET}
        return items if kind is list else _extension(codes[kind], items)
    if isinstance(obj, dict) and kind is dict:
        if all(type(key) is str for key in obj):
            return {key: _plain(value, f"{path}[{key!r}]") for key, value in obj.items()}
        pairs = [[_plain(k, f"{path} key"), _plain(v, f"{path}[{k!r}]")] for k, v in obj.items()]
        return _extension(PAIRS, pairs)
    name = kind.__qualname__
    raise _NotPlainError(
        name if kind.__module__ == "builtins" else f"{kind.__module__}.{name}", path
    )


def _extension(code: int, items: list[Any]) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(items))


def _original(obj: Any) -> Any:
    if isinstance(obj, list):
        return [_original(item) for item in obj]
    if isinstance(obj, dict):
        return {key: _original(value) for key, value in obj.items()}
    if not isinstance(obj, msgspec.msgpack.Ext):
        return obj
    if obj.code == BIG:
        return int(bytes(obj.data))
    items = [_original(item) for item in msgspec.msgpack.decode(obj.data)]
    if obj.code == PAIRS:
        return dict(items)
    return {TUPLE: tuple, SET: set, FROZENSET: frozenset}[obj.code](items)


def _bytes(raw: bytes) -> torch.Tensor:
    """Length and bytes, padded to a power of two: few different shapes, so few different descriptions."""
    whole = len(raw).to_bytes(8, "little") + raw
    padded = bytearray(max(64, 1 << (len(whole) - 1).bit_length()))
    padded[: len(whole)] = whole
    return torch.frombuffer(padded, dtype=torch.uint8)


def _raw(data: torch.Tensor) -> bytes:
    whole = data.numpy().tobytes()
    return whole[8 : 8 + int.from_bytes(whole[:8], "little")]
