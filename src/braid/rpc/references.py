"""Remote references: handles of values that live in one node, and what keeps those alive.

    rref = rpc.remote("ps", Net, args=(10,))     the value is made and stays there
    rref.to_here()                               a copy
    rref.rpc_sync().forward(x)                   a method runs there

`protocol.references_state` decides; this module has the values and the handles. A handle that
Python collects is released at the next opportunity, in another thread's time.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from types import GenericAlias
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from braid.errors import CommError
from braid.rpc.current import current_agent
from braid.rpc.functions import MARK, is_async_execution
from braid.rpc.names import register
from braid.rpc.outcomes import AnswerFuture, CallOutcome, RpcError, awaited
from braid.rpc.protocol.references_state import (
    Drop,
    Id,
    Instruction,
    ReferenceMessage,
    ReferencesState,
    Send,
    Unknown,
    Unmade,
)
from braid.rpc.workers import WorkerInfo

if TYPE_CHECKING:
    from braid.rpc.agent import Agent

__all__ = ["RRef", "References", "call_methods"]

_PUBLIC_DUNDERS = frozenset(
    {"__call__", "__len__", "__getitem__", "__setitem__", "__contains__", "__iter__", "__next__"}
)


class RRef:
    """A reference to a value of one node, which its owner keeps while a reference exists anywhere.

    It can be an argument and a result of remote calls.

    Args:
        value: Value, which this node owns.
        type_hint: For programs of torch; not used.

    Raises:
        StaleError: This process is no node.
    """

    __class_getitem__: Any = classmethod(GenericAlias)  # RRef[Net], in annotations

    def __init__(self, value: Any, type_hint: Any = None) -> None:
        del type_hint
        agent = current_agent()
        references = agent.references
        ref, fork = references.new_owned(value)
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
        """Whether the value lives in this node."""
        return self._owner.id == self._agent.info.id

    def owner(self) -> WorkerInfo:
        """Return the node in which the value lives."""
        return self._owner

    def owner_name(self) -> str:
        """Return the name of that node."""
        return self._owner.name

    def confirmed_by_owner(self) -> bool:
        """Whether the owner knows of this reference."""
        return self._agent.references.is_confirmed(self._fork)

    def to_here(self, timeout: float = -1.0) -> Any:
        """Return a copy of the value, or the value itself in its owner; waits until it is made.

        Args:
            timeout: Seconds; the node's own when -1, for ever when 0.

        Raises:
            Exception: What making the value raised.
            CommTimeout: It did not come in time.
            CommError: The value is gone.
        """
        if self.is_owner():
            return self._agent.references.wait_for(self._ref, timeout)
        self._agent.references.check(self._fork)
        return self._agent.caller.call_sync(self._owner.id, _fetch, (self,), {}, timeout)

    def local_value(self) -> Any:
        """Return the value in its owner; waits until it is made.

        Raises:
            RpcError: It lives in another node.
        """
        if not self.is_owner():
            msg = (
                f"the value of this reference lives in {self._owner.name}, not in "
                f"{self._agent.info.name}: call to_here(), or run a function there"
            )
            raise RpcError(msg)
        return self._agent.references.wait_for(self._ref, 0)

    def rpc_sync(self, timeout: float = -1.0) -> Any:
        """Return a proxy whose methods run on the value in its owner, and return the result."""
        return _Proxy(self, "sync", timeout)

    def rpc_async(self, timeout: float = -1.0) -> Any:
        """Return a proxy whose methods run on the value, and return futures."""
        return _Proxy(self, "async", timeout)

    def remote(self, timeout: float = -1.0) -> Any:
        """Return a proxy whose methods run on the value, and return references to the results."""
        return _Proxy(self, "remote", timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run the backward from the value, which is a tensor of one element.

        Args:
            dist_autograd_ctx_id: Context of distributed autograd; a local backward of the owner's
                value when -1.
            retain_graph: Whether the graph is kept.
        """
        if dist_autograd_ctx_id == -1 and not self.is_owner():
            msg = (
                "User RRefs require 'dist_autograd_ctx_id' to be specified: the value lives in "
                f"{self._owner.name}"
            )
            raise RpcError(msg)
        self._agent.caller.call_sync(
            self._owner.id, _backward, (self, dist_autograd_ctx_id, retain_graph), {}, -1.0
        )

    def _get_type(self, timeout: float = -1.0, blocking: bool = True) -> Any:
        caller = self._agent.caller
        call = caller.call_sync if blocking else caller.call_async
        return call(self._owner.id, _type_of, (self,), {}, timeout)

    def _serialize(self) -> None:
        self.__reduce__()

    def __reduce__(self) -> Any:
        msg = (
            "Can not pickle rref in python pickler: a remote reference travels as an argument or a "
            "result of remote calls only"
        )
        raise RuntimeError(msg)

    def __repr__(self) -> str:
        return f"<RRef {tuple(self._ref)} of {self._owner.name}>"


