"""Every collective once, each compared with the result that one process computes from all inputs.

braid run -n 2 examples/07_collectives.py
"""

import torch

import braid


def data_of(rank: int) -> torch.Tensor:
    """Return the input of a rank; every rank can compute the input of any rank."""
    return torch.randn(12, 3, generator=torch.Generator().manual_seed(rank))


group = braid.init()
rank, size, root = group.rank, group.size, 0
is_root = rank == root
everybody = [data_of(r) for r in range(size)]
x, total = everybody[rank], sum(everybody)  # collectives also add in the order of ranks


def mine(whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of dim 0."""
    return whole.chunk(size)[rank]


def passed_on() -> torch.Tensor:
    """Send to the next rank and receive from the previous one, at the same time."""
    got = torch.empty_like(x)
    with group.coalesce() as batch:
        batch.send(x, (rank + 1) % size)
        batch.recv(got, (rank - 1) % size)
    return got


results = {  # name -> result on this rank, expected result
    "broadcast": (group.broadcast(x.clone(), root), everybody[root]),
    "scatter": (
        group.scatter(x if is_root else None, root, out=torch.empty_like(mine(x))),
        mine(everybody[root]),
    ),
    "gather": (group.gather(x, root), torch.cat(everybody) if is_root else None),
    "all_gather": (group.all_gather(x), torch.cat(everybody)),
    "all_to_all": (group.all_to_all(x), torch.cat([mine(other) for other in everybody])),
    "reduce": (group.reduce(x.clone(), root), total if is_root else x),
    "all_reduce": (group.all_reduce(x.clone()), total),
    "reduce_scatter": (group.reduce_scatter(x), mine(total)),
    "scan": (group.scan(x), sum(everybody[: rank + 1])),
    "barrier": (group.barrier(), None),
    "send, recv": (passed_on(), everybody[rank - 1]),
}
whole = [numbers.mul(100).round() for numbers in everybody]  # exact in any order of additions
for algorithm in ("ring", "doubling", "halving_doubling", "tree", "naive"):
    results[f"all_reduce {algorithm}"] = (
        group.all_reduce(whole[rank].clone(), algorithm=algorithm),
        sum(whole),
    )

for name, (result, expected) in results.items():
    assert (result is expected is None) or torch.equal(result, expected), name
    if is_root:
        shape = "nothing" if result is None else f"{tuple(result.shape)}"
        print(f"{name:27} leaves rank 0 with {shape}")
if is_root:
    print(f"{len(results)} results equal one process, bit by bit")
