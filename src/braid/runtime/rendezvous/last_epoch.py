"""Agreement of an elastic run's members on a last epoch, when their launcher is gone.

Problem: only the launcher begins epochs. When its host dies, the members on other hosts have the
state of the training, and part of it may be on one of them only. Without a common epoch they cannot
save it, and the steps since the last checkpoint are lost.

Idea: all members see the directory of the checkpoints, so they meet in a file there. Each member
writes the number of steps in its state. When all other members have done so or are lost, or after
`MEET_S`, a member proposes an epoch of the members that have written. The first proposal is the
decision for all (`Store.compare_set`). These members save and end, since no launcher could stop
them.

Members that are cut off from a living launcher save in the same way. They do not train: they save a
step that all members of the last common epoch have agreed upon. So there is one history, unless
ranks keep their numbers of samples (`batch_per_rank`), and repeat this step on each side.
"""

from __future__ import annotations

import msgspec

from braid.errors import PeerLostError
from braid.runtime.clock import Clock
from braid.runtime.rendezvous.control import NewEpoch
from braid.runtime.store import Store

__all__ = ["agree_on_last_epoch"]

MEET_S = 10.0  # a third of the time that ranks without a launcher have to save
LOOK_S = 0.02  # pause between two looks into the file


def agree_on_last_epoch(
    store: Store, previous: NewEpoch, number: int, num_steps: int, lost: set[int], clock: Clock
) -> NewEpoch:
    """Agree with the other living members on the epoch after `previous`; each of them calls it.

    Args:
        store: Store of all members, for this agreement only.
        previous: Epoch that the members have left.
        number: Number of this process in `previous.members`.
        num_steps: Number of steps that the state of this process includes.
        lost: Numbers of members that this process knows to be lost.
        clock: Time source.

    Returns:
        The epoch, the same for all of its members.

    Raises:
        PeerLostError: The other members continue without this process, which has come too late.

    Cost: some operations of the store; `MEET_S` if the loss of a member was not noticed.
    """
    store.compare_set(str(number), b"", str(num_steps).encode())
    deadline_ns = clock.after_ns(MEET_S)
    while True:
        arrived = [m for m in previous.members if store.check([str(m)])]
        if lost >= set(previous.members).difference(arrived) or clock.now_ns() >= deadline_ns:
            break
        clock.sleep(LOOK_S)
    steps = store.multi_get([str(member) for member in arrived])
    epoch = NewEpoch(previous.epoch + 1, tuple(arrived), tuple(map(int, steps)))
    decided = store.compare_set("decision", b"", msgspec.json.encode(epoch))
    epoch = msgspec.json.decode(decided, type=NewEpoch)
    if number not in epoch.members:
        msg = f"the launcher is gone, and ranks {list(epoch.members)} save without this rank"
        raise PeerLostError(msg, rank=number)
    return epoch
