"""Collectives of Python objects, in which an object that cannot be sent never blocks other ranks.

Problem: torch's object collectives unpickle received data, so any sender can run code on this rank.
An object of the wrong type is sent without an error. A rank that cannot pickle its object raises
alone, while the other ranks wait for it until their deadline.

Idea: None, bool, int, float, str, bytes, and lists, tuples, sets and dictionaries of them are sent
as MessagePack and keep their types (`plain_data`). Any other type raises an error with the type and
its position in the object, unless the caller passes `allow_pickle=True` on both sides. A rank that
raises still takes part in the collective: it sends its error message instead of the object, so that
the receivers raise as well.
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

FAILED = 255  # first byte of an error sent instead of an object; others are in `plain_data`


class Objects:
    """Collectives of Python objects among the members of a group; see `Group.objects`.

    All members pass the same `allow_pickle`.

    Args:
        group: Group that transfers the bytes.

    Cost: two collectives, one for the sizes.

    On failure: an object cannot be sent if it is not plain data and `allow_pickle` is False, or if
    pickle fails. Its member raises ConfigError with the type and its position in the object; its
    receivers raise CommError with the member's rank. The group remains usable.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def all_gather(self, obj: object, *, allow_pickle: bool = False) -> list[Any]:
        """Return the objects of all members, in the order of ranks.

        Args:
            obj: Object of this member.
            allow_pickle: Whether to send and accept pickled objects.

        Raises:
            ConfigError: `obj` cannot be sent, or another member's object is pickled.
            CommError: Another member's object cannot be sent.
        """
        mine = _packed(obj, allow_pickle=allow_pickle)
        sizes = self._group.all_gather(torch.tensor([mine.data.numel()], device="cpu")).tolist()
        longest = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        longest[: mine.data.numel()] = mine.data
        rows = self._group.all_gather(longest).view(self._group.size, -1)
        mine.check()
        return [self._unpacked(row, r, allow_pickle) for r, row in enumerate(rows)]

    def broadcast(self, obj: object = None, root: int = 0, *, allow_pickle: bool = False) -> Any:
        """Return the object of member `root` on every member; on `root` this is `obj` itself.

        Args:
            obj: Object to send on `root`; ignored elsewhere.
            root: Group rank.
            allow_pickle: Whether to send and accept pickled objects.

        Raises:
            ConfigError: On `root`, `obj` cannot be sent; elsewhere, it is pickled.
            CommError: Elsewhere, the object of `root` cannot be sent.
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
        """Return the objects of all members on member `root`; None elsewhere.

        Args:
            obj: Object of this member.
            root: Group rank.
            allow_pickle: Whether to send and accept pickled objects.

        Raises:
            ConfigError: `obj` cannot be sent, or, on `root`, another object is pickled.
            CommError: On `root`, another member's object cannot be sent.
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
        """Return this member's object from a sequence on member `root` with one per member.

        Args:
            objs: Objects to send on `root`; ignored elsewhere.
            root: Group rank.
            allow_pickle: Whether to send and accept pickled objects.

        Raises:
            ConfigError: On `root`, one of `objs` cannot be sent (then no member gets an object), or
                their number is wrong; elsewhere, the object is pickled.
            CommError: Elsewhere, one of the objects of `root` cannot be sent.
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
            tag: Tag of the two messages, the size and the object.
            allow_pickle: Whether to send an object pickled if it is not plain data.

        Raises:
            ConfigError: `obj` cannot be sent; member `to` raises CommError.
        """
        mine = _packed(obj, allow_pickle=allow_pickle)
        self._group.send(torch.tensor([mine.data.numel()], device="cpu"), to, tag=tag)
        self._group.send(mine.data, to, tag=tag)
        mine.check()

    def recv(self, source: int, *, tag: int = 0, allow_pickle: bool = False) -> Any:
        """Return the next object that member `source` sends.

        Args:
            source: Group rank.
            tag: Tag of the messages.
            allow_pickle: Whether to accept a pickled object.

        Raises:
            ConfigError: The object is pickled, and `allow_pickle` is False.
            CommError: The sender could not send its object.
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
            number = self._group.context.health.number(self._group.ranks[member])
            msg = f"stopped because rank {number} could not send its object: {why}"
            raise CommError(msg)
        return decode(raw, allow_pickle=allow_pickle)


class _PackedObject(NamedTuple):
    """Encoded object of a member, or the error that prevents sending it.

    Attributes:
        data: Length and bytes, padded to a power of two: few different shapes, so few different
            descriptions.
        error: Error that was encoded instead of the object; None if the object was encoded.
    """

    data: torch.Tensor
    error: ConfigError | None

    def check(self) -> None:
        """Raise this member's error, if any; call this after the other members received it."""
        if self.error is not None:
            raise self.error


def _packed(obj: object, path: str = "", *, allow_pickle: bool) -> _PackedObject:
    """Return the encoded object, or the error that prevents sending it."""
    try:
        return _PackedObject(_padded(encode(obj, path, allow_pickle=allow_pickle)), None)
    except ConfigError as exc:
        return _refused(exc)


def _packed_parts(
    objs: Sequence[object] | None, size: int, *, allow_pickle: bool
) -> list[_PackedObject]:
    """Return one encoded object for each member, or the same error for all members."""
    if not isinstance(objs, Sequence) or len(objs) != size:
        passed = len(objs) if isinstance(objs, Sequence) else type(objs).__name__
        msg = f"scatter needs {size} objects, one per rank, but the root passed {passed}"
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
