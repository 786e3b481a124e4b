"""Claims about messages between two members of a group, and about objects."""

from __future__ import annotations

import torch

from braid.comm import Group
from braid.errors import ConfigError, MismatchError
from support.claims import Claim, needs, of_rank, same

__all__ = ["MESSAGE_CLAIMS"]


def messages_keep_their_order(group: Group) -> None:
    """Messages around the ring keep their order: small, empty, large, several at once."""
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


def tags_separate_messages(group: Group) -> None:
    """Messages with different tags may be received in another order; those of one tag keep it."""
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
    """A receive from any source gets one message of each sender, and names the sender."""
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
    """A message of another shape raises on the receiver, and at the sender's next communication."""
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


def objects_travel_as_they_are(group: Group) -> None:
    """Plain data keeps its types; anything else is refused by name, or pickled on demand."""
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
        for part in ("complex", "['model'][0]", "allow_pickle"):
            assert part in str(error), error  # noqa: PT017 - not a pytest module
    else:
        raise AssertionError
    assert objects.all_gather(complex(me, 1), allow_pickle=True)[-1] == complex(n - 1, 1)
    group.barrier()


MESSAGE_CLAIMS: tuple[Claim, ...] = (
    messages_keep_their_order,
    tags_separate_messages,
    whoever_sends_first_is_received,
    messages_must_fit,
    objects_travel_as_they_are,
)
