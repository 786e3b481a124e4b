"""Claims about the life of groups: they are divided, selected from, closed and aborted."""

from __future__ import annotations

import torch

from braid.comm import Group
from braid.errors import CommError, StaleError
from support.claims import Claim, same

__all__ = ["LIFE_CLAIMS"]


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


def many_groups_cost_little(group: Group) -> None:
    """Groups may be made and closed often, with their staging memory."""
    parts = [group.split(0) for _ in range(20)]
    for part in parts:
        assert part is not None
        part.all_reduce(torch.ones(20_000))
        part.close()
    group.barrier()


def closed_groups_raise(group: Group) -> None:
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


def aborted_groups_wake_their_members(group: Group) -> None:
    """Waiting members learn at once that and why their group was aborted."""
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


LIFE_CLAIMS: tuple[Claim, ...] = (
    groups_divide,
    selected_ranks_form_groups,
    many_groups_cost_little,
    closed_groups_raise,
    aborted_groups_wake_their_members,
)