def call_methods(rrefs: Sequence[RRef], name: str, args: tuple[Any, ...]) -> list[CallOutcome]:
    """Call a method of several values at the same time; return when all calls have ended."""
    caller = rrefs[0]._agent.caller  # noqa: SLF001 - of this module
    return caller.call_each((rref.owner().id, _method, (rref, name, args, {})) for rref in rrefs)


class _Proxy:
    """Methods of a value that lives elsewhere."""

    def __init__(self, rref: RRef, how: str, timeout: float) -> None:
        self._rref, self._how, self._timeout = rref, how, timeout

    def __getattr__(self, name: str) -> Any:
        rref, agent = self._rref, self._rref._agent  # noqa: SLF001 - of the same module

        def invoke(*args: Any, **kwargs: Any) -> Any:
            to, values = rref.owner().id, (rref, name, args, kwargs)
            if self._how == "sync":
                return agent.caller.call_sync(to, _method, values, {}, self._timeout)
            if self._how == "async":
                return agent.caller.call_async(to, _method, values, {}, self._timeout)
            return agent.caller.remote(to, _method, values, {}, self._timeout)

        return invoke


class Counts(NamedTuple):
    """Numbers of references of a node.

    Attributes:
        shared: Values of this node that others refer to, or that a call has made.
        forks: References to them.
        creating: Values that other nodes are about to make.
        pending: References held or passed on here that their owners have not confirmed.
    """

    shared: int
    forks: int
    creating: int
    pending: int


