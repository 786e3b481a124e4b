"""Remote references: handles that keep values alive in the node that owns them.

    rref = rpc.remote("ps", Net, args=(10,))     the value is made and stays there
    rref.to_here()                               a copy
    rref.rpc_sync().forward(x)                   a method runs there

This module has the handles; the values and the state of all references are in `reference_table`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import GenericAlias
from typing import Any

import torch

from braid.rpc.agent import Agent
from braid.rpc.caller import OutgoingCall
from braid.rpc.current import current_agent
from braid.rpc.functions import MARK, is_async_execution
from braid.rpc.names import register
from braid.rpc.outcomes import CallOutcome, RpcError, awaited
from braid.rpc.protocol.reference_messages import Id
from braid.rpc.reference_table import References
from braid.rpc.workers import WorkerInfo
from braid.runtime.message import split_node

__all__ = ["RRef", "call_methods", "create", "receive", "share"]

_PUBLIC_DUNDERS = frozenset(
    {"__call__", "__len__", "__getitem__", "__setitem__", "__contains__", "__iter__", "__next__"}
)


class RRef:
    """Reference to a value on another node, which is kept while any reference to it exists.

    It can be an argument and a result of remote calls.

    Args:
        value: Value, which this node owns.
        type_hint: For programs of torch; not used.

    Raises:
        StaleError: This process is not a node.
    """

    __class_getitem__: Any = classmethod(GenericAlias)  # RRef[Net], in annotations

    def __init__(self, value: Any, type_hint: Any = None) -> None:
        del type_hint
        agent = current_agent()
        ref, fork = agent.references.new_owned(value)
        self._set(agent, ref, fork, agent.info)

    @classmethod
    def _of(cls, agent: Agent, ref: Id, fork: Id, owner: WorkerInfo) -> RRef:
        """Return the handle of a fork."""
        handle = cls.__new__(cls)
        handle._set(agent, ref, fork, owner)  # noqa: SLF001 - another way to construct one
        return handle

    def _set(self, agent: Agent, ref: Id, fork: Id, owner: WorkerInfo) -> None:
        self._agent, self._ref, self._fork, self._owner = agent, ref, fork, owner
        finalizer = weakref.finalize(self, agent.references.released.append, (ref, fork))
        finalizer.atexit = False

    def is_owner(self) -> bool:
        """Return whether the value is on this node."""
        return self._owner.id == self._agent.info.id

    def owner(self) -> WorkerInfo:
        """Return the node that has the value."""
        return self._owner

    def owner_name(self) -> str:
        """Return the name of the node that has the value."""
        return self._owner.name

    def confirmed_by_owner(self) -> bool:
        """Return whether the owner has registered this reference."""
        return self._agent.references.is_confirmed(self._fork)

    def to_here(self, timeout: float = -1.0) -> Any:
        """Wait for the value, and return a copy of it; on the owner, the value itself.

        Args:
            timeout: Seconds; the node's default when -1, unlimited when 0.

        Raises:
            Exception: The exception of the function that makes the value.
            CommTimeout: The value did not arrive in time.
            CommError: The value was dropped or its owner is lost.
        """
        if self.is_owner():
            return self._made_here(timeout)
        self._agent.references.check(self._fork)
        return self._agent.caller.call_sync(self._call(_fetch, timeout=timeout))

    def local_value(self) -> Any:
        """Wait for the value, and return it; only on its owner.

        Raises:
            RpcError: The value lives in another node.
        """
        if not self.is_owner():
            msg = (
                f"the value of this reference lives in {self._owner.name}, not in "
                f"{self._agent.info.name}: call to_here() to copy it, or call a function on that "
                "node"
            )
            raise RpcError(msg)
        return self._made_here(0)

    def _made_here(self, timeout: float) -> Any:
        return self._agent.wait_for(self._agent.references.future_of(self._ref), timeout)

    def rpc_sync(self, timeout: float = -1.0) -> Any:
        """Return a proxy: its methods run on the owner and return results; `timeout` in seconds."""
        return _Proxy(self, self._agent.caller.call_sync, timeout)

    def rpc_async(self, timeout: float = -1.0) -> Any:
        """Return a proxy: its methods run on the owner and return futures; `timeout` in seconds."""
        return _Proxy(self, self._agent.caller.call_async, timeout)

    def remote(self, timeout: float = -1.0) -> Any:
        """Return a proxy: its methods run on the owner and return RRefs; `timeout` in seconds."""
        return _Proxy(self, partial(create, self._agent), timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run the backward from the value, which is a tensor of one element.

        Args:
            dist_autograd_ctx_id: Context of distributed autograd; a local backward of the owner's
                value when -1.
            retain_graph: Whether the graph is kept.
        """
        if dist_autograd_ctx_id == -1 and not self.is_owner():
            msg = (
                "User RRefs require 'dist_autograd_ctx_id' to be specified: pass it, because the "
                f"value is on {self._owner.name}"
            )
            raise RpcError(msg)
        self._agent.caller.call_sync(self._call(_backward, dist_autograd_ctx_id, retain_graph))

    def _get_type(self, timeout: float = -1.0, blocking: bool = True) -> Any:
        caller = self._agent.caller
        call = caller.call_sync if blocking else caller.call_async
        return call(self._call(_type_of, timeout=timeout))

    def _call(
        self, function: Callable[..., Any], *args: Any, timeout: float = -1.0
    ) -> OutgoingCall:
        """Return a call of a function in the owner, with this reference before its arguments."""
        return OutgoingCall(self._owner.id, function, (self, *args), None, timeout)

    def _serialize(self) -> None:
        self.__reduce__()

    def __reduce__(self) -> Any:
        msg = (
            "Can not pickle rref in python pickler: pass a remote reference only as an argument "
            "or a result of remote calls"
        )
        raise RuntimeError(msg)

    def __repr__(self) -> str:
        return f"<RRef {tuple(self._ref)} of {self._owner.name}>"


