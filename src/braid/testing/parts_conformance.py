"""What every group must do with parts, messages, objects and batches; the second half of the conformance suite.

Like `group_conformance`, every claim computes all ranks' inputs itself and compares with a loop in one process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from braid.comm import Buffer, Group
from braid.errors import ConfigError, MismatchError
from braid.testing.group_conformance import needs, of_rank, reduced, same

__all__ = ["PARTS_CLAIMS"]

WAYS = ("staged", "pulled")
LARGE = 150_001  # float32: more than two chunks of the staging slots
MOVED = (
    torch.bool,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def ways(group: Group) -> list[str | None]:
    """The engine's own choice, and every algorithm that it has."""
    return [None, *(way for way in WAYS if way in group.engine.capabilities.algorithms)]


@needs("rank_order")
def logic_and_bits_reduce(group: Group) -> None:
    """band, bor, bxor on integers; and, or, xor on bool; sums and means of complex numbers."""
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


@needs("rank_order")
def results_may_go_elsewhere(group: Group) -> None:
    """`out` of an all-reduce leaves the input alone."""
    inputs = [of_rank(r, 70_001, torch.float32) for r in range(group.size)]
    x, out = inputs[group.rank].clone(), torch.empty(70_001)
    assert group.all_reduce(x, out=out) is out
    same(out, reduced(inputs, "sum"))
    same(x, inputs[group.rank])


@needs("rank_order")
def reduce_ends_on_the_root(group: Group) -> None:
    """Every root, size and way; the others keep what they had."""
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
    """Inclusive and exclusive prefix sums."""
    for numel in (1, 70_001):
        inputs = [of_rank(r, numel, torch.float32) for r in range(group.size)]
        x = inputs[group.rank].clone()
        same(group.scan(x), reduced(inputs[: group.rank + 1], "sum"))
        before = inputs[: group.rank]
        expected = reduced(before, "sum") if before else torch.zeros(numel)
        same(group.scan(x, exclusive=True), expected)
        same(x, inputs[group.rank])
    same(group.scan(torch.tensor(2), "product", exclusive=True), torch.tensor(2**group.rank))


def ragged_parts_are_gathered(group: Group) -> None:
    """all_gather, gather and scatter of parts of different sizes, among them empty ones, on every way."""
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


def equal_parts_are_gathered(group: Group) -> None:
    """Gather and scatter of one tensor, of two dims and of none."""
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


@needs("rank_order")
def uneven_slices_are_reduced(group: Group) -> None:
    """reduce_scatter of a list with one tensor per rank."""
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


def uneven_slices_are_exchanged(group: Group) -> None:
    """all_to_all of lists, whose sizes only sender and receiver know."""
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
    """The same error on every rank, for a gather, a scatter and an all-to-all."""
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


def tags_tell_messages_apart(group: Group) -> None:
    """Messages with other tags may be received in another order, large ones, too; those of one tag keep it."""
    n, me = group.size, group.rank
    if n == 1:
        return
    after, before = (me + 1) % n, (me - 1) % n
    sizes = (3, 200_003, 5, 0)
    works = []
    for tag, numel in enumerate(sizes):
        for turn in range(2):
            x = of_rank(me + 10 * turn, numel, torch.float32)
            works.append(group.send(x, after, tag=tag, async_op=True))
    for tag in (3, 1, 2, 0):
        for turn in range(2):
            x = torch.empty(sizes[tag])
            group.recv(x, before, tag=tag)
            same(x, of_rank(before + 10 * turn, sizes[tag], torch.float32))
    for work in works:
        work.wait()


@needs("eager_messages")
def whoever_sends_first_is_received(group: Group) -> None:
    """A receive from any source takes one message of each, and says whose it was."""
    n, me = group.size, group.rank
    if n == 1:
        return
    if me == 0:
        sources = set()
        for _ in range(n - 1):
            x = torch.empty(3)
            work = group.recv(x, None, tag=5, async_op=True)
            work.wait()
            same(x, torch.full((3,), float(work.source)))
            sources.add(work.source)
        assert sources == set(range(1, n))
        for source in range(1, n):  # with another tag, sent before
            same(group.recv(torch.empty(2), source, tag=4), torch.full((2,), -float(source)))
    else:
        group.send(torch.full((2,), -float(me)), 0, tag=4)
        group.send(torch.full((3,), float(me)), 0, tag=5)
    group.barrier()