class References:
    """Values that this node owns, and handles that it has.

    Args:
        agent: The node.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.RLock()
        first = (agent.incarnation % (1 << 30) << 32) + 1
        self._state = ReferencesState(agent.info.id, first)
        self._values: dict[Id, torch.futures.Future[Any]] = {}
        self._errors: dict[Id, BaseException] = {}  # of forks whose value is gone
        self.released: deque[tuple[Id, Id]] = deque()  # handles that Python has collected

    @property
    def state(self) -> ReferencesState:
        """Decisions, for introspection."""
        return self._state

    def counts(self) -> Counts:
        """Return how many references there are."""
        with self._lock:
            return Counts(*self._state.counts())

    @property
    def oldest_open(self) -> int:
        """Number below which all requests of this node are over."""
        with self._lock:
            return self._state.oldest_open

    def new_owned(self, value: Any) -> tuple[Id, Id]:
        """Take a value of this node."""
        future: torch.futures.Future[Any] = AnswerFuture()
        future.set_result(value)
        with self._lock:
            ref, fork = self._state.new_owned()
            self._values[ref] = future
        return ref, fork

    def new_remote(self, owner: WorkerInfo) -> tuple[RRef, Id, Id]:
        """Return a handle of a value that another node is about to make."""
        with self._lock:
            if owner.id == self._agent.info.id:
                ref, fork = self._state.new_owned()
                self._values[ref] = AnswerFuture()
            else:
                ref, fork = self._state.new_remote(owner.id)
        return RRef._of(self._agent, ref, fork, owner), ref, fork  # noqa: SLF001 - of this module

    def created(self, fork: Id, error: BaseException | None = None) -> None:
        """Note that the owner makes the value of `new_remote`, or that it cannot be asked."""
        with self._lock:
            if error is not None and self._state.is_held(fork):
                self._errors[fork] = error.with_traceback(None)  # whose frames have arguments
            done = self._state.created(fork)
        self._act(done)

    def accept(self, ref: Id, fork: Id, user: int, oldest_open: int) -> None:
        """Register a value that a peer is about to make here."""
        with self._lock:
            self._values.setdefault(ref, AnswerFuture())
            done = self._state.accept(ref, fork, user, oldest_open)
        self._act(done)

    def set_value(self, ref: Id, value: Any, error: BaseException | None) -> None:
        """Complete a value; nobody may want it any more."""
        with self._lock:
            future = self._values.get(ref)
        if future is not None and not future.done():
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

    def share(self, value: Any, receiver: int) -> Any:
        """Return what stands for a reference in a message; None for other values."""
        if not isinstance(value, RRef):
            return None
        self.check(value._fork)  # noqa: SLF001 - of this module
        with self._lock:
            child = self._state.share(value._ref, value._fork, receiver)  # noqa: SLF001
        owner = value.owner()
        return [list(value._ref), list(child), owner.name, owner.id]  # noqa: SLF001

    def unshare(self, data: Sequence[Any]) -> None:
        """Take a reference back that was shared for a message which will not leave."""
        with self._lock:
            done = self._state.unshare(Id(*data[0]), Id(*data[1]))
        self._act(done)

    def confirmed(self, children: Sequence[Id]) -> None:
        """Learn that a call which brought forks home is answered, or has not left."""
        with self._lock:
            done = [each for child in children for each in self._state.confirmed(child)]
        self._act(done)

    def receive(self, data: Sequence[Any], sender: int, *, will_answer: bool) -> RRef:
        """Return the handle of a reference that came in a message."""
        ref, fork = Id(*data[0]), Id(*data[1])
        owner = WorkerInfo(data[2], data[3])
        with self._lock:
            handle, done = self._state.receive(ref, fork, owner.id, sender, will_answer=will_answer)
            if handle is not None and owner.id == self._agent.info.id:  # it may still be to come
                self._values.setdefault(ref, AnswerFuture())
        self._act(done)
        if handle is None:
            msg = f"the value of a reference that {owner.name} has had is gone"
            raise CommError(msg)
        return RRef._of(self._agent, ref, handle, owner)  # noqa: SLF001 - of this module

    def future_of(self, ref: Id) -> torch.futures.Future[Any]:
        """Return the future of a value of this node.

        Raises:
            CommError: It is gone.
        """
        with self._lock:
            future = self._values.get(ref)
        if future is None:
            msg = f"{self._agent.info.name} has no value for reference {tuple(ref)} any more"
            raise CommError(msg)
        return future

    def wait_for(self, ref: Id, timeout: float) -> Any:
        """Return a value of this node when it is made."""
        return self._agent.wait_for(self.future_of(ref), timeout)

    def check(self, fork: Id) -> None:
        """Raise if the value of a handle is known to be gone, or could not be made."""
        error = self._errors.get(fork)
        if error is not None:
            raise error

    def is_confirmed(self, fork: Id) -> bool:
        """Whether the owner knows a fork."""
        with self._lock:
            return self._state.is_confirmed(fork)

    def on_message(self, sender: int, message: ReferenceMessage) -> None:
        """Handle a message of the protocol."""
        with self._lock:
            done = self._state.on_message(sender, message)
        self._act(done)

    def lost(self, process: int) -> None:
        """Let go what a lost node held."""
        with self._lock:
            done = self._state.lost(process)
        self._act(done)

    def collect(self) -> None:
        """Release the handles that Python has collected."""
        while self.released:
            ref, fork = self.released.popleft()
            with self._lock:
                self._errors.pop(fork, None)
                done = self._state.release(ref, fork)
            self._act(done)

    def close(self) -> None:
        """Drop all values. One that refers to another node would keep this node for ever."""
        with self._lock:
            self._values.clear()
            self._errors.clear()

    def _act(self, instructions: Sequence[Instruction]) -> None:
        """Execute instructions, without the lock: a send may wait, and may come in any order."""
        for each in instructions:
            match each:
                case Send(to, message):
                    self._agent.transmit(to, message)
                case Drop(ref):
                    self._values.pop(ref, None)
                case Unknown(fork, reason):
                    self._errors[fork] = CommError(f"the value of a reference is gone: {reason}")
                case Unmade(ref, reason):
                    error = CommError(f"the value of a reference is gone: {reason}")
                    self.set_value(ref, None, error)


@register
def _fetch(rref: RRef) -> Any:
    """Return the value, when it is made; in its owner."""
    return rref._agent.references.future_of(rref._ref)  # noqa: SLF001 - of this module


setattr(_fetch, MARK, _fetch)


@register
def _method(rref: RRef, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of the value; in its owner."""
    if name.startswith("__") and name not in _PUBLIC_DUNDERS:
        msg = f"peers may not call {name} of a value"
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
