"""Which gradients travel together, and when they may leave. Pure: no tensors, no communication.

Problem: reducing every gradient by itself pays a latency each; reducing all at once starts when backward has ended. Between
the two lie *buckets*: gradients that become ready at about the same time are reduced together, while backward goes on.

Backward computes gradients in the reverse of the order in which the forward used the parameters, which is roughly the
reverse of registration. So buckets are filled from the last parameter to the first, until the first backward has shown in which
order gradients really come; the first bucket is small, so that communication starts early.

    parameters   p0 p1 p2 p3 p4 p5 p6           ready in backward:  p6 p5 p4 p3 p2 p1 p0
    buckets                                      0: p6 p5     1: p4 p3 p2     2: p1 p0

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, sec. 3.2.3. There,
buckets leave strictly in order; here each leaves when it is full.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from braid.errors import ConfigError
from braid.types import TensorSpec

__all__ = ["Bucket", "BucketState", "Caps", "held_back", "plan_buckets"]

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_CAP_BYTES = 25 << 20
ITEM_BYTES = {"float64": 8, "complex64": 8, "complex128": 16, "float32": 4, "bfloat16": 2}
ITEM_BYTES["float16"] = 2


class Caps(NamedTuple):
    """Bytes from which buckets are closed, the first, the second, ...; the last cap is that of all further ones."""

    nbytes: tuple[int, ...] = (FIRST_BUCKET_BYTES, BUCKET_CAP_BYTES)

    @classmethod
    def of_mb(cls, cap_mb: float | None) -> Caps:
        """With a cap in MiB; the first bucket stays small.

        Raises:
            ConfigError: It is no positive number.
        """
        if cap_mb is None:
            return cls()
        if not 0 < cap_mb < float("inf"):
            msg = f"expected a cap of buckets above 0 MiB, found {cap_mb}"
            raise ConfigError(msg)
        cap = max(1, int(cap_mb * (1 << 20)))
        return cls((min(cap, FIRST_BUCKET_BYTES), cap))

    def of(self, number: int) -> int:
        """Cap of the bucket with this number."""
        return self.nbytes[min(number, len(self.nbytes) - 1)]


class Bucket(NamedTuple):
    """Gradients that are reduced together.

    Attributes:
        dtype: Of all of them.
        members: Positions of the parameters in the table, in the order of the flat buffer.
        delayed: Whether it leaves only when it is told to, or at the end of backward.
        device: Of all of them.
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
) -> tuple[Bucket, ...]:
    """Divide parameters into buckets.

    Args:
        specs: Parameters by position.
        caps: When buckets are closed, each dtype and device for itself.
        order: Positions in the order in which their gradients become ready; those that are not in it come last. The reverse
            of the positions when empty.
        delayed: Positions whose gradients leave together after all others.
        devices: Of parameters by position; all on the CPU when None.

    >>> specs = dict(enumerate([TensorSpec((4,), "float32")] * 3))
    >>> [bucket.members for bucket in plan_buckets(specs, Caps((16, 32)))]
    [(2,), (1, 0)]
    >>> [bucket.members for bucket in plan_buckets(specs, Caps((16, 32)), order=[1, 2, 0])]
    [(1,), (2, 0)]
    """
    caps = caps or Caps()
    if not caps.nbytes or min(caps.nbytes) <= 0:
        msg = f"expected bucket caps of at least one byte, found {', '.join(map(str, caps.nbytes)) or 'none'}"
        raise ConfigError(msg)
    known = [p for p in order if p in specs]
    queue = [*known, *(p for p in sorted(specs, reverse=True) if p not in set(known))]
    closed: list[Bucket] = []
    filling: dict[tuple[str, str], list[int]] = defaultdict(list)
    late: dict[tuple[str, str], list[int]] = defaultdict(list)
    nbytes: Counter[tuple[str, str]] = Counter()
    numbers: Counter[tuple[str, str]] = Counter()
    for position in queue:
        spec = specs[position]
        key = spec.dtype, (devices or {}).get(position, "cpu")
        if position in delayed:
            late[key].append(position)
            continue
        filling[key].append(position)
        nbytes[key] += _nbytes(spec)
        if nbytes[key] >= caps.of(numbers[key]):
            closed.append(Bucket(key[0], tuple(filling.pop(key)), device=key[1]))
            nbytes[key] = 0
            numbers[key] += 1
    for (dtype, device), members in filling.items():
        closed.append(Bucket(dtype, tuple(members), device=device))
    for (dtype, device), members in late.items():
        closed.append(Bucket(dtype, tuple(members), delayed=True, device=device))
    return tuple(closed)


