"""All ranks compare the arguments of a call before they act on it.

Ranks that make different groups wait for each other until a deadline, which names no cause. Here
they exchange their arguments first, through torch's store, and all raise the same error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch.distributed as dist

from braid.compat.megatron.failure import UsageError
from braid.store import exchange
from braid.store.torch_store import TorchStore
from braid.torch_internals import default_store

__all__ = ["check_alike"]

DEADLINE_S = 600.0  # ranks read their data sets before they make groups


def check_alike(call: str, arguments: Mapping[str, object]) -> None:
    """Raise UsageError on all ranks unless all have passed the same arguments.

    Args:
        call: Name of the function.
        arguments: Arguments by name; functions are compared by their names.

    Raises:
        UsageError: Some arguments differ; the message has their values and ranks.
        RanksMissingError: Some ranks did not call the function.
    """
    own = {name: getattr(value, "__qualname__", repr(value)) for name, value in arguments.items()}
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    store = TorchStore(default_store())
    number = store.add(f"braid/{call}/{rank}", 1)
    topic = f"{call}, call {number}"
    sent = json.dumps(own).encode()
    values = [
        json.loads(value)
        for value in exchange(store, topic, rank, ranks, sent, timeout_s=DEADLINE_S)
    ]
    problems = []
    for name in own:
        members: dict[str, list[int]] = {}
        for other, theirs in enumerate(values):
            members.setdefault(theirs[name], []).append(other)
        if len(members) > 1:
            each = (f"{v} on {_ranks(own)}" for v, own in members.items())
            problems.append(f"{name} is {' and '.join(each)}")
    if problems:
        msg = f"{call} was called with different arguments: {'; '.join(problems)}. Pass the same"
        raise UsageError(msg)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
