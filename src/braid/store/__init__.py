"""A key-value service through which the processes of a job meet; see README.md. Without torch."""

from __future__ import annotations

from braid.store.client import StoreClient
from braid.store.exchange import (
    RanksMissingError,
    exchange,
    exchange_numbers,
    wait_for_ranks,
)
from braid.store.file_store import FileStore
from braid.store.hash_store import HashStore
from braid.store.interface import PrefixStore, Store
from braid.store.protocol import STORE_LIMITS, STORE_ROLE
from braid.store.server import StoreServer

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
    "wait_for_ranks",
]
