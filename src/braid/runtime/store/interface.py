"""The interface of all stores, and the code that all implementations share.

Problem: ranks meet through a server under braid's launcher, through torch's store under torchrun,
through a file on a cluster without either, and through a dictionary in tests. The code above must
not depend on which of them it is.

Idea: one class with torch's operations on bytes. An implementation only executes one request
(`Store.ask`); names, time-outs and errors are the same for all, and one conformance suite checks
them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from braid.errors import CommTimeout, ConfigError
from braid.runtime.store.store_state import (
    Add,
    Append,
    Check,
    CompareSet,
    Delete,
    Get,
    Missing,
    MultiGet,
    MultiSet,
    NumKeys,
    Reply,
    Request,
    Set,
    StoreAnswer,
    StoreWait,
    Value,
)
from braid.runtime.wire import DEFAULT_TIMEOUT_S

__all__ = ["PrefixStore", "Store"]

_SHOWN_KEYS = 8


class Store(ABC):
    """Keys and values that several processes share; semantics of torch.distributed.Store.

    Each operation is atomic, and all clients see all operations in one order. Time-outs are in
    seconds; None means the store's default.

    Args:
        default_timeout_s: Time-out of operations that are called without one.

    Raises:
        CommTimeout: Keys were missing at the deadline; the message names them.
        PeerLostError: The process that holds the store is gone.
        ConfigError: A key or value is of the wrong type, or `add` was called for a value that is
            not a number.
    """

    def __init__(self, default_timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if not default_timeout_s > 0:
            msg = f"the time-out of a store must be positive, got {default_timeout_s} s"
            raise ConfigError(msg)
        self.default_timeout_s = default_timeout_s

    @abstractmethod
    def ask(self, request: Request, timeout_s: float) -> Reply:
        """Execute one request, such as `Get`; implementations of stores define this method.

        Returns `Missing` if the request needs keys that are not set within `timeout_s`.
        """

    def set(self, key: str, value: bytes) -> None:
        """Set `key` to `value`."""
        self._value(Set(_key(key), _bytes(key, value)))

    def get(self, key: str, timeout_s: float | None = None) -> bytes:
        """Return the value of `key`; waits until it is set."""
        return cast("bytes", self._value(Get(_key(key)), timeout_s))

    def add(self, key: str, n: int) -> int:
        """Add `n` to the decimal number in `key` (0 when missing) and return the sum."""
        return cast("int", self._value(Add(_key(key), n)))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set `key` to `desired` if it holds `expected`, or is missing and `expected` is empty.

        Returns:
            The value afterwards; `expected` if the key is still missing.
        """
        request = CompareSet(_key(key), _bytes(key, expected), _bytes(key, desired))
        return cast("bytes", self._value(request))

    def wait(self, keys: Sequence[str], timeout_s: float | None = None) -> None:
        """Wait until all `keys` are set."""
        self._value(StoreWait(_keys(keys)), timeout_s)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all `keys` are set now."""
        return cast("bool", self._value(Check(_keys(keys))))

    def delete_key(self, key: str) -> bool:
        """Remove `key`; returns whether it was set."""
        return cast("bool", self._value(Delete(_key(key))))

    def num_keys(self) -> int:
        """Number of keys in the whole store, with any prefix."""
        return cast("int", self._value(NumKeys()))

    def multi_get(self, keys: Sequence[str], timeout_s: float | None = None) -> list[bytes]:
        """Return the values of `keys`; waits until all are set."""
        return cast("list[bytes]", self._value(MultiGet(_keys(keys)), timeout_s))

    def multi_set(self, items: Mapping[str, bytes]) -> None:
        """Set all keys of `items` to their values in one atomic operation."""
        self._value(MultiSet({_key(key): _bytes(key, value) for key, value in items.items()}))

    def append(self, key: str, value: bytes) -> None:
        """Append `value` to the value of `key`, which is created if missing."""
        self._value(Append(_key(key), _bytes(key, value)))

    def _value(self, request: Request, timeout_s: float | None = None) -> Value:
        timeout_s = self.default_timeout_s if timeout_s is None else timeout_s
        reply = self.ask(request, timeout_s)
        if isinstance(reply, StoreAnswer):
            return reply.value
        if isinstance(reply, Missing):
            raise missing_keys_error(reply.keys, timeout_s, repr(self))
        raise ConfigError(reply.reason)


class PrefixStore(Store):
    """A part of another store: every key is prefixed by `prefix/`.

    Args:
        prefix: Name of the part.
        store: The whole store; `num_keys` counts all its keys, as torch's PrefixStore does.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        super().__init__(store.default_timeout_s)
        self._prefix = f"{_key(prefix)}/"
        self._store = store

    def __repr__(self) -> str:
        return f"PrefixStore({self._prefix[:-1]!r}, {self._store!r})"

    def ask(self, request: Request, timeout_s: float) -> Reply:
        """Execute a request, and return the store's reply; see `Store.ask`."""
        return self._store.ask(self._prefixed(request), timeout_s)

    def _prefixed(self, request: Request) -> Request:
        match request:
            case NumKeys():
                return request
            case MultiSet(items):
                return MultiSet({self._prefix + key: value for key, value in items.items()})
            case StoreWait(keys) | Check(keys) | MultiGet(keys):
                return msgspec.structs.replace(request, keys=[self._prefix + key for key in keys])
        return msgspec.structs.replace(request, key=self._prefix + request.key)


def missing_keys_error(keys: Sequence[str], timeout_s: float, store: str) -> CommTimeout:
    """Make the error that every store raises when `keys` were not set in time; it names `store`."""
    shown = ", ".join(map(repr, keys[:_SHOWN_KEYS]))
    if len(keys) > _SHOWN_KEYS:
        shown += f" and {len(keys) - _SHOWN_KEYS} more"
    msg = (
        f"keys {shown} are missing in {store} after {timeout_s:g} s: check whether the process "
        "that sets them has started, and see its first error"
    )
    return CommTimeout(msg)


def _key(key: str) -> str:
    if not isinstance(key, str):
        msg = f"a key must be a str, got {type(key).__name__}: {key!r}"  # type: ignore[unreachable]
        raise ConfigError(msg)
    return key


def _keys(keys: Sequence[str]) -> list[str]:
    if isinstance(keys, (str, bytes)):
        msg = f"keys must be a list, got the single {keys!r}: write [{keys!r}]"
        raise ConfigError(msg)
    return [_key(key) for key in keys]


def _bytes(key: str, value: bytes) -> bytes:
    if not isinstance(value, (bytes, bytearray, memoryview)):
        msg = (  # type: ignore[unreachable]
            f"the value of key {key!r} must be bytes, got {type(value).__name__}: encode it "
            "first, such as str.encode()"
        )
        raise ConfigError(msg)
    return bytes(value)