def held_back(
    plan: Sequence[Bucket], specs: Mapping[int, TensorSpec], order: Sequence[int]
) -> float:
    """How long bytes wait for the rest of their bucket, in bytes times the number of gradients that come meanwhile.

    Args:
        plan: Buckets.
        specs: Parameters by position.
        order: Positions in the order in which their gradients become ready.

    >>> specs = dict(enumerate([TensorSpec((4,), "float32")] * 4))
    >>> fitting, crossed = [Bucket("float32", (3, 2)), Bucket("float32", (1, 0))], [Bucket("float32", (3, 0)), Bucket("float32", (2, 1))]
    >>> held_back(fitting, specs, [3, 2, 1, 0]), held_back(crossed, specs, [3, 2, 1, 0])
    (32.0, 64.0)
    """
    turn = {position: number for number, position in enumerate(order)}
    last = len(order)
    waits = 0.0
    for bucket in plan:
        turns = {p: turn.get(p, last) for p in bucket.members}
        full = max(turns.values())
        waits += sum((full - at) * _nbytes(specs[p]) for p, at in turns.items())
    return waits


class BucketState:
    """Counts ready gradients through one backward.

    Args:
        buckets: The plan.
        names: Parameter names by position, for messages.
    """

    def __init__(self, buckets: Sequence[Bucket], names: Mapping[int, str]) -> None:
        self.buckets = tuple(buckets)
        self._names = names
        self._bucket_of = {p: b for b, bucket in enumerate(buckets) for p in bucket.members}
        self._times: dict[int, int] = {}
        self._expected: dict[int, int] = {}
        self._waiting: list[int] = []
        self._gone: set[int] = set()
        self.reset()

    def reset(self) -> None:
        """Begin a new backward."""
        self._times.clear()
        self._gone.clear()
        self._waiting = [len(bucket.members) for bucket in self.buckets]

    @property
    def begun(self) -> bool:
        """Whether any gradient of this backward has become ready."""
        return bool(self._times)

    @property
    def order(self) -> list[int]:
        """Positions in the order in which their gradients came first."""
        return list(self._times)

    def learn(self) -> None:
        """Expect every gradient as often as it came in this backward: the graph is always the same."""
        self._expected = dict(self._times)

    def ready(self, position: int) -> int | None:
        """Note that a gradient is ready; the number of its bucket if that is now complete.

        A gradient may come in parts, from graphs that are differentiated separately, until its bucket has left.

        Raises:
            ConfigError: Its bucket has left in this backward.
        """
        bucket = self._bucket_of[position]
        if bucket in self._gone:
            msg = (
                f"expected no further gradient of {self._names[position]!r} in this backward, found one after its bucket has left: "
                "the parameter is used in graphs that are differentiated separately (re-entrant checkpointing); say "
                "static_graph=True, or use_reentrant=False where it is checkpointed"
            )
            raise ConfigError(msg)
        times = self._times[position] = self._times.get(position, 0) + 1
        if times != self._expected.get(position, 1):
            return None
        self._waiting[bucket] -= 1
        return None if self._waiting[bucket] else bucket

    def leave(self, bucket: int) -> None:
        """Note that a bucket is on its way."""
        self._gone.add(bucket)

    def has_left(self, bucket: int) -> bool:
        """Whether it is on its way."""
        return bucket in self._gone

    def came(self, position: int) -> bool:
        """Whether this backward has computed the gradient, or a part of it."""
        return position in self._times

    def __repr__(self) -> str:
        complete = self._waiting.count(0)
        return f"BucketState({complete} of {len(self.buckets)} buckets complete)"


def _nbytes(spec: TensorSpec) -> int:
    return prod(spec.shape) * ITEM_BYTES.get(spec.dtype, 4)
