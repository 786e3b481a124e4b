"""Messages between stages on different ranks: values of any shape, and gradients.

Shapes may change between micro-batches, so a value is announced by a digest of its structure:
containers, shapes, dtypes, order in memory, and which tensors require a gradient. The structure
itself is sent only the first time. Gradients need no announcement, because their receiver has the
outputs.

    first        digest, structure, tensors
    afterwards   digest, tensors               as one message, if they are small
    changed      a message of the length that the receiver expects, then as above

Sends do not block: a tensor must not change until its message has been sent. Messages of one edge
arrive in the order in which they were sent; edge 0 joins neighboring stages. A skip connection has
an edge per micro-batch, and sends its structure each time.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from braid.comm import Group, Work
from braid.comm.autograd.nested import TensorPlace, flatten, unflatten
from braid.errors import CommError, ConfigError
from braid.parallel.pipeline.memory_order import as_in_memory
from braid.parallel.pipeline.sent_structure import SentSpec, SentStructure, read_structure
from braid.runtime.memory_pool import HUGE_PAGE_BYTES, MemoryPool
from braid.runtime.torch_internals import version_of
from braid.types import text_digest

__all__ = ["Carrier", "Messages", "failing_together"]

DIGEST_MASK = (1 << 62) - 1
HEADER_BYTES = 16
FREE_BYTES = 256 << 20  # of memory for large tensors that is kept between steps
PACKED_BYTES = 64 << 10  # copying more costs more than a message


class Carrier(Protocol):
    """Carrier of messages between the ranks of a pipeline, which are processes or threads.

    In all methods `peer` is the rank at the other end, and `edge` the number of the connection
    between two stages.

    Attributes:
        rank: This rank.
        size: Number of ranks.
    """

    rank: int
    size: int

    def send_value(self, value: Any, peer: int, edge: int = 0) -> None:
        """Send a stage's output to the rank `peer`, over the connection number `edge`."""

    def recv_value(self, peer: int, edge: int = 0) -> Any:
        """Receive a stage's output from the rank `peer`, over the connection number `edge`."""

    def send_tensors(self, tensors: Sequence[torch.Tensor], peer: int, edge: int = 0) -> None:
        """Send tensors to the rank `peer`, which knows their shapes, over connection `edge`."""

    def recv_tensors(
        self, like: Sequence[torch.Tensor], peer: int, edge: int = 0
    ) -> list[torch.Tensor]:
        """Receive tensors like `like` from the rank `peer`, over connection `edge`."""

    def finish(self) -> None:
        """Wait until all messages have been sent."""

    def span(self, name: str, microbatch: int) -> AbstractContextManager[object]:
        """Return a context that records the duration of the action `name` on a micro-batch."""

    def abort(self, text: str) -> None:
        """Make all other ranks raise an error with this text."""

    def pass_on(self, text: str) -> None:
        """Forward an error that another rank has reported, to all ranks of this rank's groups."""


@contextmanager
def failing_together(carrier: Carrier, call: str) -> Iterator[None]:
    """Make an error on this rank an error on all ranks, which would wait for this rank.

    Args:
        carrier: Carrier of the pipeline's messages.
        call: The call in words, for the other ranks' error.
    """
    try:
        yield
    except CommError as exc:
        carrier.pass_on(str(exc))
        raise
    except BaseException as exc:
        carrier.abort(f"failed in {call}: {type(exc).__name__}: {exc}")
        raise


