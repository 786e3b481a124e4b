"""The nodes that take part: names, numbers and addresses of nodes, in a store that all share.

A node writes its record when it comes. Others read it when they first call it, so nodes may come
and go at any time. Where the number of nodes is fixed, all wait for all at the beginning.
"""

from __future__ import annotations

import re
import threading
from typing import NamedTuple, TypeAlias

import msgspec

from braid.errors import CommTimeout, RendezvousError
from braid.rpc.mistakes import RpcError
from braid.rpc.names import register
from braid.store import Store

__all__ = ["Directory", "Record", "To", "WorkerInfo", "check_name", "node_of"]

ROLE = "worker"
_NAME = re.compile(r"[A-Za-z0-9_:-]{1,128}")


@register
class WorkerInfo(NamedTuple):
    """A node of remote calls.

    Attributes:
        name: Its name.
        id: Its number.
    """

    name: str
    id: int


To: TypeAlias = str | int | WorkerInfo


class Record(msgspec.Struct, frozen=True):
    """Facts by which others reach a node."""

    name: str
    id: int
    address: str
    device_maps: dict[str, dict[str, str]] = {}


def check_name(name: str) -> None:
    """Check the name of a node.

    Raises:
        RpcError: It is too long, or has other signs than letters, digits, `_`, `:` and `-`.
    """
    if _NAME.fullmatch(str(name)) is None:
        msg = f"the name of a node has 1 to 128 letters, digits, '_', ':' or '-', got {name!r}"
        raise RpcError(msg)


def node_of(number: int) -> str:
    """Return the name of a node's van."""
    return f"{ROLE}:{number}"


class Directory:
    """Records of all nodes.

    Args:
        store: Store of all nodes, under a prefix of their own.
        timeout_s: Seconds to wait for a node that has not come.
    """

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._by_name: dict[str, Record] = {}
        self._by_id: dict[int, Record] = {}
        self._lock = threading.Lock()

    def add(self, record: Record) -> None:
        """Publish the record of this node.

        Raises:
            RendezvousError: Another node has the name or the number.
        """
        packed = msgspec.json.encode(record)
        for key in (f"name/{record.name}", f"id/{record.id}"):
            if self._store.compare_set(key, b"", packed) != packed:
                msg = (
                    f"name {record.name!r} or number {record.id} is not unique, another node has "
                    "it already: give each node a name and a number of its own"
                )
                raise RendezvousError(msg)
            self._store.set(key, packed)  # torch's older server wakes nobody after a compare_set
        self._remember(record)

    def remove_own(self, info: WorkerInfo) -> None:
        """Take the record of this node back, so that its name is free."""
        for key in (f"name/{info.name}", f"id/{info.id}"):
            self._store.delete_key(key)

    def forget(self, number: int) -> None:
        """Ask the store again for a node that was lost."""
        with self._lock:
            record = self._by_id.pop(number, None)
            if record is not None:
                self._by_name.pop(record.name, None)

    def wait_for(self, world_size: int) -> None:
        """Wait until nodes 0 to `world_size` - 1 have come.

        Raises:
            RendezvousError: Some did not come; names their numbers.
        """
        keys = [f"id/{number}" for number in range(world_size)]
        try:
            self._store.wait(keys, self._timeout_s)
        except CommTimeout as exc:
            absent = [n for n, key in enumerate(keys) if not self._store.check([key])]
            msg = (
                f"nodes {', '.join(map(str, absent))} of {world_size} did not call init_rpc within "
                f"{self._timeout_s:g} s: look for the first error there"
            )
            raise RendezvousError(msg) from exc
        for packed in self._store.multi_get(keys, self._timeout_s):
            self._remember(msgspec.json.decode(packed, type=Record))

    @property
    def known(self) -> list[Record]:
        """Records that are known here, by number."""
        with self._lock:
            return [self._by_id[number] for number in sorted(self._by_id)]

    def find(self, to: To) -> Record:
        """Return the record of a node.

        Raises:
            RpcError: There is no such node.
        """
        name: str | int = to.name if isinstance(to, WorkerInfo) else to
        record = self._by_name.get(name) if isinstance(name, str) else self._by_id.get(name)
        if record is not None:
            return record
        key = f"name/{name}" if isinstance(name, str) else f"id/{name}"
        if not self._store.check([key]):
            names = ", ".join(each.name for each in self.known)
            msg = f"there is no node {name!r} (known: {names})"
            raise RpcError(msg)
        record = msgspec.json.decode(self._store.get(key, self._timeout_s), type=Record)
        self._remember(record)
        return record

    def _remember(self, record: Record) -> None:
        with self._lock:
            self._by_name[record.name] = record
            self._by_id[record.id] = record
