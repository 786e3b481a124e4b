"""What every group must do, whatever moves its data: the claims of `braid.comm.Group` as one suite.

Each claim is a function that every rank calls with its group. It computes all ranks' inputs itself, so it can hold its own
result against a loop in one process, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from braid.comm import Group
from braid.comm.engine import Capabilities
from braid.errors import CommError, ConfigError, MismatchError, StaleError

__all__ = ["GROUP_CLAIMS", "MISMATCHES", "check_group", "check_mismatch", "needs", "possible"]

Run = Callable[..., list[Any]]
Claim = Callable[[Group], None]
NEEDS: dict[str, str] = {}  # claim -> the capability without which an engine cannot keep it

SIZES = (0, 1, 3, 1000, 9001, 70_001)  # below and above the staging chunk, not divisible
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)


def check_group(run: Run, sizes: Sequence[int] = (1, 2, 3)) -> None:
    """Hold a kind of group to its claims.

    Args:
        run: `run(size, main)` calls `main(group)` on `size` ranks.
        sizes: World sizes.

    Raises:
        AssertionError: Some claim does not hold; the claim's name is in the traceback.
    """
    for size in sizes:
        for claim in GROUP_CLAIMS:
            run(size, claim)
        for kind in MISMATCHES:
            if size > 1:
                run(size, check_mismatch, kind)


def needs(capability: str) -> Callable[[Claim], Claim]:
    """Mark a claim that only engines with `capability` (a field of `Capabilities`) can keep."""

    def mark(claim: Claim) -> Claim:
        NEEDS[claim.__name__] = capability
        return claim

    return mark


def possible(claims: Sequence[Claim], capabilities: Capabilities) -> list[Claim]:
    """Those of `claims` that an engine with `capabilities` has to keep."""
    return [
        claim
        for claim in claims
        if claim.__name__ not in NEEDS or getattr(capabilities, NEEDS[claim.__name__])
    ]


def of_rank(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The input of `rank`: any rank can compute it."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(0, 5, (numel,), generator=generator).to(dtype)


def reduced(inputs: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The reference: one loop in the order of ranks, 16-bit floats in float32 when there are more than two."""
    short = inputs[0].dtype in (torch.bfloat16, torch.float16)
    wide = short and (len(inputs) > 2 or (op == "avg" and len(inputs) > 1))
    combine: dict[str, Callable[..., torch.Tensor]] = {
        "sum": torch.add,
        "avg": torch.add,
        "product": torch.mul,
        "min": torch.minimum,
        "max": torch.maximum,
    }
    out = inputs[0].float() if wide else inputs[0].clone()
    for x in inputs[1:]:
        out = combine[op](out, x)
    if op == "avg":
        mode = None if out.dtype.is_floating_point else "trunc"
        out = torch.div(out, len(inputs), rounding_mode=mode)
    return out.to(inputs[0].dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Fail unless shape, dtype and every bit agree."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
    bits = [x.clone(memory_format=torch.contiguous_format) for x in (found, expected)]
    bits = [x.as_strided((x.numel(),), (1,)).view(torch.uint8) for x in bits]
    differs = bits[0] != bits[1]
    assert not differs.any(), f"{int(differs.sum())} bytes differ: {found} != {expected}"


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
    for numel in (5, 70_001, 300_001):
        inputs = [of_rank(r, numel, torch.float32) for r in range(group.size)]
        expected = reduced(inputs, "sum")
        for name in ("direct", "two_phase"):
            same(group.all_reduce(inputs[group.rank].clone(), algorithm=name), expected)
        for algorithm in (None, "registered"):
            x = group.empty((numel,)).copy_(inputs[group.rank])
            same(group.all_reduce(x, algorithm=algorithm), expected)


@needs("adopts")
def half_registered_is_fine(group: Group) -> None:
    """Only some ranks' tensors lie in shared memory."""
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


def broadcast_copies_from_any_root(group: Group) -> None:
    """From every root, every size, staged and registered."""
    for numel in (*SIZES, 200_003):
        for root in range(group.size):
            expected = of_rank(root, numel, torch.float32)
            same(group.broadcast(of_rank(group.rank, numel, torch.float32), root), expected)
            x = group.empty((numel,)).copy_(of_rank(group.rank, numel, torch.float32))
            same(group.broadcast(x, root), expected)


@needs("rank_order")
def slices_go_where_they_belong(group: Group) -> None:
    """all_gather, reduce_scatter and all_to_all, staged and registered, with and without `out`."""
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
    """Zero-dim, two-dim, transposed, strided, requires-grad and conjugated tensors."""
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


@needs("requests_any_order")
def requests_start_in_any_order(group: Group) -> None:
    """Persistent requests, started in another order on every rank, many times, with a scale."""
    n, me = group.size, group.rank
    tensors = [group.empty((size,)) for size in (4, 20_000, 300_000)] + [torch.empty(10_000)]
    requests = [group.persistent("all_reduce", x) for x in tensors]
    for step in range(4):
        for index, x in enumerate(tensors):
            x.fill_(me + index + step)
        order = [(i + me * (step + 1)) % len(tensors) for i in range(len(tensors))]
        works = [requests[i].start(scale=0.5) for i in order]
        for work in works:
            work.wait()
        for index, x in enumerate(tensors):
            total = sum(float(r + index + step) for r in range(n))
            same(x, torch.full_like(x, total * 0.5))


@needs("rank_order")
def averages_do_not_overflow_on_the_way(group: Group) -> None:
    """The sum of float16 numbers near the largest is infinite; their average is not."""
    for numel in (4, 40_000):
        x = torch.full((numel,), 60_000.0, dtype=torch.float16)
        same(group.all_reduce(x.clone(), "avg"), x)
        same(group.all_reduce(group.empty((numel,), torch.float16).copy_(x), "avg"), x)


def scales_are_agreed_on(group: Group) -> None:
    """Ranks that scale one request differently all raise, instead of ending with different numbers."""
    part = group.split(0)
    assert part is not None
    if group.size == 1:
        return
    request = part.persistent("all_reduce", part.empty((8,)).fill_(1.0))
    try:
        request.start(scale=1.0 + group.rank).wait()
    except MismatchError as error:
        assert "scaled by 2.0" in str(error)  # noqa: PT017 - not a pytest module
    else:
        raise AssertionError
    group.barrier()


@needs("requests_any_order")
def a_started_request_is_busy(group: Group) -> None:
    """Starting it again before it has ended raises; afterwards it does not."""
    request = group.persistent("all_reduce", group.empty((8,)).fill_(1.0))
    if group.rank == 0 and group.size > 1:
        work = request.start()
        try:
            request.start()
        except StaleError as error:
            assert "under way" in str(error)  # noqa: PT017 - not a pytest module
        else:
            raise AssertionError
        group.barrier()
        work.wait()
    else:
        group.barrier()
        request.start().wait()
    request.start().wait()


def background_work_keeps_order(group: Group) -> None:
    """Asynchronous and synchronous calls of one group take effect in the order of the calls."""
    x = torch.ones(50_000)
    y = torch.ones(10)
    works = [group.all_reduce(x, async_op=True) for _ in range(3)]
    group.all_reduce(y)
    for work in works:
        work.wait()
        work.wait()
        assert work.done()
        assert work.exception() is None
    same(x, torch.full_like(x, float(group.size) ** 3))
    same(y, torch.full_like(y, float(group.size)))


def asking_keeps_order(group: Group) -> None:
    """Whoever only asks whether the last of several has ended gets them all done, in the order of the calls."""
    x = torch.full((50_000,), float(group.rank + 1))
    with group.coalesce() as batch:
        batch.all_reduce(x)
    last = group.all_reduce(x, "product", async_op=True)
    while not last.done():
        group.advance()
    assert batch.work.done()
    total = group.size * (group.size + 1) / 2
    same(x, torch.full_like(x, total**group.size))


def messages_keep_their_order(group: Group) -> None:
    """Send and recv around the ring: small, empty, larger than the slots, several under way."""
    n, me = group.size, group.rank
    if n == 1:
        return
    after, before = (me + 1) % n, (me - 1) % n
    sizes = (1, 0, 100_000, 400_000, 7)
    sent = [group.send(of_rank(me, s, torch.float32), after, async_op=True) for s in sizes]
    for size in sizes:
        x = torch.empty(size)
        same(group.recv(x, before), of_rank(before, size, torch.float32))
    for work in sent:
        work.wait()
    if me == 0:
        for peer in range(1, n):
            group.send(torch.full((3,), float(peer)), peer)
    else:
        same(group.recv(torch.empty(3), 0), torch.full((3,), float(me)))


def groups_divide(group: Group) -> None:
    """Sub-groups have their own order of ranks, work at the same time and may be divided again."""
    n, me = group.size, group.rank
    half = group.split(me % 2, key=-me)
    assert half is not None
    members = sorted((r for r in range(n) if r % 2 == me % 2), reverse=True)
    assert half.ranks == tuple(members)
    same(half.all_reduce(torch.tensor([float(me)])), torch.tensor([float(sum(members))]))
    everyone = group.split(0)
    assert everyone is not None
    works = [half.all_reduce(torch.ones(9), async_op=True)]
    same(everyone.all_reduce(torch.ones(9)), torch.full((9,), float(n)))
    works[0].wait()
    alone = group.split(me)
    assert alone is not None
    assert alone.size == 1
    nobody = group.split(None if me == 0 else 1)
    assert (nobody is None) == (me == 0)
    for part in (half, everyone, alone, nobody):
        if part is not None:
            part.close()


@needs("requests_any_order")
def groups_are_used_in_different_orders(group: Group) -> None:
    """Ranks that start operations of several groups each in an order of its own, and wait in another, do not deadlock."""
    n, me = group.size, group.rank
    parts = [part for part in (group.split(0) for _ in range(3)) if part is not None]
    order = [(me + i) % len(parts) for i in range(len(parts))]
    for background in (False, True):
        xs = [torch.full((70_000,), float(i + me)) for i in range(len(parts))]
        waits: dict[int, Callable[[], None]] = {}
        for i in order:
            if background:
                waits[i] = parts[i].all_reduce(xs[i], async_op=True).wait
            else:
                with parts[i].coalesce() as batch:
                    batch.all_reduce(xs[i])
                waits[i] = batch.work.wait
        for i in order if background else order[::-1]:
            waits[i]()
        for i, x in enumerate(xs):
            same(x, torch.full_like(x, float(n * i + n * (n - 1) // 2)))
    for part in parts:
        part.close()


def many_groups_cost_little(group: Group) -> None:
    """Groups may be made and closed often, staging included."""
    parts = [group.split(0) for _ in range(20)]
    for part in parts:
        assert part is not None
        part.all_reduce(torch.ones(20_000))
        part.close()
    group.barrier()


def bad_arguments_are_refused(group: Group) -> None:
    """Without communication, on this rank alone, naming what was found."""
    x = torch.ones(4)
    odd = torch.ones(group.size + 1) if group.size > 1 else torch.tensor(1.0)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: group.all_reduce(x, "mean"), "mean"),
        (lambda: group.all_reduce(x, algorithm="magic"), "magic"),
        (lambda: group.all_reduce(x, wire="int8"), "int8"),
        (lambda: group.all_reduce([1.0]), "list"),  # type: ignore[call-overload]
        (lambda: group.all_reduce(torch.ones(2, device="meta")), "meta"),
        (lambda: group.all_reduce(torch.ones(2).to_sparse()), "sparse"),
        (lambda: group.all_reduce(torch.ones(2, dtype=torch.bool), "avg"), "bool"),
        (lambda: group.all_reduce(torch.ones(1).expand(4)), "expanded"),
        (lambda: group.all_reduce(torch.ones(2).to(torch.uint16), "avg"), "uint16"),
        (lambda: group.reduce_scatter([1.0]), "list"),  # type: ignore[list-item]
        (lambda: group.all_to_all([1.0]), "list"),  # type: ignore[call-overload]
        (lambda: group.persistent("all_reduce", [1.0]), "list"),  # type: ignore[arg-type]
        (lambda: group.broadcast(x, group.size), str(group.size)),
        (lambda: group.reduce_scatter(odd), "multiple"),
        (lambda: group.all_gather(x, out=torch.ones(1, 1)), "[1, 1]"),
        (lambda: group.send(x, group.rank), "oneself"),
        (lambda: group.split(-3), "-3"),
        (lambda: group.persistent("barrier", x), "barrier"),
        (lambda: group.persistent("all_reduce", torch.ones(4, 4).t()), "contiguous"),
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


def closed_groups_say_so(group: Group) -> None:
    """After `close` every call raises StaleError."""
    part = group.split(0)
    assert part is not None
    part.barrier()
    part.close()
    part.close()
    try:
        part.barrier()
    except StaleError as error:
        assert "closed" in str(error)  # noqa: PT017 - not a pytest module
    else:
        raise AssertionError
    group.barrier()


def aborted_groups_tell_the_others(group: Group) -> None:
    """Members that wait learn at once why they wait in vain."""
    part = group.split(0)
    assert part is not None
    if group.size == 1:
        return
    if group.rank == 0:
        part.abort("rank 0 has had enough")
    else:
        try:
            part.all_reduce(torch.ones(3))
        except CommError as error:
            assert "had enough" in str(error)  # noqa: PT017 - not a pytest module
            assert "rank 0" in str(error)  # noqa: PT017 - likewise
        else:
            raise AssertionError
    group.barrier()


@needs("adopts")
def registered_needs_registered_tensors(group: Group) -> None:
    """Asking for the algorithm by name with ordinary memory somewhere fails alike on every rank."""
    part = group.split(0)
    assert part is not None
    x = part.empty((64,)).fill_(1.0) if group.rank else torch.ones(64)
    try:
        part.all_reduce(x, algorithm="registered")
    except ConfigError as error:
        assert "ranks [0]" in str(error)  # noqa: PT017 - not a pytest module
    else:
        raise AssertionError
    group.barrier()


GROUP_CLAIMS: tuple[Callable[[Group], None], ...] = (
    all_reduce_sums_in_rank_order,
    algorithms_agree,
    half_registered_is_fine,
    broadcast_copies_from_any_root,
    slices_go_where_they_belong,
    results_may_overlap_inputs,
    odd_tensors_are_ordinary,
    requests_start_in_any_order,
    averages_do_not_overflow_on_the_way,
    scales_are_agreed_on,
    a_started_request_is_busy,
    background_work_keeps_order,
    asking_keeps_order,
    messages_keep_their_order,
    groups_divide,
    groups_are_used_in_different_orders,
    many_groups_cost_little,
    bad_arguments_are_refused,
    closed_groups_say_so,
    aborted_groups_tell_the_others,
    registered_needs_registered_tensors,
)


def _four(g: Group) -> object:
    return g.all_reduce(torch.ones(4))


def _two_in_order(g: Group) -> None:
    g.all_reduce(torch.ones(4))
    g.broadcast(torch.ones(2), 0)


def _two_in_another_order(g: Group) -> None:
    g.broadcast(torch.ones(2), 0)
    g.all_reduce(torch.ones(4))


# what the others do, what the last rank does
MISMATCHES: dict[str, tuple[Callable[[Group], object], Callable[[Group], object]]] = {
    "shape": (_four, lambda g: g.all_reduce(torch.ones(5))),
    "dtype": (_four, lambda g: g.all_reduce(torch.ones(4, dtype=torch.float64))),
    "reduction": (_four, lambda g: g.all_reduce(torch.ones(4), "max")),
    "operation": (_four, lambda g: g.broadcast(torch.ones(4), 0)),
    "algorithm": (_four, lambda g: g.all_reduce(torch.ones(4), algorithm="two_phase")),
    "order": (_two_in_order, _two_in_another_order),
    "barrier": (_four, lambda g: g.barrier()),
    "parts": (
        _four,
        lambda g: g.all_to_all([torch.ones(1)] * g.size, out=[torch.ones(1)] * g.size),
    ),
    "large": (_four, lambda g: g.all_reduce(torch.ones(400_000))),
    "root": (lambda g: g.broadcast(torch.ones(4), 0), lambda g: g.broadcast(torch.ones(4), 1)),
    "root of a sum": (lambda g: g.reduce(torch.ones(4), 0), lambda g: g.reduce(torch.ones(4), 1)),
    "root that gathers": (
        lambda g: g.gather(torch.ones(2), 0),
        lambda g: g.gather(torch.ones(2), 1),
    ),
}


def check_mismatch(group: Group, kind: str) -> str:
    """Every rank raises the same MismatchError, whose table marks the odd rank; returns its text."""
    last = group.rank == group.size - 1
    try:
        MISMATCHES[kind][last](group)
    except MismatchError as error:
        text = str(error)
    else:
        msg = f"expected a MismatchError on rank {group.rank} for another {kind}"
        raise AssertionError(msg)
    for rank in range(group.size):
        assert f"rank {rank}  " in text, text
    if group.size > 2:
        marked = [line for line in text.splitlines() if "<-- differs" in line]
        assert [line.split()[1] for line in marked] == [str(group.size - 1)], text
    return text
