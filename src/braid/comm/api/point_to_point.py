"""Public calls for messages between two members; `send` and `receive` have the protocol."""

from __future__ import annotations

from typing import Any, Literal, TypeVar, overload

from braid.comm.api.face import Face
from braid.comm.engines.collective import Collective
from braid.comm.engines.work import Work
from braid.comm.tensors.arguments import MOST_TAG, Data, as_tensor, check_peer, dense, is_number
from braid.errors import ConfigError

__all__ = ["PointToPoint"]

X = TypeVar("X", bound=Data)


class PointToPoint(Face):
    """Sends and receives tensors between two members of a group.

    Messages of one pair and tag keep their order; messages with different tags may be received in
    any order.
    """

    @overload
    def send(
        self,
        x: X,
        to: int,
        *,
        tag: int = 0,
        async_op: Literal[False] = False,
        timeout_s: float | None = None,
    ) -> X: ...
    @overload
    def send(
        self,
        x: X,
        to: int,
        *,
        tag: int = 0,
        async_op: Literal[True],
        timeout_s: float | None = None,
    ) -> Work: ...
    def send(
        self,
        x: Any,
        to: int,
        *,
        tag: int = 0,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Send `x` to member `to`; return when `x` may be changed.

        Up to 256 KiB, this does not wait for the receiver. Two members that send each other more
        at the same time must use `async_op` or `coalesce`.

        Args:
            x: Tensor to send.
            to: Group rank.
            tag: Tag that the receive must name.
            async_op: Whether to return a Work without waiting.
            timeout_s: Seconds until CommTimeout.

        Cost: ceil(l / chunk) a + l b seconds: a per step, b per byte, l bytes.
        """
        return self._message("send", x, to, tag, async_op, timeout_s)

    @overload
    def recv(
        self,
        x: X,
        source: int | None,
        *,
        tag: int = 0,
        async_op: Literal[False] = False,
        timeout_s: float | None = None,
    ) -> X: ...
    @overload
    def recv(
        self,
        x: X,
        source: int | None,
        *,
        tag: int = 0,
        async_op: Literal[True],
        timeout_s: float | None = None,
    ) -> Work: ...
    def recv(
        self,
        x: Any,
        source: int | None,
        *,
        tag: int = 0,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Receive a message from member `source` with tag `tag` into `x`.

        Args:
            x: Tensor of the message's size and dtype.
            source: Group rank; None to receive from any member. `Work.source` is the sender's rank.
            tag: Tag that the sender gave the message.
            async_op: Whether to return a Work without waiting.
            timeout_s: Seconds until CommTimeout.
        """
        return self._message("recv", x, source, tag, async_op, timeout_s)

    def _message(
        self, kind: str, x: Any, peer: int | None, tag: int, async_op: bool, timeout_s: float | None
    ) -> Any:
        if self._repeat is not None and (
            timeout_s is None or (type(timeout_s) is float and timeout_s > 0)
        ):
            result = self._repeat(kind, x, peer, tag, async_op)
            if result is not None:
                return result
        number = -1 if peer is None else peer
        if peer is not None:
            check_peer(peer, self.size, "destination" if kind == "send" else "source")
        if number == self.rank or (peer is None and self.size == 1):
            msg = (
                f"group rank {self.rank} called {kind} with itself as peer: pass another group "
                f"rank than {number}"
            )
            raise ConfigError(msg)
        is_int = type(tag) is int or is_number(tag)
        if not is_int or not -MOST_TAG < tag < MOST_TAG:
            msg = f"tag {tag!r} is invalid: pass a whole number from 0 to 2^61 - 1"
            raise ConfigError(msg)
        flat = dense(x, self.devices)
        if flat is not None:  # nearly always
            copies, tensor = None, x
        else:
            tensor = as_tensor(x, written=kind == "recv")
            copies = self._copies(tensor)
            flat = copies.read(tensor) if kind == "send" else copies.written(tensor)
        source: list[int] = []
        return self._submit(
            Collective(
                kind,
                tensor.shape,
                tensor.dtype,
                peer=number,
                ins=(flat,),
                outs=(flat,),
                nbytes=flat.nbytes,
                tag=tag,
                source=source,
                copies=copies,
                result=x,
                async_op=async_op,
                timeout_s=timeout_s,
            )
        )
