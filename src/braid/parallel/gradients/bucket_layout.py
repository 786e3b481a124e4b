"""Assignment of gradients to buckets. Pure: no tensors, no communication.

Problem: reducing every gradient separately pays one latency each; reducing all together can only
start when backward has ended. *Buckets* are in between: gradients that become ready at about the
same time are reduced together, while backward continues.

Backward computes gradients in the reverse of the order in which the forward used the parameters,
which is roughly the reverse of registration. So buckets are filled from the last parameter to the
first, until the first backward has shown the real order of gradients. The first bucket is small,
so that communication starts early.

    parameters   p0 p1 p2 p3 p4 p5 p6        ready in backward:  p6 p5 p4 p3 p2 p1 p0
    buckets                                  0: p6 p5     1: p4 p3 p2     2: p1 p0

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
VLDB 2020, sec. 3.2.3. There, buckets are sent strictly in order; here each is sent when it is full.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from braid.errors import ConfigError
from braid.types import TensorSpec

__all__ = ["BucketLayout", "Caps", "plan_buckets", "waiting_cost"]

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_CAP_BYTES = 25 << 20
ITEM_BYTES = {"float64": 8, "complex64": 8, "complex128": 16, "float32": 4, "bfloat16": 2}
ITEM_BYTES["float16"] = 2


class Caps(NamedTuple):
    """Size limits in bytes of the first, second, ... bucket; the last applies to all others."""

    nbytes: tuple[int, ...] = (FIRST_BUCKET_BYTES, BUCKET_CAP_BYTES)

    @classmethod
    def of_mb(cls, cap_mb: float | None) -> Caps:
        """Return caps of `cap_mb` MiB with a small first bucket; the default caps for None.

        Raises:
            ConfigError: `cap_mb` is not a positive number.
        """
        if cap_mb is None:
            return cls()
        if not 0 < cap_mb < float("inf"):
            msg = f"bucket_cap_mb must be a positive number of MiB, got {cap_mb}"
            raise ConfigError(msg)
        cap = max(1, int(cap_mb * (1 << 20)))
        return cls((min(cap, FIRST_BUCKET_BYTES), cap))

    def of(self, index: int) -> int:
        """Return the cap of the bucket with this index."""
        return self.nbytes[min(index, len(self.nbytes) - 1)]


class BucketLayout(NamedTuple):
    """Gradients that are reduced together.

    Attributes:
        dtype: Dtype of all members.
        members: Positions of the parameters in the table, in the order of the flat buffer.
        delayed: Whether the reduction waits for the gradient of another, chosen parameter, or for
            the end of backward.
        device: Device of all members.
    """

    dtype: str
    members: tuple[int, ...]
    delayed: bool = False
    device: str = "cpu"


def plan_buckets(
    specs: Mapping[int, TensorSpec],
    caps: Caps | None = None,
    *,
    order: Sequence[int] = (),
    delayed: frozenset[int] = frozenset(),
    devices: Mapping[int, str] | None = None,
) -> tuple[BucketLayout, ...]:
    """Return the buckets in which the gradients of parameters are reduced.

    Args:
        specs: Parameters by position.
        caps: Size limits of buckets; each dtype and device has separate buckets.
        order: Positions in the order in which their gradients become ready; positions that are not
            in it come last. Empty for the reverse of the positions.
        delayed: Positions with gradients that are reduced together after all others.
        devices: Devices of parameters by position; None for the CPU.

    >>> specs = dict(enumerate([TensorSpec((4,), "float32")] * 3))
    >>> [bucket.members for bucket in plan_buckets(specs, Caps((16, 32)))]
    [(2,), (1, 0)]
    >>> [bucket.members for bucket in plan_buckets(specs, Caps((16, 32)), order=[1, 2, 0])]
    [(1,), (2, 0)]
    """
    caps = caps or Caps()
    if not caps.nbytes or min(caps.nbytes) <= 0:
        sizes = ", ".join(map(str, caps.nbytes)) or "none"
        msg = f"bucket caps must be at least one byte each, got {sizes}"
        raise ConfigError(msg)
    known = [p for p in order if p in specs]
    queue = [*known, *(p for p in sorted(specs, reverse=True) if p not in set(known))]
    closed: list[BucketLayout] = []
    filling: dict[tuple[str, str], list[int]] = defaultdict(list)
    late: dict[tuple[str, str], list[int]] = defaultdict(list)
    nbytes: Counter[tuple[str, str]] = Counter()
    num_closed: Counter[tuple[str, str]] = Counter()
    for position in queue:
        spec = specs[position]
        key = spec.dtype, (devices or {}).get(position, "cpu")
        if position in delayed:
            late[key].append(position)
            continue
        filling[key].append(position)
        nbytes[key] += _nbytes(spec)
        if nbytes[key] >= caps.of(num_closed[key]):
            closed.append(BucketLayout(key[0], tuple(filling.pop(key)), device=key[1]))
            nbytes[key] = 0
            num_closed[key] += 1
    for groups, is_late in ((filling, False), (late, True)):
        closed += [
            BucketLayout(dtype, tuple(members), is_late, device)
            for (dtype, device), members in groups.items()
        ]
    return tuple(closed)


def waiting_cost(
    layouts: Sequence[BucketLayout], specs: Mapping[int, TensorSpec], order: Sequence[int]
) -> float:
    """Return how long bytes wait until their bucket is full, in bytes times gradients.

    Args:
        layouts: Buckets.
        specs: Parameters by position.
        order: Positions in the order in which their gradients become ready.

    >>> specs = dict(enumerate([TensorSpec((4,), "float32")] * 4))
    >>> fitting = [BucketLayout("float32", (3, 2)), BucketLayout("float32", (1, 0))]
    >>> crossed = [BucketLayout("float32", (3, 0)), BucketLayout("float32", (2, 1))]
    >>> waiting_cost(fitting, specs, [3, 2, 1, 0]), waiting_cost(crossed, specs, [3, 2, 1, 0])
    (32.0, 64.0)
    """
    turn = {position: number for number, position in enumerate(order)}
    last = len(order)
    cost = 0.0
    for layout in layouts:
        turns = {p: turn.get(p, last) for p in layout.members}
        full = max(turns.values())
        cost += sum((full - at) * _nbytes(specs[p]) for p, at in turns.items())
    return cost


def _nbytes(spec: TensorSpec) -> int:
    return prod(spec.shape) * ITEM_BYTES.get(spec.dtype, 4)
