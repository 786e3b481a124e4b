"""Adapters between braid's stores and torch's.

Problem: under torchrun ranks meet through torch's TCPStore; under braid's launcher,
torch.distributed needs a `dist.Store` that uses braid's authenticated store. The two differ in
time-outs, errors and the types of values.

Idea: `TorchStore` is a braid Store that uses any `dist.Store`. `as_torch_store` is the reverse: a
subclass of `dist.Store` whose methods torch's C++ calls (PrefixStore, Gloo's rendezvous, ...). No
other module of this package imports torch.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store as TorchBase  # mypy does not see dist.Store

from braid.errors import CommTimeout, ConfigError, PeerLostError
from braid.runtime.store.interface import Store
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

__all__ = ["TorchStore", "as_torch_store"]


POLLED_S = 1.0  # shorter waits poll the store
LONGEST_PAUSE_S = 0.02


class TorchStore(Store):
    """A braid Store that uses a store of torch.

    Args:
        store: Any `dist.Store`.
        default_timeout_s: Time-out of operations that are called without one.

    On failure: as for all stores. But torch's TCPStore serves one operation of a client at a time,
    so a waiting thread blocks the other threads of its process, and an `add` to a value that is not
    a number ends the connection.
    """

    def __init__(self, store: TorchBase, default_timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        super().__init__(default_timeout_s)
        self._store: Any = store  # its annotations require str where it accepts bytes

    def ask(self, request: Request, timeout_s: float) -> Reply:
        """Execute a request, and return the store's reply; see `Store.ask`."""
        keys: list[str] = []
        if isinstance(request, Get):
            keys = [request.key]
        elif isinstance(request, (StoreWait, MultiGet)):
            keys = request.keys
        try:
            self._wait(keys, timeout_s)
        except _TorchStoreError:
            return Missing([key for key in dict.fromkeys(keys) if not self.check([key])] or keys)
        with self._mapped():
            return StoreAnswer(self._execute(request))

    def _execute(self, request: Request) -> Value:
        store = self._store
        result: Value = None
        match request:
            case Set(key, value):
                store.set(key, value)
            case Get(key):
                result = bytes(store.get(key))
            case Add(key, amount):
                result = int(store.add(key, amount))
            case CompareSet(key, expected, desired):
                result = bytes(store.compare_set(key, expected, desired))
            case Check(keys):
                result = bool(store.check(keys))
            case Delete(key):
                result = bool(store.delete_key(key))
            case NumKeys():
                result = int(store.num_keys())
            case MultiGet() | MultiSet() | Append():
                result = self._execute_extended(request)
        return result

    def _execute_extended(self, request: MultiGet | MultiSet | Append) -> Value:
        """Execute operations that torch's FileStore lacks; it sets several keys one by one."""
        store, is_extended = self._store, self._store.has_extended_api()
        match request:
            case MultiGet(keys) if not (is_extended and keys):  # torch's HashStore needs a key
                return [bytes(store.get(key)) for key in keys]
            case MultiGet(keys):
                return [bytes(value) for value in store.multi_get(keys)]
            case MultiSet(items) if is_extended:
                store.multi_set(list(items), list(items.values()))
            case MultiSet(items):
                for key, value in items.items():
                    store.set(key, value)
            case Append(key, value) if is_extended:
                store.append(key, value)
            case Append():
                msg = f"{self!r} cannot append: use another store of torch, or braid's FileStore"
                raise ConfigError(msg)
        return None

    def _wait(self, keys: Sequence[str], timeout_s: float) -> None:
        if not keys:
            return
        # Torch rounds to whole milliseconds, and some of its stores wait without limit at 0.
        limit = timedelta(seconds=max(timeout_s, 1e-3))
        if timeout_s < POLLED_S:
            self._poll(keys, timeout_s)
            return
        with self._mapped():
            self._store.wait(list(keys), limit)

    def _poll(self, keys: Sequence[str], timeout_s: float) -> None:
        """Wait by polling: torch writes a warning to stderr whenever a wait times out."""
        deadline_s, pause_s = time.monotonic() + timeout_s, 1e-3
        while not self.check(keys):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                msg = "wait timeout"
                raise _TorchStoreError(msg)
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def __repr__(self) -> str:
        return f"TorchStore({type(self._store).__name__})"

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        """Raise braid's errors in place of torch's."""
        try:
            yield
        except dist.DistNetworkError as exc:
            msg = (
                f"lost the process that holds {self!r} (usually rank 0 of the job): "
                f"{_first_line(exc)}"
            )
            raise PeerLostError(msg, rank=0) from exc
        except dist.DistStoreError as exc:
            if isinstance(exc, CommTimeout):  # the store of torch uses a braid store
                raise
            raise _TorchStoreError(_first_line(exc)) from exc
        except (TypeError, ValueError) as exc:
            if isinstance(exc, ConfigError):
                raise
            msg = f"{self!r} refused a key or value: {_first_line(exc)}; pass str keys and bytes"
            raise ConfigError(msg) from exc


