"""Dense tables: a tensor with its elements divided among all servers, as a worker uses it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from braid.errors import ConfigError
from braid.ps.consistency import Consistency
from braid.ps.messages import Pull, Pulled, Specs
from braid.ps.storage import (
    DenseStorage,
    ParameterStorage,
    Rule,
    Storage,
    SumStorage,
    parts_in,
    ranges_of_shards,
)
from braid.ps.storage.steppers import MakeOptimizer
from braid.ps.table import Table, TableSpec
from braid.runtime.message import Delivery
from braid.runtime.tensor_buffers import as_buffers, bytes_of, from_buffers, memory_of

if TYPE_CHECKING:
    from braid.ps.customer import Customer

__all__ = ["DenseTable", "dense_spec"]

SHARD_BYTES = 1 << 20  # a dense table has one shard for each of these, up to MAX_SHARDS
MAX_SHARDS = 64


class DenseTable(Table):
    """A dense table, as a worker uses it; see `Table` for clocks and consistency.

    Args:
        customer: Customer of this worker; None on servers and the scheduler.
        spec: Spec of the table.
        like: Tensor with the table's shape and dtype.

    Attributes:
        versions: Number of changes that each shard had applied when it was last pulled.
        lengths: Number of elements of each shard.
    """

    def __init__(self, customer: Customer | None, spec: TableSpec, like: torch.Tensor) -> None:
        super().__init__(customer, spec)
        self.versions = [0] * spec.num_shards
        self._shape, self._dtype = like.shape, like.dtype
        self._spans = ranges_of_shards(like.numel(), spec.num_shards, spec.lengths)
        self.lengths = [span.stop - span.start for span in self._spans]
        self._whole = torch.empty(like.numel(), dtype=like.dtype)

    def pull(
        self, *, out: torch.Tensor | None = None, timeout_s: float | None = None
    ) -> torch.Tensor:
        """Return the values; wait until they are as new as the consistency requires.

        Args:
            out: Contiguous tensor to receive into. When None, the table's own buffer, which the
                next pull overwrites.
            timeout_s: Deadline in seconds.

        Returns:
            A tensor of the table's shape.

        Raises:
            CommError: A server refuses.
            PeerLostError: A server was lost with all copies of a shard.
            CommTimeout: No answer came.
        """
        out = self._whole.view(self._shape) if out is None else out
        self._customer.postoffice.ensure_joined(timeout_s)
        self.wait(self.pull_async(out), timeout_s)
        return out

    def pull_async(self, out: torch.Tensor, *, priority: int = 0) -> int:
        """Begin to receive the values into a contiguous tensor; return the timestamp for `wait`.

        Raises:
            ConfigError: `out` has another shape or dtype than the table, or is not contiguous.
        """
        self._check(out, "a tensor to receive into")
        if not out.is_contiguous():
            msg = f"table {self.name!r} receives into contiguous tensors: pass out.contiguous()"
            raise ConfigError(msg)
        flat, clock = out.detach().view(-1), self.clock

        def build(parts: tuple[int, ...]) -> tuple[Pull, Sequence[memoryview]]:
            return Pull(self.epoch, self.name, clock, parts, [[] for _ in parts]), ()

        def memory(part: int) -> list[memoryview]:
            return [memory_of(flat[self._spans[part]])]

        def on_answer(delivery: Delivery, parts: tuple[int, ...]) -> None:
            message = delivery.message
            assert isinstance(message, Pulled), "a pull is answered with values"
            flat_specs = [spec for specs in message.specs for spec in specs]
            values = from_buffers(flat_specs, delivery.buffers)
            for number, value, version in zip(message.parts, values, message.versions, strict=True):
                part = flat[self._spans[number]]
                if number in parts:
                    self.versions[number] = version
                    if value.data_ptr() != part.data_ptr():
                        part.copy_(value)

        return self._request(build, on_answer, memory=memory, priority=priority)

    def push(self, grad: torch.Tensor) -> int:
        """Push a gradient for this worker's clock, and begin the next clock.

        The gradient may be changed afterwards. `wait` returns once all copies of the shards have
        the push. At staleness 0 a pull of the next clock includes it, with or without `wait`.

        Returns:
            The timestamp of the request.

        Raises:
            ConfigError: The gradient has another shape or dtype than the table.
            CommError: A server refuses this push, or an earlier one.
            PeerLostError: A server was lost with all copies of a shard.
        """
        return self.push_async(grad.detach().clone(memory_format=torch.contiguous_format))

    def push_async(
        self,
        grad: torch.Tensor,
        *,
        has: Sequence[bool] = (),
        priority: int = 0,
        lr: float | None = None,
    ) -> int:
        """Push like `push`, but without a copy: do not change the gradient before it is accepted.

        Args:
            grad: The gradient.
            has: Whether each parameter has a gradient, for a table declared with `sizes`; all have
                one when empty. Servers step a parameter if any worker has a gradient for it.
            priority: Urgency of the request.
            lr: Learning rate of this push's step; the servers' rate when None. Pushes that are
                applied together must not have different ones.

        Raises:
            ConfigError: The gradient has another shape or dtype than the table.
            CommError: A server refuses an earlier push.
        """
        self._check(grad, "a gradient")
        flat = grad.detach().contiguous().view(-1)

        def build(parts: tuple[int, ...]) -> tuple[Specs, Sequence[memoryview]]:
            specs, buffers = [], []
            for part in parts:
                shard_specs, views = as_buffers(self._push_of(flat, part, has))
                specs.append(shard_specs)
                buffers += views
            return specs, buffers

        return self._push(build, priority, lr)

    def _push_of(
        self, flat: torch.Tensor, part: int, has: Sequence[bool]
    ) -> tuple[torch.Tensor, ...]:
        """Return the tensors of a push to a shard."""
        grad = flat[self._spans[part]]
        if all(has):
            return (grad,)
        inside = parts_in(self._spec.sizes, self._spans[part])
        flags = torch.tensor([has[number] for number, _ in inside], dtype=torch.uint8)
        return (grad,) if bool(flags.all()) else (grad, flags)

    def _check(self, tensor: torch.Tensor, name: str) -> None:
        if tensor.shape != self._shape or tensor.dtype != self._dtype:
            msg = (
                f"table {self.name!r} has {self._dtype} and shape {list(self._shape)}, got "
                f"{name} of {tensor.dtype} and shape {list(tensor.shape)}: convert it"
            )
            raise ConfigError(msg)


def dense_spec(
    name: str,
    values: torch.Tensor,
    optimizer: Rule | MakeOptimizer | None,
    consistency: Consistency,
    sizes: Sequence[int],
    *,
    lengths: Sequence[int] = (),
    place: int | None = None,
    has_first: bool,
) -> TableSpec:
    """Return the spec of a dense table; its arguments are explained at `Node.dense`.

    With `has_first`, the spec has a checksum of the first values, which servers compare.

    Raises:
        ConfigError: See `Node.dense`.
    """
    if not values.is_floating_point():
        msg = f"table {name!r} needs floating-point values, got {values.dtype}: convert them"
        raise ConfigError(msg)
    flat = values.detach().reshape(-1)
    if sizes and (sum(sizes) != len(flat) or optimizer is None):
        msg = (
            f"table {name!r} has {len(flat)} values and {optimizer}, got sizes {[*sizes]}: pass "
            "sizes that add up to the number of values"
        )
        raise ConfigError(msg)
    if lengths and (sum(lengths) != len(flat) or len(lengths) > MAX_SHARDS):
        msg = (
            f"table {name!r} has {len(flat)} values: pass at most {MAX_SHARDS} lengths of shards "
            f"that add up to them, got {[*lengths]}"
        )
        raise ConfigError(msg)
    num_shards = len(lengths) or max(1, min(MAX_SHARDS, -(-values.nbytes // SHARD_BYTES)))
    ranges = ranges_of_shards(len(flat), num_shards, lengths)

    def make(shard: int) -> Storage:
        places = ranges[shard]
        elements = flat[places]
        if optimizer is None:
            return SumStorage(elements, table=name)
        if not sizes:
            return DenseStorage(elements, optimizer, table=name)
        params = [length for _, length in parts_in(sizes, places)]
        return ParameterStorage(elements, optimizer, params, table=name)

    make(0)  # raises errors of the arguments on all nodes
    return TableSpec(
        name=name,
        num_shards=num_shards,
        consistency=consistency,
        make_storage=make,
        form=f"{values.dtype}{list(values.shape)} {[*sizes]} {[*lengths]}, {consistency}",
        first=zlib.crc32(bytes_of(flat)) if has_first and len(flat) else 0,
        sizes=tuple(sizes),
        lengths=tuple(lengths),
        place=place,
    )