@needs("messages_checked")
def messages_must_fit(group: Group) -> None:
    """A message of another shape raises on the receiver, and on the sender when it next communicates."""
    part = group.split(0)
    assert part is not None
    if group.size == 1:
        return
    if group.rank < 2:
        try:
            if group.rank == 0:
                part.send(torch.ones(3), 1)
                part.recv(torch.empty(1), 1)
            else:
                part.recv(torch.empty(4), 0)
        except MismatchError as error:
            assert "float32[3]" in str(error)  # noqa: PT017 - not a pytest module
            assert "float32[4]" in str(error)  # noqa: PT017 - likewise
        else:
            raise AssertionError
    group.barrier()


def batches_start_together(group: Group) -> None:
    """Large messages both ways without a deadlock; small all-reduces fused; results where they belong."""
    n, me = group.size, group.rank
    after, before = (me + 1) % n, (me - 1) % n
    x, y = of_rank(me, LARGE, torch.float32), torch.empty(LARGE)
    small = [torch.full((3,), float(me + i)) for i in range(5)]
    with group.coalesce() as batch:
        if n > 1:
            batch.send(x, after)
            batch.recv(y, before)
        for s in small:
            batch.all_reduce(s)
        gathered = batch.all_gather(torch.tensor([me]))
    batch.work.wait()
    assert batch.work.done()
    if n > 1:
        same(y, of_rank(before, LARGE, torch.float32))
    for i, s in enumerate(small):
        same(s, torch.full((3,), float(sum(r + i for r in range(n)))))
    same(gathered, torch.arange(n))
    before_count = group.statistics()["num_operations"]
    with group.coalesce() as batch:
        for s in small:
            batch.all_reduce(s)
    batch.work.wait()
    assert group.statistics()["num_operations"] == before_count + 1


def objects_travel_as_they_are(group: Group) -> None:
    """Plain data keeps its types; anything else is refused and named, or pickled on demand."""
    n, me = group.size, group.rank
    mine = {"rank": me, "pair": (me, [1.5, None]), "set": {1, 2}, 3: b"x" * me, "big": 1 << 80}
    objects = group.objects
    everybody = objects.all_gather(mine)
    assert [o["rank"] for o in everybody] == list(range(n))
    assert everybody[me] == mine
    assert objects.broadcast(mine if me == n - 1 else None, n - 1)["rank"] == n - 1
    gathered = objects.gather(me * 2, 0)
    assert gathered == ([2 * r for r in range(n)] if me == 0 else None)
    assert objects.scatter([f"for {r}" for r in range(n)] if me == 0 else None) == f"for {me}"
    if n > 1:
        if me == 0:
            objects.send(mine, 1, tag=9)
        elif me == 1:
            assert objects.recv(0, tag=9)["rank"] == 0
    try:
        objects.all_gather({"model": [complex(1, 2)]})
    except ConfigError as error:
        for word in ("complex", "['model'][0]", "allow_pickle"):
            assert word in str(error), error  # noqa: PT017 - not a pytest module
    else:
        raise AssertionError
    assert objects.all_gather(complex(me, 1), allow_pickle=True)[-1] == complex(n - 1, 1)
    group.barrier()


def arrays_and_raw_memory_are_welcome(group: Group) -> None:
    """Arrays of numpy in place and as results; raw pointers with separate buffers."""
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


@needs("adopts")
def adopted_tensors_need_no_copies(group: Group) -> None:
    """A tensor whose storage was moved is registered; its views follow."""
    base = of_rank(group.rank, 50_000, torch.float32)
    view = base[100:200]
    group.adopt(base)
    same(
        group.all_reduce(base, algorithm="registered"),
        reduced([of_rank(r, 50_000, torch.float32) for r in range(group.size)], "sum"),
    )
    same(view, base[100:200])
    assert view.data_ptr() == base.data_ptr() + 400


