"""The agent of a node: creates the node's components and dispatches each message to one of them.

    caller                                             callee
    pack arguments ── Call ──> van ── a thread of its pool: find, unpack, run, pack
    the future completes    <── CallReply or Raised ──────────┘

Each component holds only components before it in this list, and gets callbacks to later ones:

    pool, peers, references, codec, contexts, caller, callee

The thread that waits for an answer receives it itself; see `leader_followers`. A call has a
deadline, and fails when its callee is lost.

Source: A. Birrell, B. Nelson, "Implementing Remote Procedure Calls", ACM TOCS 1984.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar, get_args

import torch

from braid.errors import CommTimeout
from braid.rpc.autograd.contexts import Contexts
from braid.rpc.callee import Callee
from braid.rpc.caller import Caller
from braid.rpc.codec import Codec
from braid.rpc.leader_followers import LeaderFollowers
from braid.rpc.messages import Call, CallReply, CancelCall, Raised
from braid.rpc.names import Names
from braid.rpc.options import RpcOptions, place_of
from braid.rpc.peers import Peers
from braid.rpc.protocol.autograd_state import AutogradMessage
from braid.rpc.reference_table import References
from braid.rpc.scope import CallSpans
from braid.rpc.workers import WorkerDirectory, WorkerInfo
from braid.runtime.message import Delivery, PeerLost, Van, split_node

__all__ = ["ACTING", "Agent"]

ACTING: ContextVar[Agent | None] = ContextVar("braid-rpc-agent", default=None)  # see `current`

Future = torch.futures.Future
Part = TypeVar("Part")
_AUTOGRAD = get_args(AutogradMessage)


class Agent:
    """A node of remote calls: its connections, pending calls, references and contexts.

    Args:
        van: Connections of the node to other nodes, owned and closed by this object.
        info: Name and number of the node.
        directory: Records of all nodes.
        options: Options of the node; `Agent.options` is a copy, and its `rpc_timeout` may change.
        spans: Records of the node's calls.
        world_size: Number of nodes; None if nodes come and go.
        share: Function that returns plain data for a remote reference; see `references`.
        receive: Function that converts such data back to a remote reference.
    """

    def __init__(
        self,
        van: Van,
        info: WorkerInfo,
        directory: WorkerDirectory,
        options: RpcOptions,
        spans: CallSpans,
        world_size: int | None,
        *,
        share: Callable[[References, Any, int], Any],
        receive: Callable[[Agent, Any, str, bool], Any],
    ) -> None:
        self.info = info
        self.options = options = copy.copy(options)
        self.directory = directory
        self.world_size = world_size
        self.resources = contextlib.ExitStack()  # closed with the node
        self._parts: dict[type, Any] = {}
        self._van = van
        self._pool = pool = LeaderFollowers(
            van,
            self._handle,
            self._handle_at_once,
            self._tick,
            lambda delivery: isinstance(delivery.message, Call),
            options.num_worker_threads,
        )
        self.peers = peers = Peers(
            van, info, directory, pool.submit, lambda to: self.references.lost(process=to)
        )
        self.references = references = References(peers)
        self.codec = codec = Codec(
            Names(options.allowed_modules, is_open=options.allow_pickle),
            partial(share, references),
            references.unshare,
            partial(receive, self),
            lambda device, to: place_of(device, info.name, options.device_maps, directory.find(to)),
            allow_pickle=options.allow_pickle,
        )
        self.contexts = contexts = Contexts(peers, pool, codec, options)
        self.caller = Caller(peers, pool, codec, references, contexts, spans, options)
        self.callee = Callee(
            peers=peers,
            codec=codec,
            references=references,
            contexts=contexts,
            spans=spans,
            act=partial(ACTING.set, self),
            cancel_made=self.caller.cancel,
            on_end=self._notify_if_idle,
        )
        pool.start()

    def part(self, kind: type[Part]) -> Part:
        """Return the node's single instance of a class, constructed at the first use."""
        made: Part = self._parts.setdefault(kind, kind())
        return made

    def wait_for(self, future: Future[Any], timeout: float) -> Any:
        """Wait for a future, and receive messages meanwhile.

        A `timeout` of 0 means no deadline, and -1 the node's default.
        """
        if future.done():
            return future.value()
        if self.peers.is_closed:
            raise self.peers.ended()
        seconds = self.options.rpc_timeout if timeout < 0 else timeout
        future.add_done_callback(lambda _: self._pool.notify())
        if not self._pool.wait(future.done, seconds or None, lambda _: False):
            msg = (
                f"{self.info.name} did not compute the value of a remote reference within "
                f"{seconds:g} s: raise the timeout, or see where the call blocks"
            )
            raise CommTimeout(msg)
        return future.value()

    # -- the end

    @property
    def num_under_way(self) -> int:
        """Number of this node's unanswered calls, plus the calls of peers that run on it."""
        return len(self.caller) + self.callee.num_running

    def wait_idle(self, timeout_s: float | None) -> bool:
        """Wait until no call is in flight; return False if the deadline passes first."""
        return self._pool.wait(lambda: not self.num_under_way, timeout_s, lambda _: False)

    def _notify_if_idle(self) -> None:
        """Wake threads in `wait_idle` if no call is in flight."""
        # without the lock: a thread that waits counts itself before it looks at `num_under_way`
        if self._pool.num_waiting and not self.num_under_way:
            self._pool.notify()

    def close(self) -> None:
        """End the node; calls in flight fail. Idempotent."""
        self.peers.is_closed = True
        self.caller.fail_all()
        self._van.close()
        self.caller.fail_all()  # calls that were just being sent
        self._pool.close()
        self.references.close()
        self.resources.close()

    # -- receiving

    def _handle_at_once(self, delivery: Delivery) -> bool:
        """Cancel a call if the message is a CancelCall; return whether it is."""
        if not isinstance(delivery.message, CancelCall):
            return False
        self.callee.cancel(split_node(delivery.sender)[1], delivery.message.call)
        return True

    def _handle(self, delivery: Delivery, arrived_ns: int) -> None:
        """Dispatch a message that arrived at `arrived_ns`; called in any thread."""
        _, sender = split_node(delivery.sender)
        message = delivery.message
        if isinstance(message, PeerLost):
            self._lost(sender, "it called rpc.shutdown()" if message.orderly else message.reason)
            return
        if self.peers.lost:
            self.peers.lost.discard(sender)
        if isinstance(message, Call):
            self.callee.run(delivery, message, sender, arrived_ns)
        elif isinstance(message, CallReply | Raised):
            self.caller.answered(delivery, message, sender)
        elif isinstance(message, _AUTOGRAD):
            self.contexts.on_message(sender, message, delivery.buffers)
        else:
            self.references.on_message(sender, message)  # type: ignore[arg-type]

    def _lost(self, process: int, reason: str) -> None:
        self.peers.lost.add(process)
        known = next((record.name for record in self.directory.known if record.id == process), "")
        name = known or str(process)
        self.caller.lost(process, f"lost {name} before it answered: {reason}")
        self.callee.lost(process)
        self.references.lost(process)
        self.contexts.lost(process, f"lost {name}: {reason}")
        self.directory.forget(process)

    def _tick(self) -> None:
        """Release collected handles and fail calls past their deadline; called often."""
        self.references.collect()
        self.caller.tick()
