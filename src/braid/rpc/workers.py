"""Directory of the nodes: their names, numbers and addresses, in a shared store.

A node writes its record when it starts. Others read it before their first call to it, so nodes may
join and leave at any time. If the number of nodes is fixed, all nodes wait for all at the start.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from braid.errors import CommTimeout, RendezvousError
from braid.rpc.names import register
from braid.rpc.outcomes import RpcError
from braid.runtime.store import Store

__all__ = ["LOOK_S", "To", "WorkerDirectory", "WorkerInfo", "WorkerRecord", "check_name", "node_of"]

ROLE = "worker"
_CLASH = "clash"
# after which a node that waits for others looks whether some cannot come; torch's store logs two
# lines for each wait that ends without its keys
LOOK_S = 5.0
_NAME = re.compile(r"[A-Za-z0-9_:-]{1,128}")


@register
@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Name and number of a node of remote calls.

    Attributes:
        name: Name of the node.
        id: Number of the node.

    Raises:
        RpcError: The name cannot be the name of a node.
    """

    name: str
    id: int

    def __post_init__(self) -> None:
        """Check the name."""
        check_name(self.name)


To: TypeAlias = str | int | WorkerInfo


class WorkerRecord(msgspec.Struct, frozen=True):
    """Record of a node in the store, from which other nodes read how to reach it."""

    name: str
    id: int
    address: str
    device_maps: dict[str, dict[str, str]] = {}


def check_name(name: str) -> None:
    """Check the name of a node.

    Raises:
        RpcError: The name is too long, or has characters other than letters, digits, `_`, `:`, `-`.
    """
    if _NAME.fullmatch(str(name)) is None:
        msg = (
            f"the name of a node must have 1 to 128 letters, digits, '_', ':' or '-', got {name!r}"
        )
        raise RpcError(msg)


def node_of(number: int) -> str:
    """Return the name that the van (transport) of the node with this number has."""
    return f"{ROLE}:{number}"


class WorkerDirectory:
    """Records of all nodes.

    Args:
        store: Store shared by all nodes, with a prefix for them; public.
        timeout_s: Seconds to wait for a node that has not written its record.
    """

    def __init__(self, store: Store, timeout_s: float) -> None:
        self.store = store
        self._timeout_s = timeout_s
        self._by_name: dict[str, WorkerRecord] = {}
        self._by_id: dict[int, WorkerRecord] = {}
        self._lock = threading.Lock()

    def add(self, record: WorkerRecord, is_gone: Callable[[str], bool] = lambda _: False) -> None:
        """Publish the record of this node; replace the record of an earlier process.

        Args:
            record: The record.
            is_gone: Function that returns whether no node listens on an address.

        Raises:
            RendezvousError: Another node has the name or the number.
        """
        packed = msgspec.json.encode(record)
        for key in (f"name/{record.name}", f"id/{record.id}"):
            owner = self.store.compare_set(key, b"", packed)
            if owner != packed:
                other = msgspec.json.decode(owner, type=WorkerRecord)
                is_own = (other.name, other.id) == (record.name, record.id)
                if is_own and is_gone(other.address):
                    owner = self.store.compare_set(key, owner, packed)
            if owner != packed:
                shared = f"number {record.id}" if key[0] == "i" else f"name {record.name!r}"
                msg = (
                    f"{shared} is not unique: node {other.id} ({other.name}) and node "
                    f"{record.id} ({record.name}) both have it. Give each node a different name "
                    "and number"
                )
                self.store.set(_CLASH, msg.encode())
                raise RendezvousError(msg)
            self.store.set(key, packed)  # torch's older server wakes no waiter after compare_set
        self._remember(record)

    def remove_own(self, info: WorkerInfo) -> None:
        """Remove the record of this node from the store, so that its name can be used again."""
        for key in (f"name/{info.name}", f"id/{info.id}"):
            self.store.delete_key(key)

    def forget(self, number: int) -> None:
        """Forget the record of the lost node `number`, so that `find` reads the store again."""
        with self._lock:
            record = self._by_id.pop(number, None)
            if record is not None:
                self._by_name.pop(record.name, None)

    def wait_for(self, world_size: int) -> None:
        """Wait until nodes 0 to `world_size` - 1 have come.

        Raises:
            RendezvousError: Some nodes did not arrive (the message has their numbers), or two nodes
                have the same name.
        """
        keys = [f"id/{number}" for number in range(world_size)]
        until = time.monotonic() + self._timeout_s
        self._raise_clash()  # that happened before this node came
        while not self._has_come(keys, until):
            self._raise_clash()
            if time.monotonic() < until:
                continue
            absent = [n for n, key in enumerate(keys) if not self.store.check([key])]
            msg = (
                f"nodes {', '.join(map(str, absent))} of {world_size} did not call init_rpc "
                f"within {self._timeout_s:g} s: see their logs for the first error"
            )
            raise RendezvousError(msg)
        self._raise_clash()
        for packed in self.store.multi_get(keys, self._timeout_s):
            self._remember(msgspec.json.decode(packed, type=WorkerRecord))

    def _raise_clash(self) -> None:
        """Raise RendezvousError if two nodes have the same name or number."""
        if not self.store.check([_CLASH]):
            return
        raise RendezvousError(self.store.get(_CLASH, self._timeout_s).decode())

    def leave(self, record: WorkerRecord, world_size: int) -> None:
        """Wake nodes that wait for this one, after an error of `add` or `wait_for`.

        Node 0 may hold the store, so it waits for some seconds until they have read the reason.
        """
        self.store.set(f"{_CLASH}/{record.id}", b"1")
        key = f"id/{record.id}"
        packed = msgspec.json.encode(record)
        self.store.set(key, self.store.compare_set(key, b"", packed))
        if record.id == 0:
            keys = [f"{_CLASH}/{number}" for number in range(1, world_size)]
            self._has_come(keys, time.monotonic() + LOOK_S)

    def _has_come(self, keys: list[str], until: float) -> bool:
        """Wait for a short time until all keys are set; return whether they are."""
        try:
            self.store.wait(keys, max(0.0, min(LOOK_S, until - time.monotonic())))
        except CommTimeout:
            return False
        return True

    @property
    def known(self) -> list[WorkerRecord]:
        """Records that this node has read so far, by number."""
        with self._lock:
            return [self._by_id[number] for number in sorted(self._by_id)]

    @property
    def infos(self) -> list[WorkerInfo]:
        """Names and numbers of the nodes with records that this node has read so far."""
        return [WorkerInfo(record.name, record.id) for record in self.known]

    def find(self, to: To) -> WorkerRecord:
        """Return the record of a node.

        Raises:
            RpcError: The node does not exist.
        """
        name: str | int = to.name if isinstance(to, WorkerInfo) else to
        record = self._by_name.get(name) if isinstance(name, str) else self._by_id.get(name)
        if record is not None:
            return record
        key = f"name/{name}" if isinstance(name, str) else f"id/{name}"
        if not self.store.check([key]):
            names = ", ".join(record.name for record in self.known)
            msg = f"node {name!r} does not exist: choose one of {names}"
            raise RpcError(msg)
        record = msgspec.json.decode(self.store.get(key, self._timeout_s), type=WorkerRecord)
        self._remember(record)
        return record

    def _remember(self, record: WorkerRecord) -> None:
        with self._lock:
            self._by_name[record.name] = record
            self._by_id[record.id] = record
