"""Base class of nodes: role, number and post office, for tables and for keys and values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TypeVar

from typing_extensions import Self

from braid.ps.postoffice import Postoffice
from braid.ps.protocol.directory import SCHEDULER, Role, name_of

__all__ = ["BaseNode"]

AnyNode = TypeVar("AnyNode", bound="BaseNode")


class BaseNode(ABC):
    """Base class of the processes of a parameter server; a context manager.

    Args:
        postoffice: Sends and receives the node's messages; owned and closed by this object.
        role: Role of the node: scheduler, server or worker.
        number: Number of this server, or of this worker.
        counts: Number of servers and of workers at the beginning.

    Attributes:
        name: Name of the node, such as `worker:3`.
        role: Role of the node.
        number: Number of this server, or of this worker.
        num_servers: Number of servers at the beginning.
        num_workers: Number of workers at the beginning.
        postoffice: Sends and receives the node's messages.
    """

    def __init__(
        self, postoffice: Postoffice, role: Role, number: int, counts: tuple[int, int]
    ) -> None:
        self.name = name_of(role, number)
        self.role, self.number = role, number
        self.num_servers, self.num_workers = counts
        self.postoffice = postoffice

    @property
    def is_worker(self) -> bool:
        """Whether this node is a worker, which runs the training loop."""
        return self.role == "worker"

    @property
    def is_server(self) -> bool:
        """Whether this node is a server."""
        return self.role == "server"

    @property
    def is_scheduler(self) -> bool:
        """Whether this node is the scheduler."""
        return self.role == SCHEDULER

    @abstractmethod
    def close(self) -> None:
        """Leave the run in order."""

    @abstractmethod
    def abort(self, reason: str = "") -> None:
        """Leave the run immediately, because of an error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            text = f": {value}" if value is not None and str(value) else ""
            self.abort(f"it raised {kind.__name__}{text}")
