"""Collectives of Python objects, of which no rank waits for one that could not be sent.

Problem: torch's object collectives unpickle what other ranks send, so whoever can send runs code
here; a typo in a configuration travels as silently as the configuration; and a rank whose object
cannot be written raises alone, while the others wait for it until their deadline.

Idea: None, bool, int, float, str, bytes, lists, tuples, sets and dictionaries of them travel as
MessagePack and come back as they were (`plain_data`). Anything else raises and names its type and
the place where it sits, unless the caller says `allow_pickle=True`, on both sides. A rank that
raises takes part all the same: in place of the object it sends why there is none, so that whoever
was to get it raises, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from braid.comm.tensors.plain_data import decode, encode
from braid.errors import CommError, ConfigError

if TYPE_CHECKING:
    from braid.comm.api.group import Group

__all__ = ["Objects"]

FAILED = 255  # first byte of what is sent in place of an object; others are in `plain_data`


class Objects:
    """Object collectives of one group; `Group.objects`.

    Args:
        group: Carries out the transfers.

    All members pass the same `allow_pickle`. Cost: two collectives, one for the sizes.

    On failure: a member whose object is neither plain nor, with `allow_pickle`, can be pickled
    raises ConfigError, which names the type and where it sits; those that were to get it raise
    CommError, which names the member's rank as well. The group goes on.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def all_gather(self, obj: object, *, allow_pickle: bool = False) -> list[Any]:
        """The objects of all members, in the order of ranks.

        Args:
            obj: This member's.
            allow_pickle: Send and accept what is not plain.

        Raises:
            ConfigError: `obj` cannot be sent, or another came pickled.
            CommError: Another member's cannot be sent.
        """
        mine = _packed(obj, allow_pickle=allow_pickle)
        sizes = self._group.all_gather(torch.tensor([mine.data.numel()], device="cpu")).tolist()
        longest = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        longest[: mine.data.numel()] = mine.data
        rows = self._group.all_gather(longest).view(self._group.size, -1)
        mine.check()
        return [self._unpacked(row, r, allow_pickle) for r, row in enumerate(rows)]

    def broadcast(self, obj: object = None, root: int = 0, *, allow_pickle: bool = False) -> Any:
        """The object of member `root`, on every member; on `root` it is `obj` itself.

        Args:
            obj: On `root`; not looked at elsewhere.
            root: Group rank.
            allow_pickle: Send and accept what is not plain.

        Raises:
            ConfigError: On `root`, `obj` cannot be sent; elsewhere, it came pickled.
            CommError: Elsewhere, that of `root` cannot be sent.
        """
        group = self._group
        if group.rank == root:
            mine = _packed(obj, allow_pickle=allow_pickle)
            group.broadcast(torch.tensor([mine.data.numel()], device="cpu"), root)
            group.broadcast(mine.data, root)
            mine.check()
            return obj
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        group.broadcast(size, root)
        data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        return self._unpacked(group.broadcast(data, root), root, allow_pickle)

    def gather(self, obj: object, root: int = 0, *, allow_pickle: bool = False) -> list[Any] | None:
        """The objects of all members, on member `root`; None elsewhere.

        Args:
            obj: This member's.
            root: Group rank.
            allow_pickle: Send and accept what is not plain.

        Raises:
            ConfigError: `obj` cannot be sent, or one came pickled.
            CommError: On `root`, another member's cannot be sent.
        """
        group = self._group
        mine = _packed(obj, allow_pickle=allow_pickle)
        sizes = group.gather(torch.tensor([mine.data.numel()], device="cpu"), root)
        if sizes is None:
            group.gather(mine.data, root)
            mine.check()
            return None
        outs = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes.tolist()]
        group.gather(mine.data, root, out=outs)
        mine.check()
        return [self._unpacked(out, r, allow_pickle) for r, out in enumerate(outs)]

    def scatter(
        self, objs: Sequence[object] | None = None, root: int = 0, *, allow_pickle: bool = False
    ) -> Any:
        """This member's one of the objects that member `root` has, one per member.

        Args:
            objs: On `root`; not looked at elsewhere.
            root: Group rank.
            allow_pickle: Send and accept what is not plain.

        Raises:
            ConfigError: On `root`, one of `objs` cannot be sent, then nobody gets any, or their
                number is wrong; elsewhere, it came pickled.
            CommError: Elsewhere, one of those of `root` cannot be sent.
        """
        group = self._group
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        if group.rank != root:
            group.scatter(None, root, out=size)
            data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
            return self._unpacked(group.scatter(None, root, out=data), root, allow_pickle)
        parts = _packed_parts(objs, group.size, allow_pickle=allow_pickle)
        group.scatter(
            torch.tensor([part.data.numel() for part in parts], device="cpu"), root, out=size
        )
        data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        group.scatter([part.data for part in parts], root, out=data)
        parts[0].check()
        return self._unpacked(data, root, allow_pickle)

    def send(self, obj: object, to: int, *, tag: int = 0, allow_pickle: bool = False) -> None:
        """Send an object to member `to`.

        Args:
            obj: Object to send.
            to: Group rank.
            tag: Number of the message between the two members; both messages carry it, that
                of the size and that of the object.
            allow_pickle: Send what is not plain, too.

        Raises:
            ConfigError: `obj` cannot be sent; member `to` learns of it.
        """
        mine = _packed(obj, allow_pickle=allow_pickle)
        self._group.send(torch.tensor([mine.data.numel()], device="cpu"), to, tag=tag)
        self._group.send(mine.data, to, tag=tag)
        mine.check()

    def recv(self, source: int, *, tag: int = 0, allow_pickle: bool = False) -> Any:
        """The next object that member `source` sends.

        Args:
            source: Group rank.
            tag: Number of the message between the two members.
            allow_pickle: Accept what is not plain, too.

        Raises:
            ConfigError: It came pickled, and `allow_pickle` is off.
            CommError: The sender could not send it.
        """
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._group.recv(size, source, tag=tag)
        data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        self._group.recv(data, source, tag=tag)
        return self._unpacked(data, source, allow_pickle)

    def _unpacked(self, data: torch.Tensor, member: int, allow_pickle: bool) -> Any:
        whole = data.numpy().tobytes()
        raw = whole[8 : 8 + int.from_bytes(whole[:8], "little")]
        if raw[0] == FAILED:
            why = raw[1:].decode()
            msg = (
                f"stopped because rank {self._group.ranks[member]} could not send its object: {why}"
            )
            raise CommError(msg)
        return decode(raw, allow_pickle=allow_pickle)


