"""Batches of tensors that are sent together: many small messages become few large ones. Pure.

Problem: each message has a latency, so two hundred small ones take the time of a message of
hundreds of megabytes.

Idea: tensors with the same reduction are concatenated and reduced together, up to a limit. Tensors
of another dtype or operation in between do not end a batch: it *looks ahead* past them. Requests of
one explicit group stay in one batch, regardless of the limit.

    ready        f32 a  f32 b  i64 c  f32 d  f16 e  i64 f      limit: three
    batches      [a b d]  [c f]  [e]

Source: Sergeev & Del Balso 2018, sec. 4 (tensor fusion); look-ahead and groups were added later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from braid.compat.horovod.fusion.request import BATCHED, Request, Response

__all__ = ["FusedBatch", "batches"]


class FusedBatch(NamedTuple):
    """Operations that one collective carries out together.

    Attributes:
        responses: Responses with the same kind, dtype, reduction, scale and device.
    """

    responses: tuple[Response, ...]

    @property
    def request(self) -> Request:
        """The first response's request, whose type, dtype and the like hold for the whole batch."""
        return self.responses[0].request

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(response.request.nbytes for response in self.responses)


def batches(
    responses: Sequence[Response], threshold_bytes: int, *, split_groups: bool = False
) -> list[FusedBatch]:
    """Divide responses into batches, ordered by the first response of each batch.

    Args:
        responses: Responses in the order agreed on.
        threshold_bytes: Largest size of a batch; at 0 only explicit groups are batched.
        split_groups: Whether members of explicit groups are batched like other responses.
    """
    divided: list[list[Response]] = []
    filling: dict[object, tuple[list[Response], int]] = {}
    for response in responses:
        request = response.request
        if response.error or request.kind not in BATCHED:
            divided.append([response])
            continue
        alone = request.group if request.group and not split_groups else ""
        key = _likeness(request), alone
        members, nbytes = filling.get(key, ([], 0))
        if not members or (not alone and nbytes + request.nbytes > threshold_bytes):
            members, nbytes = [], 0
            divided.append(members)
        members.append(response)
        filling[key] = members, nbytes + request.nbytes
    return [FusedBatch(tuple(members)) for members in divided]


def _likeness(request: Request) -> object:
    return (
        request.kind,
        request.dtype,
        request.op,
        request.prescale,
        request.postscale,
        request.device,
        request.place >= 0,
    )
