"""Objects as bytes and back: plain data as MessagePack, other objects pickled if allowed.

Problem: MessagePack has no tuples, sets, large integers or keys that are not strings. Its encoder
fails on a cyclic list with a RecursionError, and on a lone surrogate with an error about codecs.

Idea: traverse the object first and record the path. Encode each such type as a MessagePack
extension, and raise an error with type and path for any other type.
"""

from __future__ import annotations

import pickle
from typing import Any

import msgspec

from braid.errors import ConfigError

__all__ = ["decode", "encode"]

# codes of MessagePack extensions
TUPLE, SET, FROZENSET, PAIRS, BIG = 1, 2, 3, 4, 5
PLAIN, PICKLE = 0, 1  # first byte of an encoded object
SMALLEST, LARGEST = -(1 << 63), (1 << 64) - 1  # range of MessagePack's integers
MAX_DEPTH = 100  # nested containers; each takes several frames of Python's stack on both sides

USUAL = (
    "send tensors with the tensor collectives, or pass allow_pickle=True on all ranks if you "
    "trust every one of them"
)
OF_CYCLES = (
    "send the items once and rebuild the cycle on the receiver, or pass allow_pickle=True on all "
    "ranks"
)
OF_DEPTH = "send a flat list with indices, or pass allow_pickle=True on all ranks"
OF_SURROGATES = (
    "send bytes made with .encode('utf-8', 'surrogatepass') (os.fsencode for file names), or "
    "pass allow_pickle=True "
    "on all ranks"
)


def encode(obj: object, path: str = "", *, allow_pickle: bool = False) -> bytes:
    """Return the bytes of an object.

    Args:
        obj: Plain data, or any object with `allow_pickle`.
        path: Prefix of the path in error messages.
        allow_pickle: Whether to pickle an object that is not plain data.

    Raises:
        ConfigError: The object is not plain data, or cannot be pickled; the message contains the
            type and its path.
    """
    try:
        plain = _plain(obj, path, ())
    except _NotPlainError as exc:
        if allow_pickle:
            return bytes([PICKLE]) + _pickled(obj)
        where = f" at {exc.path}" if exc.path else ""
        msg = (
            f"{exc.description}{where} is not plain data (None, bool, int, float, str, bytes, "
            f"lists, tuples, sets, dictionaries): {exc.advice}"
        )
        raise ConfigError(msg) from None
    return bytes([PLAIN]) + msgspec.msgpack.encode(plain)


def decode(raw: bytes, *, allow_pickle: bool = False) -> Any:
    """Return the object that was encoded.

    Args:
        raw: Bytes from `encode`.
        allow_pickle: Whether to unpickle a pickled object, which runs code from the sender.

    Raises:
        ConfigError: The object is pickled, and `allow_pickle` is False or one of its classes cannot
            be imported.
    """
    if raw[0] != PICKLE:
        return _original(msgspec.msgpack.decode(raw[1:]))
    if not allow_pickle:
        msg = (
            "a rank sent a pickled object: pass allow_pickle=True on this rank as well, if you "
            "trust the rank that sent it (unpickling can run any code)"
        )
        raise ConfigError(msg)
    try:
        return pickle.loads(raw[1:])  # noqa: S301 - the caller allowed it
    except Exception as exc:
        msg = (
            f"a pickled object cannot be loaded here ({type(exc).__name__}: {exc}): check that "
            "its classes can be imported on all ranks"
        )
        raise ConfigError(msg) from exc


class _NotPlainError(Exception):
    def __init__(self, description: str, path: str, advice: str = USUAL) -> None:
        super().__init__(description, path)
        self.description = description
        self.path = path
        self.advice = advice


def _pickled(obj: object) -> bytes:
    try:
        return pickle.dumps(obj)
    except Exception as exc:  # __reduce__ may raise any class
        msg = (
            f"{_name(type(obj))} cannot be pickled ({type(exc).__name__}: {exc}): send its "
            "contents instead"
        )
        raise ConfigError(msg) from exc


def _plain(obj: object, path: str, above: tuple[int, ...]) -> object:
    """Return `obj` in types of MessagePack; `above` are the ids of its containers."""
    kind = type(obj)
    if obj is None or kind in (bool, float, bytes):
        return obj
    if isinstance(obj, str) and kind is str:
        return _text(obj, path)
    if isinstance(obj, int) and kind is int:
        if SMALLEST <= obj <= LARGEST:
            return obj
        return msgspec.msgpack.Ext(BIG, f"{obj:x}".encode())
    if kind not in (list, tuple, set, frozenset, dict):
        raise _NotPlainError(_name(kind), path)
    if id(obj) in above:
        raise _NotPlainError(f"a {kind.__name__} that contains itself", path, OF_CYCLES)
    if len(above) == MAX_DEPTH:
        raise _NotPlainError(f"more than {MAX_DEPTH} nested containers", "", OF_DEPTH)
    above = (*above, id(obj))
    if isinstance(obj, dict):
        if all(type(key) is str for key in obj):
            return {
                _text(key, f"{path} key"): _plain(value, f"{path}[{key!r}]", above)
                for key, value in obj.items()
            }
        pairs = [
            [_plain(k, f"{path} key", above), _plain(v, f"{path}[{k!r}]", above)]
            for k, v in obj.items()
        ]
        return _extension(PAIRS, pairs)
    assert isinstance(obj, list | tuple | set | frozenset)
    items = [_plain(item, f"{path}[{i}]", above) for i, item in enumerate(obj)]
    codes = {tuple: TUPLE, set: SET, frozenset: FROZENSET}
    return items if kind is list else _extension(codes[kind], items)


def _text(obj: str, path: str) -> str:
    try:
        obj.encode()
    except UnicodeEncodeError as exc:
        description = f"a str with a lone surrogate ({obj[exc.start]!r}, character {exc.start})"
        raise _NotPlainError(description, path, OF_SURROGATES) from None
    return obj


def _name(kind: type) -> str:
    name = kind.__qualname__
    return name if kind.__module__ == "builtins" else f"{kind.__module__}.{name}"


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
        return int(bytes(obj.data), 16)
    items = [_original(item) for item in msgspec.msgpack.decode(obj.data)]
    if obj.code == PAIRS:
        return dict(items)
    return {TUPLE: tuple, SET: set, FROZENSET: frozenset}[obj.code](items)
