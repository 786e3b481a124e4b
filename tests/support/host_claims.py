"""Claims about groups of ranks of several hosts; they also hold for groups of one host."""

from __future__ import annotations

import torch

from braid.comm import Group
from braid.comm.formats import by_name
from support.claims import Claim, needs, of_rank, reduced, same

__all__ = ["HOST_CLAIMS"]

NUMELS = (0, 1, 5, 1000, 70_001, 300_001)
# largest error of one number relative to the largest of its inputs, for each time that it is
# rounded
ROUNDING = {"float32": 0.0, "bf16": 2**-8, "float16": 2**-10, "int8": 1 / 127}


def _agreed(group: Group, x: torch.Tensor) -> None:
    """Fail unless `x` is the same, bit by bit, on all members."""
    for other in group.all_gather(x).view(group.size, -1):
        same(other, x)


@needs("wires")
def hierarchical_sums_are_exact(group: Group) -> None:
    """Whole numbers, whose sums are exact in any order, survive every hierarchical reduction."""
    if "hierarchical" not in group.engine.capabilities.algorithms:
        return
    for numel in NUMELS:
        for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
            for op in ("sum", "avg", "min", "max"):
                inputs = [of_rank(r, numel, torch.int64).to(dtype) for r in range(group.size)]
                result = group.all_reduce(inputs[group.rank].clone(), op, algorithm="hierarchical")
                if op != "avg" or dtype != torch.bfloat16:
                    same(result, reduced(inputs, op))
                else:  # rounded once inside of each host, and once over them
                    exact = torch.stack([x.double() for x in inputs]).mean(0)
                    assert torch.allclose(result.double(), exact, rtol=3 * 2**-8, atol=3 * 2**-9)


@needs("wires")
def relays_move_everything_once(group: Group) -> None:
    """Broadcast from every root, all-gather and reduce-scatter move equal and different parts."""
    if "hierarchical" not in group.engine.capabilities.algorithms:
        return
    me, n = group.rank, group.size
    for numel in NUMELS:
        inputs = [of_rank(r, numel * n, torch.int64).double() for r in range(n)]
        total = torch.stack(inputs).sum(0)
        for root in range(n):
            result = group.broadcast(inputs[me].clone(), root, algorithm="hierarchical")
            same(result, inputs[root])
        same(group.all_gather(inputs[me], algorithm="hierarchical"), torch.cat(inputs))
        result = group.reduce_scatter(inputs[me], "avg", algorithm="hierarchical")
        same(result, (total / n)[me * numel : (me + 1) * numel])
        sizes = [numel + r for r in range(n)]
        rows = [of_rank(r, size, torch.float32) for r, size in enumerate(sizes)]
        outs = [torch.empty(size) for size in sizes]
        group.all_gather(rows[me], out=outs, algorithm="hierarchical")
        for result, row in zip(outs, rows, strict=True):
            same(result, row)
        parts = [torch.full((size,), float(r + me)) for r, size in enumerate(sizes)]
        own = group.reduce_scatter(parts, algorithm="hierarchical")
        same(own, torch.full((sizes[me],), float(n * me + n * (n - 1) // 2)))


@needs("wires")
def averages_over_hosts_do_not_overflow_on_the_way(group: Group) -> None:
    """Averages of float16 numbers are finite, though their sum overflows on every host."""
    n = group.size
    for numel in (8, 400_000):
        x = torch.full((numel * n,), 32_768.0 * 1.9375, dtype=torch.float16)
        for name in (None, "hierarchical", "ring"):
            if name not in {None, *group.engine.capabilities.algorithms}:
                continue
            result = group.all_reduce(x.clone(), "avg", algorithm=name)
            assert torch.allclose(result, x, rtol=2**-8)
            result = group.reduce_scatter(x, "avg", algorithm=name)
            assert torch.allclose(result, x[:numel], rtol=2**-8)
        y = x.clone()
        group.persistent("all_reduce", y).start(scale=1 / n).wait()
        assert torch.allclose(y, x, rtol=2**-8)


@needs("wires")
def wires_round_and_agree(group: Group) -> None:
    """All members hold the same bits, and no number is off by more than its format's rounding."""
    for name, error in ROUNDING.items():
        for numel in NUMELS:
            inputs = [of_rank(r, numel, torch.float32) for r in range(group.size)]
            for op in ("sum", "avg"):
                result = group.all_reduce(inputs[group.rank].clone(), op, wire=name)
                _agreed(group, result)
                exact = torch.stack([x.double() for x in inputs]).sum(0)
                exact = exact / group.size if op == "avg" else exact
                most = max((float(x.abs().max()) for x in inputs if numel), default=0.0)
                # every host's sum is rounded once, and the sum of all once more if there are more
                # than two of them
                limit = most * group.size * (group.size + 1) * (error + 2**-22)
                assert float((result.double() - exact).abs().max() if numel else 0.0) <= limit


@needs("wires")
def residuals_are_added_later(group: Group) -> None:
    """With a lossy format, the mean over many starts of a request converges to the exact sum."""
    if not by_name("topk:0.25").lossy:
        return
    inputs = [of_rank(r, 5000, torch.float32) for r in range(group.size)]
    exact = torch.stack([x.double() for x in inputs]).sum(0)
    x = inputs[group.rank].clone()
    request = group.persistent("all_reduce", x, wire="topk:0.25")
    total = torch.zeros(5000, dtype=torch.float64)
    starts = 40
    for _ in range(starts):
        x.copy_(inputs[group.rank])
        request.start().wait()
        _agreed(group, x)
        total += x.double()
    # the remaining residual is a few times that of one start
    assert float((total / starts - exact).norm() / exact.norm()) < 8 / starts


@needs("wires")
def requests_over_hosts_start_in_any_order(group: Group) -> None:
    """Scaled requests, large and small, may start in another order on every rank."""
    sizes = (300_001, 7, 70_000)
    tensors = [torch.full((n,), float(group.rank + 1)) for n in sizes]
    requests = [group.persistent("all_reduce", x) for x in tensors]
    total = group.size * (group.size + 1) / 2
    for turn in range(3):
        order = [(i + group.rank + turn) % 3 for i in range(3)]
        works = [requests[i].start(scale=0.5) for i in order]
        for work in works:
            work.wait()
        for x in tensors:
            same(x, torch.full_like(x, total / 2))
            x.fill_(float(group.rank + 1))


HOST_CLAIMS: tuple[Claim, ...] = (
    hierarchical_sums_are_exact,
    relays_move_everything_once,
    averages_over_hosts_do_not_overflow_on_the_way,
    wires_round_and_agree,
    residuals_are_added_later,
    requests_over_hosts_start_in_any_order,
)
