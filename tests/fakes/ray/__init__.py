"""A stand-in for Ray: actors are forked processes of this machine, whose nodes and resources the environment names.

FAKE_RAY_NODES is such as `a:2,b:2`, names with their processors, or a file with such a text. Only what braid's client uses
is here.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import selectors
import signal
from pathlib import Path

from . import cloudpickle, exceptions, util

__all__ = [
    "_private",
    "cloudpickle",
    "exceptions",
    "get",
    "get_runtime_context",
    "init",
    "is_initialized",
    "nodes",
    "remote",
    "shutdown",
    "util",
    "wait",
]
ACTORS: list[int] = []


def init(address: str = "auto", **_options: object) -> None:
    """Find the cluster."""
    if not os.environ.get("FAKE_RAY_NODES"):
        msg = "Could not find any running Ray instance."
        raise ConnectionError(msg)


def is_initialized() -> bool:
    """Never: as in a program that has not called `init`."""
    return False


def nodes() -> list[dict[str, object]]:
    """Nodes of the cluster."""
    return [
        {"NodeID": f"id-{name}", "NodeManagerHostname": name, "Alive": True} for name in _listed()
    ]


def _listed() -> dict[str, float]:
    listed = os.environ["FAKE_RAY_NODES"]
    listed = Path(listed).read_text() if "/" in listed else listed
    return {name: float(cpus) for name, cpus in (each.split(":") for each in listed.split(","))}


class _State:
    @staticmethod
    def available_resources_per_node() -> dict[str, dict[str, float]]:
        free = {f"id-{name}": {"CPU": cpus} for name, cpus in _listed().items()}
        for group in util.GROUPS:
            for bundle, label in zip(group.bundles, group.labels, strict=True):
                free[label["ray.io/node-id"]]["CPU"] -= bundle["CPU"]
        return free

    class state:  # noqa: N801 - Ray's name
        @staticmethod
        def get_draining_nodes() -> dict[str, int]:
            """Return nodes that go away, with their deadlines; a file lists them."""
            listed = Path(os.environ.get("FAKE_RAY_DRAINING", os.devnull)).read_text()
            return dict.fromkeys(listed.split(), 0)


class _private:  # noqa: N801 - Ray's name
    state = _State


class get_runtime_context:  # noqa: N801 - Ray's name
    @staticmethod
    def get_node_id() -> str:
        """Return the actor's process as its node."""
        return str(os.getpid())


class _Call:
    """A call of an actor's only method: a process and the pipe with its result."""

    def __init__(self, cls: type, arguments: tuple[object, ...]) -> None:
        self.reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # Ray ends actors whose owner is gone
            os.close(self.reader)
            result = cls().run(*arguments)
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(pickle.dumps(result))
            os._exit(0)
        os.close(writer)
        ACTORS.append(self.pid)

    def __hash__(self) -> int:
        return self.pid


class _Actor:
    def __init__(self, cls: type) -> None:
        self._cls = cls

    @property
    def run(self) -> _Actor:
        return self

    def remote(self, *arguments: object) -> _Call:
        return _Call(self._cls, arguments)


class _Class:
    def __init__(self, cls: type) -> None:
        self._cls = cls

    def options(self, **_options: object) -> _Class:
        return self

    def remote(self) -> _Actor:
        return _Actor(self._cls)


def remote(cls: type) -> _Class:
    """Make a class one of actors."""
    return _Class(cls)


def wait(
    calls: list[_Call], num_returns: int = 1, timeout: float | None = None
) -> tuple[list[_Call], list[_Call]]:
    """Wait for the first call that has ended."""
    assert num_returns == 1
    with selectors.DefaultSelector() as selector:
        for call in calls:
            selector.register(call.reader, selectors.EVENT_READ, call)
        ready = [key.data for key, _ in selector.select(timeout)][:1]
    return ready, [call for call in calls if call not in ready]


def get(call: _Call) -> object:
    """Return the result of a call, or raise what became of its actor."""
    with os.fdopen(call.reader, "rb") as pipe:
        text = pipe.read()
    os.waitpid(call.pid, 0)
    if not text:
        msg = "The actor is dead because its worker process has died. Worker exit detail: it was killed. Some common causes include: (1) any."
        raise exceptions.ActorDiedError(msg)
    return pickle.loads(text)


def shutdown() -> None:
    """End what is left."""