class _Layout(NamedTuple):
    """Places of small tensors in one message, in few calls of torch (each takes microseconds).

    Attributes:
        nbytes: Size of the message.
        header: First bytes of the message: the digest of the structure.
        views: For each tensor an empty one of its dtype, its first element in a message of its
            dtype, its shape and strides, and whether it requires a gradient.
    """

    nbytes: int
    header: bytearray
    views: tuple[tuple[torch.Tensor, int, tuple[int, ...], tuple[int, ...], bool], ...]

    @classmethod
    def of(cls, specs: Sequence[SentSpec], digest: int) -> _Layout | None:
        """Return the layout of a message; None if it would be too large."""
        at, views = HEADER_BYTES, []
        for spec in specs:
            empty = torch.empty(0, dtype=spec.dtype, device="cpu")
            first, strides = at // spec.dtype.itemsize, spec.empty("meta").stride()
            views.append((empty, first, spec.shape, strides, spec.requires_grad))
            nbytes = math.prod(spec.shape) * spec.dtype.itemsize
            at += nbytes + -nbytes % HEADER_BYTES  # which aligns the next one for any dtype
            if not spec.on_cpu or at > PACKED_BYTES:
                return None
        return cls(at, _header(digest), tuple(views))

    def empty(self) -> torch.Tensor:
        """Return memory for a message."""
        return torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")

    def with_digest(self, header: bytearray) -> torch.Tensor:
        """Return a message of this size with a digest, and zeros for the tensors."""
        rest = bytearray(self.nbytes - HEADER_BYTES)
        return torch.frombuffer(header + rest, dtype=torch.uint8)

    def is_in(self, packed: torch.Tensor) -> bool:
        """Return whether a message has the digest of this layout's structure."""
        return packed.numpy()[:HEADER_BYTES].tobytes() == self.header

    def tensors_of(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of a message, which share its memory."""
        storage = packed.untyped_storage()
        return [  # not views, which would share a counter of changes in place
            empty.new_empty(0).set_(storage, first, shape, strides).requires_grad_(requires_grad)
            for empty, first, shape, strides, requires_grad in self.views
        ]


def _header(digest: int) -> bytearray:
    return bytearray(digest.to_bytes(HEADER_BYTES, sys.byteorder))


class _Packed(NamedTuple):
    """Message of a layout: its memory, and the places of tensors in it."""

    message: torch.Tensor
    places: Sequence[torch.Tensor]

    @classmethod
    def of(cls, layout: _Layout) -> _Packed:
        """Return a message with zeros for the tensors."""
        message = layout.with_digest(layout.header)
        return cls(message, [x.detach() for x in layout.tensors_of(message)])

    def fill(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the message with a copy of the tensors, all of its layout."""
        for place, tensor in zip(self.places, tensors, strict=True):
            x = tensor.detach()
            place.copy_(x if type(x) is torch.Tensor else x.as_subclass(torch.Tensor))
        return self.message


class _Expected(NamedTuple):
    """Last structure on an edge, with a layout if its tensors fit into one message.

    Attributes:
        digest: Digest of the structure.
        structure: The structure.
        layout: Places of the tensors in a message; None if they are sent separately.
        sent: Messages of this layout that have been sent, to be filled again.
        is_tensor: Whether the value is a row-major tensor with a layout.
    """

    digest: int
    structure: SentStructure
    layout: _Layout | None
    sent: list[_Packed]
    is_tensor: bool

    @classmethod
    def of(cls, digest: int, structure: SentStructure) -> _Expected:
        """Return the structure with its digest and its layout."""
        layout = _Layout.of(structure.specs, digest)
        is_tensor = isinstance(structure.tree, TensorPlace) and structure.specs[0].order is None
        return cls(digest, structure, layout, [], layout is not None and is_tensor)

    def fits(self, value: Any) -> bool:
        """Return whether `value` has this structure; False if it is not just a tensor."""
        if not self.is_tensor or type(value) is not torch.Tensor:
            return False
        shape, dtype, requires_grad, *_ = self.structure.specs[0]
        return (
            value.shape == shape
            and value.dtype is dtype
            and value.requires_grad is requires_grad
            and value.is_cpu
            and value.is_contiguous()
        )


class _Sent(NamedTuple):
    """Tensor that is being sent, its version when sending began, and what to do at the end."""

    work: Work
    tensor: torch.Tensor
    version: int
    on_end: Callable[[], object]

    def end(self) -> None:
        """Call `on_end`; raise ConfigError if the tensor was changed after sending began."""
        if version_of(self.tensor) != self.version:
            msg = (
                f"a tensor of shape {list(self.tensor.shape)} was changed in place before it was "
                "sent to the next stage, so that stage may have either value: return a new "
                "tensor or a clone from the layer"
            )
            raise ConfigError(msg)
        self.on_end()


class Messages:
    """Carrier of a pipeline's messages over a group of processes; see `Carrier`.

    Args:
        group: Ranks of the pipeline.
        device: Device of this rank's stages, on which values are received; tensors from the CPU
            stay on the CPU.

    Attributes:
        others: Groups with ranks of other pipelines, such as replicas; they are aborted as well.
    """

    def __init__(self, group: Group, device: torch.device | None = None) -> None:
        self.rank, self.size = group.rank, group.size
        self._group = group
        self.others: list[Group] = []
        self._starter = group.starting()
        self._device = device or torch.device("cpu")
        self._sent: set[tuple[int, int, int]] = set()
        self._structures: dict[tuple[int, int, int], SentStructure] = {}
        self._descriptions: dict[SentStructure, tuple[bytes, int]] = {}
        self._under_way: list[_Sent] = []
        self._pool = MemoryPool(FREE_BYTES)
        # last structure sent to and received from a peer, on edge 0
        self._expected_there: dict[int, _Expected] = {}
        self._expected_here: dict[int, _Expected] = {}

    def __deepcopy__(self, _memo: object) -> Messages:
        """Return the object itself, as a copy of the group would be."""
        return self

    def send_value(self, value: Any, peer: int, edge: int = 0) -> None:
        """Send an output to rank `peer`; see `Carrier.send_value`."""
        expected = None if edge else self._expected_there.get(peer)
        if expected is not None and expected.fits(value):
            self._send_packed(expected, [value], peer)
            return
        tree, tensors = flatten(value)
        specs = tuple(map(SentSpec.of, tensors))
        is_plain = isinstance(value, torch.Tensor) or (
            type(value) is tuple and all(isinstance(part, torch.Tensor) for part in value)
        )
        structure = SentStructure(tree, specs)
        raw, digest = self._described(structure, is_plain=is_plain)
        if edge:  # messages of skip connections have no fixed order
            self._send(torch.tensor([digest, len(raw)], device="cpu"), peer, edge)
            self._send(torch.frombuffer(bytearray(raw), dtype=torch.uint8), peer, edge)
            self.send_tensors(tensors, peer, edge)
            return
        if expected is not None and expected.layout is not None:
            if expected.digest == digest:
                self._send_packed(expected, tensors, peer)
                return
            self._send(expected.layout.with_digest(_header(digest)), peer, edge)
        self._expected_there[peer] = _Expected.of(digest, structure)
        is_new = (peer, edge, digest) not in self._sent
        self._send(torch.tensor([digest, len(raw) if is_new else 0], device="cpu"), peer, edge)
        if is_new:
            self._sent.add((peer, edge, digest))
            self._send(torch.frombuffer(bytearray(raw), dtype=torch.uint8), peer, edge)
        self.send_tensors(tensors, peer, edge)

    def recv_value(self, peer: int, edge: int = 0) -> Any:
        """Receive the output that rank `peer` has sent; see `Carrier.recv_value`."""
        expected = None if edge else self._expected_here.get(peer)
        if expected is not None and (layout := expected.layout) is not None:
            packed = layout.empty()
            self._group.recv(packed, peer, tag=edge)
            if layout.is_in(packed):
                return unflatten(expected.structure.tree, layout.tensors_of(packed))
        announced = torch.empty(2, dtype=torch.int64, device="cpu")
        self._group.recv(announced, peer, tag=edge)
        digest, nbytes = announced.tolist()
        if nbytes:
            raw = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            self._group.recv(raw, peer, tag=edge)
            self._structures[peer, edge, digest] = read_structure(raw.numpy().tobytes())
        structure = self._structures[peer, edge, digest]
        if not edge:
            self._expected_here[peer] = _Expected.of(digest, structure)
        tensors = [
            spec.empty("cpu" if spec.on_cpu else self._device, self._pool)
            for spec in structure.specs
        ]
        self._recv(tensors, peer, edge)
        for tensor, spec in zip(tensors, structure.specs, strict=True):
            tensor.requires_grad_(spec.requires_grad)
        return unflatten(structure.tree, tensors)

    def send_tensors(self, tensors: Sequence[torch.Tensor], peer: int, edge: int = 0) -> None:
        """Send tensors of known shapes; see `Carrier.send_tensors`."""
        for tensor in tensors:
            self._send(as_in_memory(tensor.detach()), peer, edge)

    def recv_tensors(
        self, like: Sequence[torch.Tensor], peer: int, edge: int = 0
    ) -> list[torch.Tensor]:
        """Receive tensors with the shapes and dtypes of `like`; see `Carrier.recv_tensors`."""
        tensors = [
            torch.empty(x.shape, dtype=x.dtype, device=x.device)
            if x.nbytes < HUGE_PAGE_BYTES and x.is_contiguous()
            else SentSpec.of(x).empty(x.device, self._pool)
            for x in like
        ]
        self._recv(tensors, peer, edge)
        return tensors

    def finish(self) -> None:
        """Wait until all messages have been sent; see `Carrier.finish`."""
        for sent in self._under_way:
            sent.work.wait()
            sent.end()
        self._under_way.clear()

    def span(self, name: str, microbatch: int) -> AbstractContextManager[object]:
        """Return a context that records the duration of an action; see `Carrier.span`."""
        return self._group.context.events.span(name, seq=microbatch)

    def abort(self, text: str) -> None:
        """Make all other ranks raise an error with this text; see `Carrier.abort`."""
        number = self._group.context.health.number(self._group.ranks[self.rank])
        for group in (self._group, *self.others):
            group.abort(f"rank {number} {text}")

    def pass_on(self, text: str) -> None:
        """Forward an error from another rank to this rank's other groups; see `Carrier.pass_on`."""
        for group in (self._group, *self.others):
            group.abort(text)

    def _described(self, structure: SentStructure, *, is_plain: bool) -> tuple[bytes, int]:
        """Return the bytes of a structure and their digest; cached for tensors and tuples."""
        if is_plain and (known := self._descriptions.get(structure)) is not None:
            return known
        raw = structure.as_bytes()
        described = raw, text_digest(raw.hex()) & DIGEST_MASK
        if is_plain:
            self._descriptions[structure] = described
        return described

    def _send_packed(self, expected: _Expected, tensors: Sequence[torch.Tensor], peer: int) -> None:
        """Send tensors of the expected structure in one message, on edge 0."""
        layout, sent = expected.layout, expected.sent
        assert layout is not None, "the tensors are small"
        packed = sent.pop() if sent else _Packed.of(layout)
        self._send(packed.fill(tensors), peer, 0, partial(sent.append, packed))

    def _recv(self, tensors: Sequence[torch.Tensor], peer: int, edge: int) -> None:
        for tensor in tensors:
            self._group.recv(as_in_memory(tensor), peer, tag=edge)

    def _send(
        self,
        tensor: torch.Tensor,
        peer: int,
        edge: int,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        """Start sending a tensor; `on_end` is called after it has been sent."""
        if self._under_way:
            for sent in [sent for sent in self._under_way if sent.work.done()]:
                self._under_way.remove(sent)
                sent.end()
        work = self._starter.send(tensor, peer, tag=edge, async_op=True)
        if work.succeeded:
            on_end()
        else:
            self._under_way.append(_Sent(work, tensor, version_of(tensor), on_end))
