"""Claims about moving tensors: parts go where they belong, in any size, type and layout."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from braid.comm import Buffer, Group
from braid.errors import ConfigError, MismatchError
from support.claims import LARGE, SIZES, Claim, needs, of_rank, reduced, same, ways

__all__ = ["MOVING_CLAIMS"]

MOVED = (
    torch.bool,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def broadcast_copies_from_any_root(group: Group) -> None:
    """Broadcast copies from every root, in every size, staged and registered."""
    for numel in (*SIZES, 200_003):
        for root in range(group.size):
            expected = of_rank(root, numel, torch.float32)
            same(group.broadcast(of_rank(group.rank, numel, torch.float32), root), expected)
            x = group.empty((numel,)).copy_(of_rank(group.rank, numel, torch.float32))
            same(group.broadcast(x, root), expected)


@needs("rank_order")
def slices_go_where_they_belong(group: Group) -> None:
    """all_gather, reduce_scatter and all_to_all are right, registered or not, `out` or not."""
    n, me = group.size, group.rank
    for numel in (*SIZES, 100_003):
        inputs = [of_rank(r, n * numel, torch.float32).view(n * numel) for r in range(n)]
        for registered in (False, True):
            x = inputs[me].clone()
            if registered:
                x = group.empty((n * numel,)).copy_(x)
            part = x[:numel]
            gathered = torch.cat([i[:numel] for i in inputs])
            same(group.all_gather(part), gathered)
            same(group.all_gather(part, out=torch.empty(n * numel)), gathered)
            own = slice(me * numel, (me + 1) * numel)
            same(group.reduce_scatter(x), reduced([i[own] for i in inputs], "sum"))
            same(group.reduce_scatter(x, "max"), reduced([i[own] for i in inputs], "max"))
            same(group.all_to_all(x), torch.cat([i[own] for i in inputs]))


@needs("rank_order")
def results_may_overlap_inputs(group: Group) -> None:
    """`out` may be `x` or a part of it, staged and registered."""
    n, me = group.size, group.rank
    for numel in (7, 100_003):
        inputs = [of_rank(r, n * numel, torch.float32) for r in range(n)]
        own = slice(me * numel, (me + 1) * numel)
        exchanged = torch.cat([i[own] for i in inputs])
        gathered = torch.cat([i[:numel] for i in inputs])
        for allocate in (torch.empty, group.empty):
            for part in (own, slice(numel)):
                x = allocate((n * numel,)).copy_(inputs[me])
                expected = reduced([i[own] for i in inputs], "sum")
                same(group.reduce_scatter(x, out=x[part]), expected)
                x = allocate((n * numel,))
                x[part].copy_(inputs[me][:numel])
                same(group.all_gather(x[part], out=x), gathered)
            x = allocate((n * numel,)).copy_(inputs[me])
            same(group.all_to_all(x, out=x), exchanged)


def odd_tensors_are_ordinary(group: Group) -> None:
    """Zero-dim, two-dim, transposed, strided, requires-grad and conjugated tensors work."""
    n = group.size
    same(group.all_reduce(torch.tensor(2.0)), torch.tensor(2.0 * n))
    same(group.all_gather(torch.tensor(group.rank)), torch.arange(n))
    base = torch.arange(12.0).view(3, 4)
    same(group.all_reduce(base.clone().t()), (base * n).t())
    whole = torch.zeros(4, 6)
    group.all_reduce(whole[:, ::2].fill_(1.0))
    group.all_reduce(whole[:, ::2])
    same(whole[:, ::2].contiguous(), torch.full((4, 3), float(n * n)))
    assert not whole[:, 1::2].any()
    leaf = torch.ones(3, requires_grad=True)
    group.all_reduce(leaf)
    same(leaf.detach(), torch.full((3,), float(n)))
    conjugated = torch.tensor([1 + 2j]).conj()
    same(group.all_reduce(conjugated.clone()).resolve_conj(), torch.tensor([n * (1 - 2j)]))
    same(group.all_gather(base.t()), torch.cat([base.t()] * n))


def every_dtype_moves(group: Group) -> None:
    """Types that cannot be added can be moved."""
    for dtype in MOVED:
        inputs = [
            of_rank(r, 24, torch.float32).abs().to(torch.float16).to(dtype)
            for r in range(group.size)
        ]
        mine = inputs[group.rank]
        gathered = group.all_gather(mine.clone())
        same(gathered.view(torch.uint8), torch.cat([x.view(torch.uint8) for x in inputs]))
        last = group.size - 1
        same(group.broadcast(mine.clone(), last).view(torch.uint8), inputs[last].view(torch.uint8))


def arrays_and_raw_memory_are_welcome(group: Group) -> None:
    """Arrays of numpy work in place and as results; raw pointers work with separate buffers."""
    n, me = group.size, group.rank
    array = np.arange(6, dtype=np.float64).reshape(2, 3) + me
    expected = sum(np.arange(6, dtype=np.float64).reshape(2, 3) + r for r in range(n))
    assert group.all_reduce(array) is array
    assert np.array_equal(array, expected)
    gathered: Any = group.all_gather(np.array([me]))  # typed for tensors
    assert isinstance(gathered, np.ndarray)
    assert gathered.tolist() == list(range(n))
    frozen = np.ones(2)
    frozen.flags.writeable = False
    try:
        group.all_reduce(frozen)
    except ConfigError as error:
        assert "read-only" in str(error)  # noqa: PT017 - not a pytest module
    else:
        raise AssertionError
    given, result = (ctypes.c_float * 4)(*[me + 1.0] * 4), (ctypes.c_float * 4)()
    source = Buffer(ctypes.addressof(given), 4, torch.float32)
    target = Buffer(ctypes.addressof(result), 4, torch.float32)
    assert group.all_reduce(source, out=target) is target
    assert list(result) == [sum(r + 1.0 for r in range(n))] * 4
    assert list(given) == [me + 1.0] * 4


def equal_parts_are_gathered(group: Group) -> None:
    """Gather and scatter work for tensors of two dims and of none."""
    n, me = group.size, group.rank
    whole = torch.arange(6.0 * n).view(2 * n, 3)
    mine = whole[2 * me : 2 * me + 2]
    got = group.gather(mine, n - 1)
    if me == n - 1:
        same(got, whole)
    out = torch.empty(2, 3)
    group.scatter(whole if me == 0 else None, out=out)
    same(out, mine)
    got = group.gather(torch.tensor(me))
    if me == 0:
        same(got, torch.arange(n))


def ragged_parts_are_gathered(group: Group) -> None:
    """all_gather, gather and scatter move parts of different sizes, also empty, in every way."""
    n, me = group.size, group.rank
    for widths in (list(range(n)), [LARGE * (r % 2) + r for r in range(n)]):
        parts = [of_rank(r, width, torch.float32) for r, width in enumerate(widths)]
        for way in ways(group):
            outs = [torch.empty(width) for width in widths]
            group.all_gather(parts[me].clone(), out=outs, algorithm=way)
            for out, part in zip(outs, parts, strict=True):
                same(out, part)
            for root in range(n):
                outs = [torch.empty(width) for width in widths]
                got = group.gather(parts[me], root, out=outs if me == root else None, algorithm=way)
                assert (got is not None) == (me == root)
                for out, part in zip(got or (), parts, strict=False):
                    same(out, part)
                own = torch.empty(widths[me])
                group.scatter(parts if me == root else None, root, out=own, algorithm=way)
                same(own, parts[me])


def uneven_slices_are_exchanged(group: Group) -> None:
    """all_to_all moves lists whose sizes only sender and receiver know."""
    n, me = group.size, group.rank
    for scale in (1, LARGE):
        parts = [
            [of_rank(r * n + s, scale * ((r + s) % 2) + r, torch.float32) for s in range(n)]
            for r in range(n)
        ]
        for way in ways(group):
            outs = [torch.empty(parts[r][me].numel()) for r in range(n)]
            group.all_to_all(parts[me], out=outs, algorithm=way)
            for r, out in enumerate(outs):
                same(out, parts[r][me])


@needs("messages_checked")
def sizes_that_disagree_are_named_everywhere(group: Group) -> None:
    """Sizes that disagree raise the same error on every rank, in gather, scatter and all-to-all."""
    n, me = group.size, group.rank
    if n == 1:
        return
    wrong = 5 if me == n - 1 else 4
    fours = [torch.empty(4) for _ in range(n)]
    attempts: list[Callable[[Group], object]] = [
        lambda g: g.gather(torch.ones(wrong), 0, out=fours if me == 0 else None),
        lambda g: g.scatter(fours if me == 0 else None, out=torch.empty(wrong)),
        lambda g: g.all_to_all([torch.ones(wrong)] * n, out=fours),
    ]
    for attempt in attempts:
        part = group.split(0)
        assert part is not None
        try:
            attempt(part)
        except MismatchError as error:
            assert f"rank {n - 1}" in str(error), error  # noqa: PT017 - not a pytest module
            assert "5 elements" in str(error) or "expects 5" in str(error)  # noqa: PT017
            text = str(error)
        else:
            raise AssertionError
        assert group.objects.all_gather(text) == [text] * n


MOVING_CLAIMS: tuple[Claim, ...] = (
    broadcast_copies_from_any_root,
    slices_go_where_they_belong,
    results_may_overlap_inputs,
    odd_tensors_are_ordinary,
    every_dtype_moves,
    arrays_and_raw_memory_are_welcome,
    equal_parts_are_gathered,
    ragged_parts_are_gathered,
    uneven_slices_are_exchanged,
    sizes_that_disagree_are_named_everywhere,
)
