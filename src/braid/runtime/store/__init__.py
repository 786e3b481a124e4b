"""A key-value service through which the processes of a job meet; see README.md. Without torch."""

from __future__ import annotations

from braid.runtime.store.client import StoreClient
from braid.runtime.store.exchange import (
    RanksMissingError,
    exchange,
    exchange_numbers,
)
from braid.runtime.store.file_store import FileStore
from braid.runtime.store.hash_store import HashStore
from braid.runtime.store.interface import PrefixStore, Store
from braid.runtime.store.protocol import STORE_LIMITS, STORE_ROLE
from braid.runtime.store.server import StoreServer

__all__ = [
    "STORE_LIMITS",
    "STORE_ROLE",
    "FileStore",
    "HashStore",
    "PrefixStore",
    "RanksMissingError",
    "Store",
    "StoreClient",
    "StoreServer",
    "exchange",
    "exchange_numbers",
]