@needs("requests_any_order")
def other_requests_persist(group: Group) -> None:
    """broadcast, all_gather, reduce_scatter and all_to_all, started in another order on every rank."""
    n, me = group.size, group.rank
    x = torch.arange(4.0 * n) + me
    row = torch.full((3,), float(me))
    requests = {
        "broadcast": group.persistent("broadcast", row, root=n - 1),
        "all_gather": group.persistent("all_gather", torch.full((2,), float(me))),
        "reduce_scatter": group.persistent("reduce_scatter", x, op="max"),
        "all_to_all": group.persistent("all_to_all", x),
    }
    for turn in range(3):
        names = sorted(requests, key=lambda name: hash((name, me + turn)))
        for work in [requests[name].start() for name in names]:
            work.wait()
        same(row, torch.full((3,), float(n - 1)))
        same(requests["all_gather"].result, torch.arange(n).repeat_interleave(2).float())
        own = torch.arange(4.0 * n)[4 * me : 4 * me + 4]
        same(requests["reduce_scatter"].result, own + n - 1)
        same(requests["all_to_all"].result, torch.cat([own + r for r in range(n)]))


def selected_ranks_form_groups(group: Group) -> None:
    """Only the members of a new group make it, and meet through a store."""
    n, me = group.size, group.rank
    store = group.context.store
    name = f"claim-{group.ranks}"
    group.barrier()
    if n > 1 and me in (0, n - 1):
        pair = group.select([n - 1, 0], store, name=name)
        assert pair.ranks == (n - 1, 0)
        same(pair.all_gather(torch.tensor([me])), torch.tensor([n - 1, 0]))
        pair.close()
    group.barrier()


def background_results_are_found(group: Group) -> None:
    """A Work holds its result and calls back once."""
    called: list[object] = []
    work = group.all_gather(torch.tensor([group.rank]), async_op=True)
    work.add_done_callback(called.append)
    work.wait()
    same(work.result, torch.arange(group.size))
    group.barrier(async_op=True).wait()
    assert called == [work]
    work.add_done_callback(called.append)
    assert called == [work, work]


def wrong_parts_are_refused(group: Group) -> None:
    """Without communication, naming what was found."""
    n, me = group.size, group.rank
    x = torch.ones(4)
    wrong_count = [torch.ones(1)] * (n + 1)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: group.all_gather(x, out=wrong_count), str(n + 1)),
        (lambda: group.all_gather(x, out=[torch.ones(5)] * n), "out["),
        (lambda: group.all_gather(x, out=[torch.ones(4, dtype=torch.int64)] * n), "int64"),
        (lambda: group.reduce_scatter(wrong_count), str(n + 1)),
        (lambda: group.all_to_all([x] * n), "sequence"),  # type: ignore[call-overload]
        (lambda: group.gather(x, n), str(n)),
        (lambda: group.scatter(x if me else None, out=x), "root"),
        (lambda: group.scan(x, "max", exclusive=True), "exclusive"),
        (lambda: group.recv(x, me), "oneself"),
        (lambda: group.send(x, (me + 1) % n, tag=1 << 62), "tag")
        if n > 1
        else (lambda: group.split(-1), "-1"),
        (lambda: group.all_reduce(torch.ones(2, dtype=torch.int32), "median"), "median"),
        (lambda: group.all_reduce(torch.ones(2), "band"), "float32"),
        (lambda: group.all_reduce(Buffer(0, 3, torch.float32)), "address"),
        (lambda: group.broadcast(x, 0, algorithm="direct"), "direct"),
    ]
    for call, word in calls:
        try:
            call()
        except ConfigError as error:
            assert word in str(error), error  # noqa: PT017 - not a pytest module
        else:
            msg = f"expected a ConfigError naming {word!r}"
            raise AssertionError(msg)
    group.barrier()


PARTS_CLAIMS: tuple[Callable[[Group], None], ...] = (
    logic_and_bits_reduce,
    every_dtype_moves,
    results_may_go_elsewhere,
    reduce_ends_on_the_root,
    scan_reduces_the_ranks_before,
    ragged_parts_are_gathered,
    equal_parts_are_gathered,
    uneven_slices_are_reduced,
    uneven_slices_are_exchanged,
    sizes_that_disagree_are_named_everywhere,
    tags_tell_messages_apart,
    whoever_sends_first_is_received,
    messages_must_fit,
    batches_start_together,
    objects_travel_as_they_are,
    arrays_and_raw_memory_are_welcome,
    adopted_tensors_need_no_copies,
    other_requests_persist,
    selected_ranks_form_groups,
    background_results_are_found,
    wrong_parts_are_refused,
)
