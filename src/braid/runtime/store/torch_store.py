"""Adapters between braid's stores and torch's: each can be used where the other is required.

Problem: under torchrun ranks meet through torch's TCPStore; under braid's launcher,
torch.distributed needs a `dist.Store` over braid's authenticated one. The two differ in time-outs,
errors and the types of values.

Idea: `TorchStore` is a braid Store over any `dist.Store`. `as_torch_store` is the reverse, a
subclass of `dist.Store` whose methods torch's C++ calls (PrefixStore, Gloo's rendezvous, ...). This
is the only module of the package that imports torch.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store as TorchBase  # mypy does not see dist.Store

from braid.errors import CommTimeout, ConfigError, PeerLostError
from braid.runtime.store.interface import Store, missing_keys_error
from braid.runtime.wire import DEFAULT_TIMEOUT_S

__all__ = ["TorchStore", "as_torch_store"]


POLLED_S = 1.0  # waits that are shorter ask again and again
LONGEST_PAUSE_S = 0.02


class TorchStore:
    """A braid Store over a store of torch.

    Args:
        store: Any `dist.Store`.
        default_timeout_s: Deadline of operations that are given none.

    On failure: as for all stores. But torch's TCPStore serves one operation of a client at a time,
    so a thread that waits holds up the other threads of its process. An `add` to something that is
    no number ends its connection.
    """

    def __init__(self, store: TorchBase, default_timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._store: Any = store  # its annotations say str where it accepts bytes
        self.default_timeout_s = default_timeout_s

    def set(self, key: str, value: bytes) -> None:
        """Set `key` to `value`."""
        with self._mapped():
            self._store.set(key, value)

    def get(self, key: str, timeout_s: float | None = None) -> bytes:
        """Return the value of `key`; waits until it is set."""
        self.wait([key], timeout_s)
        with self._mapped():
            return bytes(self._store.get(key))

    def add(self, key: str, n: int) -> int:
        """Add `n` to the decimal number in `key` (0 when missing) and return the sum."""
        with self._mapped():
            return int(self._store.add(key, n))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set `key` to `desired` if it holds `expected`, or is missing and `expected` is empty."""
        with self._mapped():
            return bytes(self._store.compare_set(key, expected, desired))

    def wait(self, keys: Sequence[str], timeout_s: float | None = None) -> None:
        """Wait until all `keys` are set."""
        timeout_s = self.default_timeout_s if timeout_s is None else timeout_s
        # Torch rounds to whole milliseconds, and treats none as "for ever" in some of its stores.
        limit = timedelta(seconds=max(timeout_s, 1e-3))
        try:
            if timeout_s < POLLED_S:
                self._poll(keys, timeout_s)
                return
            with self._mapped():
                self._store.wait(list(keys), limit)
        except _TorchStoreError as exc:
            missing = [key for key in dict.fromkeys(keys) if not self.check([key])]
            raise missing_keys_error(missing or keys, timeout_s, repr(self)) from exc

    def _poll(self, keys: Sequence[str], timeout_s: float) -> None:
        """Wait by asking: torch warns on stderr of each wait that ends without its keys."""
        deadline_s, pause_s = time.monotonic() + timeout_s, 1e-3
        while not self.check(keys):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                msg = "wait timeout"
                raise _TorchStoreError(msg)
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all `keys` are set now."""
        with self._mapped():
            return bool(self._store.check(list(keys)))

    def delete_key(self, key: str) -> bool:
        """Remove `key`; returns whether it was set."""
        with self._mapped():
            return bool(self._store.delete_key(key))

    def num_keys(self) -> int:
        """Number of keys in the whole store, with those of torch."""
        with self._mapped():
            return int(self._store.num_keys())

    def multi_get(self, keys: Sequence[str], timeout_s: float | None = None) -> list[bytes]:
        """Return the values of `keys`; waits until all are set."""
        if not keys:
            return []  # torch's HashStore fails on an empty list
        self.wait(keys, timeout_s)
        with self._mapped():
            if self._store.has_extended_api():
                return [bytes(value) for value in self._store.multi_get(list(keys))]
            return [bytes(self._store.get(key)) for key in keys]

    def multi_set(self, items: Mapping[str, bytes]) -> None:
        """Set several keys; at once unless torch's store cannot (its FileStore)."""
        with self._mapped():
            if self._store.has_extended_api():
                self._store.multi_set(list(items), list(items.values()))
                return
            for key, value in items.items():
                self._store.set(key, value)

    def append(self, key: str, value: bytes) -> None:
        """Append `value` to the value of `key`, which is created if missing."""
        with self._mapped():
            if not self._store.has_extended_api():
                msg = f"{self!r} cannot append: use another store of torch, or braid's FileStore"
                raise ConfigError(msg)
            self._store.append(key, value)

    def __repr__(self) -> str:
        return f"TorchStore({type(self._store).__name__})"

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        """Raise torch's errors as braid's."""
        try:
            yield
        except dist.DistNetworkError as exc:
            msg = (
                f"lost the process that holds {self!r} (rank 0 of the job, as a rule): "
                f"{_first_line(exc)}"
            )
            raise PeerLostError(msg, rank=0) from exc
        except dist.DistStoreError as exc:
            if isinstance(exc, CommTimeout):  # a braid store below torch's
                raise
            raise _TorchStoreError(_first_line(exc)) from exc
        except (TypeError, ValueError) as exc:
            if isinstance(exc, ConfigError):
                raise
            msg = f"{self!r} refused a key or value: {_first_line(exc)}; pass str keys and bytes"
            raise ConfigError(msg) from exc


class _TorchStoreError(CommTimeout):
    """Torch's "wait timeout", which does not name the keys."""


class _DistStoreTimeout(CommTimeout, dist.DistStoreError):
    """A missing key, as users of braid and of torch catch it."""


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
        return self  # torch clones a store for its threads; braid's serve all threads

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

    It serves `dist.init_process_group(store=...)` and PrefixStore. The result, and with it `store`,
    is kept until the process ends: torch's C++ keeps only its own half of a store written in
    Python, and calls into the other half after Python has freed it. (To be deleted when pybind11's
    `smart_holder` or a `keep_alive` reaches torch's PrefixStore and process groups.) Close `store`
    when the job is done.

    Args:
        store: A braid store whose operations may be called from any thread.
        timeout_s: Deadline of operations that are given none; torch may set another with
            `set_timeout`.
    """
    torch_store = _BraidBackedStore(store, timeout_s)
    atexit.register(_release, torch_store)
    return torch_store


def _release(torch_store: TorchBase) -> None:
    """Do nothing at exit; until then the registration keeps `torch_store` alive."""


def _to_bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _first_line(exc: BaseException) -> str:
    return (str(exc) or type(exc).__name__).splitlines()[0]