class _TorchStoreError(CommTimeout):
    """Error of torch's "wait timeout", which does not name the keys."""


class _DistStoreTimeout(CommTimeout, dist.DistStoreError):
    """A missing key; an error of braid and of torch, so that users of both can catch it."""


class _BraidBackedStore(TorchBase):
    """A braid Store as a store of torch.

    Torch's C++ looks up the names `deleteKey` and `getNumKeys`.
    """

    timeout: timedelta  # a property that torch's stubs lack

    def __init__(self, store: Store, timeout_s: float) -> None:
        super().__init__()
        self._store = store
        self.set_timeout(timedelta(seconds=timeout_s))

    def set(self, key: str, value: bytes | str) -> None:
        self._store.set(key, _to_bytes(value))

    def get(self, key: str) -> bytes:
        with self._timeouts():
            return self._store.get(key, self.timeout.total_seconds())

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return self._store.compare_set(key, _to_bytes(expected), _to_bytes(desired))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        with self._timeouts():
            self._store.wait(keys, (timeout or self.timeout).total_seconds())

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        with self._timeouts():
            return self._store.multi_get(keys, self.timeout.total_seconds())

    def multi_set(self, keys: list[str], values: Sequence[bytes | str]) -> None:
        self._store.multi_set(dict(zip(keys, map(_to_bytes, values), strict=True)))

    def append(self, key: str, value: bytes | str) -> None:
        self._store.append(key, _to_bytes(value))

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> TorchBase:
        return self  # torch clones a store for its threads; braid's stores serve all threads

    deleteKey = delete_key  # noqa: N815 - torch's name
    getNumKeys = num_keys  # noqa: N815 - torch's name

    @contextmanager
    def _timeouts(self) -> Iterator[None]:
        try:
            yield
        except CommTimeout as exc:
            raise _DistStoreTimeout(str(exc)) from exc


def as_torch_store(store: Store, timeout_s: float = DEFAULT_TIMEOUT_S) -> TorchBase:
    """Wrap `store` as a `torch.distributed.Store`.

    The result can be passed to `dist.init_process_group(store=...)` and PrefixStore. It is kept
    until the process ends, and `store` with it: torch's C++ keeps only the C++ part of a store
    written in Python, and would call the Python part after Python has freed it. (To be deleted when
    torch's PrefixStore and process groups use pybind11's `smart_holder` or a `keep_alive`.) Close
    `store` when the job ends.

    Args:
        store: A braid store whose operations may be called from any thread.
        timeout_s: Time-out of operations that are called without one; torch may change it with
            `set_timeout`.
    """
    torch_store = _BraidBackedStore(store, timeout_s)
    atexit.register(_release, torch_store)
    return torch_store


def _release(torch_store: TorchBase) -> None:
    """Do nothing. Its registration at exit keeps `torch_store` alive until then."""


def _to_bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _first_line(exc: BaseException) -> str:
    return (str(exc) or type(exc).__name__).splitlines()[0]
