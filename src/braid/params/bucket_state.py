"""Which gradients travel together, and when they may leave. Pure: no tensors, no communication.

Problem: reducing every gradient by itself pays a latency each; reducing all at once starts when backward has ended. Between
the two lie *buckets*: gradients that become ready at about the same time are reduced together, while backward goes on.

Backward computes gradients in the reverse of the order in which the forward used the parameters, which is roughly the
reverse of registration. So buckets are filled from the last parameter to the first; the first bucket is small, so that
communication starts early.

    parameters   p0 p1 p2 p3 p4 p5 p6           ready in backward:  p6 p5 p4 p3 p2 p1 p0
    buckets                                      0: p6 p5     1: p4 p3 p2     2: p1 p0

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, sec. 3.2.3. There,
buckets leave strictly in order; here each leaves when it is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from braid.errors import ConfigError
from braid.types import TensorSpec

__all__ = ["Bucket", "BucketState", "plan_buckets"]

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_CAP_BYTES = 25 << 20

ITEM_BYTES = {"float64": 8, "complex64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class Bucket(NamedTuple):
    """Gradients that are reduced together.

    Attributes:
        dtype: Of all of them.
        members: Positions of the parameters in the table, in the order of the flat buffer.
    """

    dtype: str
    members: tuple[int, ...]


def plan_buckets(
    specs: Sequence[TensorSpec],
    cap_bytes: int = BUCKET_CAP_BYTES,
    first_cap_bytes: int = FIRST_BUCKET_BYTES,
) -> tuple[Bucket, ...]:
    """Divide parameters into buckets.

    Args:
        specs: Parameters in registration order.
        cap_bytes: A bucket is closed when it holds at least so much.
        first_cap_bytes: The same for the first bucket of each dtype.

    >>> specs = [TensorSpec((4,), "float32")] * 3
    >>> [bucket.members for bucket in plan_buckets(specs, cap_bytes=32, first_cap_bytes=16)]
    [(2,), (1, 0)]
    """
    if cap_bytes <= 0 or first_cap_bytes <= 0:
        msg = f"expected bucket caps of at least one byte, found {first_cap_bytes} and {cap_bytes}"
        raise ConfigError(msg)
    closed: list[Bucket] = []
    filling: dict[str, list[int]] = {}
    nbytes: dict[str, int] = {}
    caps: dict[str, int] = {}
    for position in reversed(range(len(specs))):
        shape, dtype, _ = specs[position]
        filling.setdefault(dtype, []).append(position)
        nbytes[dtype] = nbytes.get(dtype, 0) + _nbytes(shape, dtype)
        if nbytes[dtype] >= caps.get(dtype, min(first_cap_bytes, cap_bytes)):
            closed.append(Bucket(dtype, tuple(filling.pop(dtype))))
            nbytes[dtype] = 0
            caps[dtype] = cap_bytes
    closed += [Bucket(dtype, tuple(members)) for dtype, members in filling.items()]
    return tuple(closed)


class BucketState:
    """Counts ready gradients through one backward.

    Args:
        buckets: The plan.
        names: Parameter names by position, for messages.
    """

    def __init__(self, buckets: Sequence[Bucket], names: Sequence[str]) -> None:
        self.buckets = tuple(buckets)
        self._names = tuple(names)
        self._bucket_of = {p: b for b, bucket in enumerate(buckets) for p in bucket.members}
        self._ready: set[int] = set()
        self._waiting: list[int] = []
        self.reset()

    def reset(self) -> None:
        """Begin a new backward."""
        self._ready.clear()
        self._waiting = [len(bucket.members) for bucket in self.buckets]

    @property
    def begun(self) -> bool:
        """Whether any gradient of this backward has become ready."""
        return bool(self._ready)

    def ready(self, position: int) -> int | None:
        """Note that a gradient is ready; the number of its bucket if that is now complete.

        Raises:
            ConfigError: It was ready before in this backward.
        """
        if position in self._ready:
            msg = (
                f"expected one gradient of {self._names[position]!r} in a backward, found a second one: the parameter is "
                "used in two graphs that are differentiated separately (re-entrant checkpointing?); use "
                "use_reentrant=False"
            )
            raise ConfigError(msg)
        self._ready.add(position)
        bucket = self._bucket_of[position]
        self._waiting[bucket] -= 1
        return None if self._waiting[bucket] else bucket

    def missing(self, bucket: int) -> tuple[int, ...]:
        """Members of a bucket whose gradients are not ready."""
        return tuple(p for p in self.buckets[bucket].members if p not in self._ready)

    def __repr__(self) -> str:
        complete = self._waiting.count(0)
        return f"BucketState({complete} of {len(self.buckets)} buckets complete)"


def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    numel = 1
    for extent in shape:
        numel *= extent
    return numel * ITEM_BYTES.get(dtype, 4)
