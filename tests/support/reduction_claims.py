"""Claims about reductions: sums in the order of ranks, bit by bit, by any algorithm."""

from __future__ import annotations

import torch

from braid.comm import Group
from support.claims import LARGE, SIZES, Claim, needs, of_rank, reduced, same, ways

__all__ = ["REDUCTION_CLAIMS"]

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)


@needs("rank_order")
def all_reduce_sums_in_rank_order(group: Group) -> None:
    """Every dtype, op and size equals the loop over ranks, bit by bit."""
    for numel in SIZES:
        for dtype in (*FLOATS, *INTEGERS):
            for op in ("sum", "avg", "min", "max", "product"):
                inputs = [of_rank(r, numel, dtype) for r in range(group.size)]
                same(group.all_reduce(inputs[group.rank].clone(), op), reduced(inputs, op))


@needs("adopts")
def algorithms_agree(group: Group) -> None:
    """Each algorithm gives the same bits, registered memory or not."""
    for numel in (0, 1, 5, 70_001, 300_001):
        inputs = [of_rank(r, numel, torch.float32) for r in range(group.size)]
        expected = reduced(inputs, "sum")
        for name in ("direct", "two_phase"):
            same(group.all_reduce(inputs[group.rank].clone(), algorithm=name), expected)
        for algorithm in (None, "registered"):
            x = group.empty((numel,)).copy_(inputs[group.rank])
            same(group.all_reduce(x, algorithm=algorithm), expected)


@needs("adopts")
def half_registered_is_fine(group: Group) -> None:
    """Only some ranks' tensors need to lie in shared memory."""
    numel = 50_000
    inputs = [of_rank(r, numel, torch.float32) for r in range(group.size)]
    x = inputs[group.rank].clone()
    if group.rank % 2 == 0:
        x = group.empty((numel,)).copy_(x)
    same(group.all_reduce(x), reduced(inputs, "sum"))
    everything = torch.cat(inputs)
    own = inputs[group.rank]
    mine = group.empty((numel,)).copy_(own) if group.rank % 2 == 0 else own
    for _ in range(3):
        same(group.all_gather(mine), everything)


@needs("rank_order")
def averages_do_not_overflow_on_the_way(group: Group) -> None:
    """The average of float16 numbers near the largest is finite, though their sum is not."""
    for numel in (4, 40_000):
        x = torch.full((numel,), 60_000.0, dtype=torch.float16)
        same(group.all_reduce(x.clone(), "avg"), x)
        same(group.all_reduce(group.empty((numel,), torch.float16).copy_(x), "avg"), x)


@needs("rank_order")
def logic_and_bits_reduce(group: Group) -> None:
    """Bitwise and logical reductions work, as do sums and means of complex numbers."""
    for op in ("band", "bor", "bxor"):
        inputs = [of_rank(r, 1001, torch.int32) for r in range(group.size)]
        expected = inputs[0].clone()
        for x in inputs[1:]:
            combine = {
                "band": torch.bitwise_and,
                "bor": torch.bitwise_or,
                "bxor": torch.bitwise_xor,
            }
            expected = combine[op](expected, x)
        same(group.all_reduce(inputs[group.rank].clone(), op), expected)
    flags = [of_rank(r, 50, torch.int32) > 2 for r in range(group.size)]
    some, every = torch.stack(flags).any(0), torch.stack(flags).all(0)
    for op, expected in (
        ("sum", some),
        ("max", some),
        ("bor", some),
        ("product", every),
        ("min", every),
    ):
        same(group.all_reduce(flags[group.rank].clone(), op), expected)
    numbers = [
        torch.complex(of_rank(r, 9, torch.float32), of_rank(r + 9, 9, torch.float32))
        for r in range(group.size)
    ]
    total = numbers[0].clone()
    for x in numbers[1:]:
        total = total + x
    same(group.all_reduce(numbers[group.rank].clone()), total)
    same(group.all_reduce(numbers[group.rank].clone(), "avg"), total / group.size)


@needs("rank_order")
def results_may_go_elsewhere(group: Group) -> None:
    """An all-reduce with `out` leaves the input alone."""
    inputs = [of_rank(r, 70_001, torch.float32) for r in range(group.size)]
    x, out = inputs[group.rank].clone(), torch.empty(70_001)
    assert group.all_reduce(x, out=out) is out
    same(out, reduced(inputs, "sum"))
    same(x, inputs[group.rank])


@needs("adopts")
def adopted_tensors_need_no_copies(group: Group) -> None:
    """A tensor whose storage was moved is registered, and so are its views."""
    base = of_rank(group.rank, 50_000, torch.float32)
    view = base[100:200]
    group.adopt(base)
    same(
        group.all_reduce(base, algorithm="registered"),
        reduced([of_rank(r, 50_000, torch.float32) for r in range(group.size)], "sum"),
    )
    same(view, base[100:200])
    assert view.data_ptr() == base.data_ptr() + 400


@needs("rank_order")
def reduce_ends_on_the_root(group: Group) -> None:
    """Reduce works for every root, size and algorithm; the other ranks keep their tensors."""
    for numel in (0, 1, 1000, LARGE):
        for root in range(group.size):
            for way in ways(group):
                inputs = [of_rank(r, numel, torch.float32) for r in range(group.size)]
                x = inputs[group.rank].clone()
                assert group.reduce(x, root, algorithm=way) is x
                mine = group.rank == root
                same(x, reduced(inputs, "sum") if mine else inputs[group.rank])
    x = torch.ones(5)
    out = torch.empty(5)
    group.reduce(x, 0, "max", out=out if group.rank == 0 else None)
    same(x, torch.ones(5))
    if group.rank == 0:
        same(out, torch.ones(5))


def scan_reduces_the_ranks_before(group: Group) -> None:
    """Scans give inclusive and exclusive prefix sums."""
    for numel in (1, 70_001):
        inputs = [of_rank(r, numel, torch.float32) for r in range(group.size)]
        x = inputs[group.rank].clone()
        same(group.scan(x), reduced(inputs[: group.rank + 1], "sum"))
        before = inputs[: group.rank]
        expected = reduced(before, "sum") if before else torch.zeros(numel)
        same(group.scan(x, exclusive=True), expected)
        same(x, inputs[group.rank])
    same(group.scan(torch.tensor(2), "product", exclusive=True), torch.tensor(2**group.rank))


@needs("rank_order")
def uneven_slices_are_reduced(group: Group) -> None:
    """reduce_scatter reduces a list with one tensor per rank."""
    n, me = group.size, group.rank
    for scale in (1, LARGE):
        widths = [scale * (r % 2) + r for r in range(n)]
        parts = [[of_rank(r * n + s, widths[s], torch.float32) for s in range(n)] for r in range(n)]
        expected = reduced([parts[r][me] for r in range(n)], "sum")
        for way in ways(group):
            same(group.reduce_scatter(parts[me], algorithm=way), expected)
            whole = torch.cat(parts[me])
            views = list(whole.split(widths))  # type: ignore[no-untyped-call]
            same(group.reduce_scatter(views, algorithm=way), expected)


REDUCTION_CLAIMS: tuple[Claim, ...] = (
    all_reduce_sums_in_rank_order,
    algorithms_agree,
    half_registered_is_fine,
    averages_do_not_overflow_on_the_way,
    logic_and_bits_reduce,
    results_may_go_elsewhere,
    adopted_tensors_need_no_copies,
    reduce_ends_on_the_root,
    scan_reduces_the_ranks_before,
    uneven_slices_are_reduced,
)