def create(agent: Agent, call: OutgoingCall) -> RRef:
    """Call a function in another node; return a reference to its result; see `Caller.create`."""
    return RRef._of(agent, *agent.caller.create(call))  # noqa: SLF001 - of this module


def share(references: References, value: Any, receiver: int) -> Any:
    """Return plain data for a remote reference in a message to a node; None for other values."""
    if not isinstance(value, RRef):
        return None
    child = references.share(value._ref, value._fork, receiver)  # noqa: SLF001
    owner = value.owner()
    return [list(value._ref), list(child), owner.name, owner.id]  # noqa: SLF001


def receive(agent: Agent, data: Sequence[Any], sender: str, will_answer: bool) -> RRef:
    """Convert the plain data of `share`, which came in a message, to an RRef."""
    ref, fork, owner = Id(*data[0]), Id(*data[1]), WorkerInfo(data[2], data[3])
    held = agent.references.receive(
        ref, fork, owner, split_node(sender)[1], will_answer=will_answer
    )
    return RRef._of(agent, ref, held, owner)  # noqa: SLF001


def call_methods(rrefs: Sequence[RRef], name: str, args: tuple[Any, ...]) -> list[CallOutcome]:
    """Call the method `name` of several values at the same time; return when all have ended."""
    caller = rrefs[0]._agent.caller  # noqa: SLF001 - of this module
    return caller.call_each(rref._call(_method, name, args, {}) for rref in rrefs)  # noqa: SLF001


class _Proxy:
    """Methods of a value that lives elsewhere; `make` is a method of the caller, or `create`."""

    def __init__(self, rref: RRef, make: Callable[[OutgoingCall], Any], timeout: float) -> None:
        self._rref, self._make, self._timeout = rref, make, timeout

    def __getattr__(self, name: str) -> Any:
        def invoke(*args: Any, **kwargs: Any) -> Any:
            return self._make(self._rref._call(_method, name, args, kwargs, timeout=self._timeout))  # noqa: SLF001

        return invoke


@register
def _fetch(rref: RRef) -> Any:
    """Return the value, when it is made; in its owner."""
    return rref._agent.references.future_of(rref._ref)  # noqa: SLF001 - of this module


setattr(_fetch, MARK, _fetch)


@register
def _method(rref: RRef, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of the value; in its owner."""
    if name.startswith("__") and name not in _PUBLIC_DUNDERS:
        msg = (
            f"other nodes may not call the method {name} of a value: call it in a function of "
            "the owner"
        )
        raise RpcError(msg)
    value = rref.local_value()
    method = getattr(value, name)
    with getattr(value, "_braid_rpc_lock", contextlib.nullcontext()):  # of `serving.serial`
        result = method(*args, **kwargs)
    return awaited(result) if is_async_execution(method) else result


@register
def _type_of(rref: RRef) -> type:
    """Return the type of the value; in its owner."""
    return type(rref.local_value())


@register
def _backward(rref: RRef, context: int, retain_graph: bool) -> None:
    """Run a backward from the value; in its owner."""
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        msg = f"RRef should contain a tensor for .backward(), got {type(value).__name__}"
        raise RpcError(msg)
    if context == -1:
        torch.autograd.backward([value], retain_graph=retain_graph)
    else:
        rref._agent.contexts.backward(context, [value], retain_graph)  # noqa: SLF001
