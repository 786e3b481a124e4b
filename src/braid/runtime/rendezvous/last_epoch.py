"""Agreement of an elastic run's members on a last epoch, when their launcher is gone.

Problem: only the launcher begins epochs. When its host dies, the members on other hosts have the
state of the training, and part of it may be on one of them only. Without a common epoch they cannot
save it, and the steps since the last checkpoint are lost.

Idea: they all see the directory of the checkpoints, so they meet in a file there. Each member
writes the number of steps in its state. When each other member has done so, or is lost, or has not
come within `MEET_S`, a member proposes those that have come. The first proposal is the decision
for all (`Store.compare_set`). The members save and end, since no launcher could stop them.

Members that are cut off from a living launcher do the same. They save a step that all members of
the last common epoch have agreed upon, so there is one history.
"""

from __future__ import annotations

import msgspec

from braid.errors import PeerLostError
from braid.runtime.clock import Clock
from braid.runtime.rendezvous.control import NewEpoch
from braid.runtime.store import Store

__all__ = ["agree_on_last_epoch"]

MEET_S = 10.0  # a third of the time that ranks without a launcher have to save
LOOK_S = 0.02


def agree_on_last_epoch(
    store: Store, before: NewEpoch, number: int, num_steps: int, lost: set[int], clock: Clock
) -> NewEpoch:
    """Return the epoch after `before`; the members that live call it.

    Args:
        store: Store that all of them see.
        before: Epoch that they have left.
        number: Number of this process among its members.
        num_steps: Number of steps that the state of this process includes.
        lost: Numbers of members that this process knows to be lost.
        clock: Time source.

    Raises:
        PeerLostError: The other members go on without this process, which has come too late.
    """
    topic = f"last/{before.epoch + 1}"
    store.compare_set(f"{topic}/{number}", b"", str(num_steps).encode())
    deadline_ns = clock.after_ns(MEET_S)
    while True:
        arrived = [m for m in before.members if store.check([f"{topic}/{m}"])]
        if lost >= set(before.members).difference(arrived) or clock.now_ns() >= deadline_ns:
            break
        clock.sleep(LOOK_S)
    steps = store.multi_get([f"{topic}/{member}" for member in arrived])
    epoch = NewEpoch(before.epoch + 1, tuple(arrived), tuple(map(int, steps)))
    decided = store.compare_set(f"{topic}/decision", b"", msgspec.json.encode(epoch))
    epoch = msgspec.json.decode(decided, type=NewEpoch)
    if number not in epoch.members:
        msg = f"the launcher is gone, and ranks {list(epoch.members)} have saved without this rank"
        raise PeerLostError(msg, rank=number)
    return epoch
