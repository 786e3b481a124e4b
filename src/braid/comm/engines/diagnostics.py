"""Error messages for ranks that call different operations, or that do not arrive.

The texts are made from data that members have published in shared memory: their last lines and name
tables. So no rank has to cooperate: the last call of a stuck or dead rank is readable as well.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from braid.comm.channel.channel import Channel, Entry
from braid.comm.channel.control_pages import ControlPages
from braid.errors import ConfigError

__all__ = [
    "MemberOperation",
    "asked",
    "device_timeout_text",
    "mismatch_table",
    "shared_gpu_error",
    "timeout_text",
]

DUPLICATE = re.compile(
    r"Duplicate GPU detected ?: rank (\d+) and rank (\d+) both on CUDA device (\w+)"
)


class MemberOperation(NamedTuple):
    """Description of the operation that a member of a group has called.

    Attributes:
        rank: Number of the rank, as the launcher prints it.
        text: Operation, such as `all_reduce(float32[4], sum)`; empty if the member has not come.
        site: Call site, may be empty.
    """

    rank: int
    text: str
    site: str


def asked(pages: ControlPages, member: int, entry: Entry) -> MemberOperation:
    """Return the operation that `member` has published in `entry`."""
    return MemberOperation(
        pages.numbers[member],
        pages.text_of(member, entry.digest) if entry.digest else "",
        pages.text_of(member, entry.site) if entry.site else "",
    )


def mismatch_table(answers: Sequence[MemberOperation], *, step: int) -> str:
    """Return the message of a MismatchError: a table of operations by rank, minority marked.

    >>> calls = [MemberOperation(0, "barrier(x)", ""), MemberOperation(1, "broadcast(x)", "")]
    >>> print(mismatch_table(calls, step=3))
    ranks asked for different operations (step 3 of this channel):
      rank 0  barrier(x)
      rank 1  broadcast(x)
    make all ranks call the same collectives, with the same shapes and dtypes, in the same order
    """
    texts = Counter(answer.text for answer in answers)
    usual, count = texts.most_common(1)[0]
    clear = count > len(answers) - count  # in a tie, no rank is marked
    width = max(len(answer.text or "has not come") for answer in answers)
    lines = [f"ranks asked for different operations (step {step} of this channel):"]
    for answer in answers:
        where = f"  at {answer.site}" if answer.site else ""
        mark = "   <-- differs" if clear and answer.text != usual else ""
        text = answer.text or "has not come"
        lines.append(f"  rank {answer.rank}  {text:<{width}}{where}{mark}".rstrip())
    lines.append(
        "make all ranks call the same collectives, with the same shapes and dtypes, in the same "
        "order"
    )
    return "\n".join(lines)


def device_timeout_text(
    pages: ControlPages, operation: str, timeout_s: float, device: object
) -> str:
    """Return the message of a CommTimeout for a copy that the GPU has not reached."""
    return (
        f"{operation} did not end within {timeout_s:g} s: rank {pages.numbers[pages.rank]} still "
        f"waits for work that was queued earlier on {device}: a kernel there has not ended. Look "
        "for an endless loop in a kernel, or raise timeout_s"
    )


def timeout_text(
    pages: ControlPages, channel: Channel, operation: str, timeout_s: float, awaited: Sequence[int]
) -> str:
    """Return the message of a CommTimeout: the missing ranks and the last call of each.

    Args:
        pages: Control pages of the group.
        channel: Channel of the operation.
        operation: Description of the operation.
        timeout_s: Deadline of the operation in seconds.
        awaited: Members that the operation waits for; for a message, the only members involved.
    """
    heading = (
        f"{operation} did not end within {timeout_s:g} s: rank {pages.numbers[pages.rank]} still "
        "waits for"
    )
    if pages.carries_messages(channel.index):
        return "\n".join([heading, *_unfinished_messages(pages, channel, awaited)])
    lines = [heading]
    for member in channel.peers:
        counter = channel.counter(member)
        if counter >= channel.value:
            continue
        last = asked(pages, member, channel.entry(member, counter)) if counter else None
        what = (
            f"last in {last.text} {last.site}".rstrip() if last else "has not called anything here"
        )
        behind = channel.value - counter
        lines.append(f"  rank {pages.numbers[member]}  {behind} step(s) behind, {what}")
    lines.append(
        "check where those ranks are (out of data, in another branch, stopped?), or raise timeout_s"
    )
    return "\n".join(lines)


def _unfinished_messages(
    pages: ControlPages, channel: Channel, awaited: Sequence[int]
) -> list[str]:
    lines = []
    for member in awaited:
        if channel.index == pages.sending_index(pages.rank):  # messages to this rank
            counter = channel.counter(member)
            last = asked(pages, member, channel.entry(member, counter)) if counter else None
            what = f"last sent {last.text} {last.site}" if last else "has not sent anything here"
        else:
            what = "has not received it"
        lines.append(f"  rank {pages.numbers[member]}  {what}".rstrip())
    lines.append(
        "check where those ranks are, whether both ends use the same tag and group, or raise "
        "timeout_s"
    )
    return lines


def shared_gpu_error(text: str, ranks: Sequence[int]) -> ConfigError | None:
    """Return an error that names the ranks that share a GPU; None for other texts.

    NCCL fails at the first collective of such ranks with "invalid usage", and the PCI bus of the
    GPU in the last line of its text.

    Args:
        text: Text of an exception from NCCL.
        ranks: Global ranks of the members of its group.
    """
    match = DUPLICATE.search(text)
    if match is None:
        return None
    first, second = sorted(ranks[int(member)] for member in match.groups()[:2])
    msg = (
        f"ranks {first} and {second} are both on the GPU at PCI bus {match[3]}, and NCCL needs a "
        "GPU for each rank: call torch.cuda.set_device(local_rank) before the first operation. "
        "Ranks that must share a GPU can use the group of braid.init() without NCCL, which copies "
        "their tensors through page-locked memory"
    )
    return ConfigError(msg)