class _PackedObject(NamedTuple):
    """Encoded object of a member, or the reason why it cannot be sent.

    Attributes:
        data: Length and bytes, padded to a power of two: few different shapes, so few different
            descriptions.
        error: Error that was encoded in place of the object; None if the object was.
    """

    data: torch.Tensor
    error: ConfigError | None

    def check(self) -> None:
        """Raise the error, after the others have been told of it."""
        if self.error is not None:
            raise self.error


def _packed(obj: object, path: str = "", *, allow_pickle: bool) -> _PackedObject:
    """The object, or why it cannot be sent."""
    try:
        return _PackedObject(_padded(encode(obj, path, allow_pickle=allow_pickle)), None)
    except ConfigError as exc:
        return _refused(exc)


def _packed_parts(
    objs: Sequence[object] | None, size: int, *, allow_pickle: bool
) -> list[_PackedObject]:
    """One object for each member, or for each the reason why one cannot be sent."""
    if not isinstance(objs, Sequence) or len(objs) != size:
        given = len(objs) if isinstance(objs, Sequence) else type(objs).__name__
        msg = f"scatter needs {size} objects, one for every member, and the root passed {given}"
        return [_refused(ConfigError(msg))] * size
    parts = [_packed(obj, f"objs[{i}]", allow_pickle=allow_pickle) for i, obj in enumerate(objs)]
    bad = next((part for part in parts if part.error is not None), None)
    return parts if bad is None else [bad] * size


def _refused(error: ConfigError) -> _PackedObject:
    return _PackedObject(
        _padded(bytes([FAILED]) + str(error).encode(errors="backslashreplace")), error
    )


def _padded(raw: bytes) -> torch.Tensor:
    whole = len(raw).to_bytes(8, "little") + raw
    padded = bytearray(max(64, 1 << (len(whole) - 1).bit_length()))
    padded[: len(whole)] = whole
    return torch.frombuffer(padded, dtype=torch.uint8)
