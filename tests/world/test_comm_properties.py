"""Random programs of collectives equal a naive reference, bit by bit, on every rank.

A program is a list of calls that all ranks make in order; every call draws its size, dtype, reduction, root, parts and
way. The reference is written without any code of `comm` but the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.comm import Group
from support.claims import of_rank, reduced, same
from support.worlds import run_threads

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
)
OPS = ("sum", "avg", "min", "max", "product")


class Asked(NamedTuple):
    """One call of a program; `widths` are elements, one per pair of ranks."""

    kind: str
    dtype: torch.dtype
    op: str
    root: int
    widths: tuple[int, ...]
    equal: bool
    way: str | None
    registered: bool
    strided: bool


class _Reference:
    """What every rank passes and must get; any rank can compute it."""

    def __init__(self, group: Group, asked: Asked, seed: int) -> None:
        self.n, self.me = group.size, group.rank
        self.asked = asked
        self._group = group
        self.seed = seed

    def width(self, source: int, target: int) -> int:
        return self.asked.widths[source * self.n + target]

    def part(self, source: int, target: int) -> torch.Tensor:
        """What `source` has for `target`."""
        key = self.seed * 100 + source * self.n + target
        return of_rank(key, self.width(source, target), self.asked.dtype)

    def whole(self, source: int) -> torch.Tensor:
        """What `source` has where all have the same size."""
        return of_rank(self.seed * 100 + source, self.asked.widths[0], self.asked.dtype)

    def everybody(self) -> list[torch.Tensor]:
        """What every rank has where all have the same size."""
        return [self.whole(source) for source in range(self.n)]

    def room(self) -> list[torch.Tensor]:
        """Room for what every rank has for this one."""
        return [torch.empty(self.width(r, self.me), dtype=self.asked.dtype) for r in range(self.n)]

    def mine(self, x: torch.Tensor) -> torch.Tensor:
        """`x` in the memory that was drawn."""
        if self.asked.registered and x.numel():
            return self._group.empty(x.shape, x.dtype).copy_(x)
        if self.asked.strided:
            return torch.stack([x, x], -1)[..., 0]
        return x.clone()


def _all_reduce(ref: _Reference, group: Group, asked: Asked) -> None:
    everybody = ref.everybody()
    result = group.all_reduce(ref.mine(everybody[ref.me]), asked.op, algorithm=asked.way)
    same(result.contiguous(), reduced(everybody, asked.op))


def _reduce(ref: _Reference, group: Group, asked: Asked) -> None:
    everybody = ref.everybody()
    x = ref.mine(everybody[ref.me])
    group.reduce(x, asked.root, asked.op, algorithm=asked.way)
    at_root = ref.me == asked.root
    same(x.contiguous(), reduced(everybody, asked.op) if at_root else everybody[ref.me])


def _scan(ref: _Reference, group: Group, asked: Asked) -> None:
    everybody = ref.everybody()
    result = group.scan(ref.mine(everybody[ref.me]), asked.op)
    same(result.contiguous(), reduced(everybody[: ref.me + 1], asked.op))


def _broadcast(ref: _Reference, group: Group, asked: Asked) -> None:
    everybody = ref.everybody()
    result = group.broadcast(ref.mine(everybody[ref.me]), asked.root, algorithm=asked.way)
    same(result.contiguous(), everybody[asked.root])


def _reduce_scatter(ref: _Reference, group: Group, asked: Asked) -> None:
    # all ranks have parts of the same sizes: those that rank 0 has
    parts = [
        [of_rank(ref.seed + r * ref.n + t, ref.width(0, t), asked.dtype) for t in range(ref.n)]
        for r in range(ref.n)
    ]
    mine = [ref.mine(part) for part in parts[ref.me]]
    result = group.reduce_scatter(mine, asked.op, algorithm=asked.way)
    same(result, reduced([row[ref.me] for row in parts], asked.op))


def _all_gather(ref: _Reference, group: Group, asked: Asked) -> None:
    if asked.equal:
        everybody = ref.everybody()
        x = ref.mine(everybody[ref.me])
        same(group.all_gather(x, algorithm=asked.way), torch.cat(everybody))
        return
    # rank r has what it would send to rank 0
    outs = [torch.empty(ref.width(r, 0), dtype=asked.dtype) for r in range(ref.n)]
    group.all_gather(ref.mine(ref.part(ref.me, 0)), out=outs, algorithm=asked.way)
    for r, out in enumerate(outs):
        same(out, ref.part(r, 0))


def _gather(ref: _Reference, group: Group, asked: Asked) -> None:
    outs = ref.room() if ref.me == asked.root else None
    mine = ref.mine(ref.part(ref.me, asked.root))
    group.gather(mine, asked.root, out=outs, algorithm=asked.way)
    for r, out in enumerate(outs or ()):
        same(out, ref.part(r, asked.root))


def _scatter(ref: _Reference, group: Group, asked: Asked) -> None:
    parts = None
    if ref.me == asked.root:
        parts = [ref.mine(ref.part(asked.root, target)) for target in range(ref.n)]
    out = ref.room()[asked.root]
    result = group.scatter(parts, asked.root, out=out, algorithm=asked.way)
    same(result, ref.part(asked.root, ref.me))


def _all_to_all(ref: _Reference, group: Group, asked: Asked) -> None:
    outs = ref.room()
    mine = [ref.mine(ref.part(ref.me, target)) for target in range(ref.n)]
    group.all_to_all(mine, out=outs, algorithm=asked.way)
    for r, out in enumerate(outs):
        same(out, ref.part(r, ref.me))


def _ring(ref: _Reference, group: Group, asked: Asked) -> None:
    if ref.n == 1:
        return
    after, before = (ref.me + 1) % ref.n, (ref.me - 1) % ref.n
    out = ref.room()[before]
    with group.coalesce() as batch:
        batch.recv(out, before, tag=ref.seed)
        batch.send(ref.mine(ref.part(ref.me, after)), after, tag=ref.seed)
    batch.work.wait()
    same(out, ref.part(before, ref.me))


CARRY_OUT: dict[str, Callable[[_Reference, Group, Asked], None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "scan": _scan,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "ring": _ring,
}


@st.composite
def programs(draw: Any, size: int) -> list[Asked]:
    numel = st.one_of(
        st.integers(0, 20), st.sampled_from([1023, 4096, 65_537, 140_001])
    )  # around the sizes of lines, slots and chunks
    asked = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(sorted(CARRY_OUT)))
        equal = draw(st.booleans())
        width = draw(numel)
        widths = [width if equal else draw(numel) for _ in range(size * size)]
        ways = (
            (None, "direct", "two_phase", "pulled")
            if kind == "all_reduce"
            else (None, "staged", "pulled")
        )
        asked.append(
            Asked(
                kind,
                draw(st.sampled_from(DTYPES)),
                draw(st.sampled_from(OPS)),
                draw(st.integers(0, size - 1)),
                tuple(widths),
                equal,
                draw(st.sampled_from(ways)),
                draw(st.booleans()),
                draw(st.booleans()),
            )
        )
    return asked


def _run(group: Group, program: list[Asked]) -> None:
    for index, asked in enumerate(program):
        CARRY_OUT[asked.kind](_Reference(group, asked, index), group, asked)
    group.barrier()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_random_programs_equal_the_reference(size):
    @given(programs(size))
    def check(program):
        run_threads(size, _run, program)

    check()
