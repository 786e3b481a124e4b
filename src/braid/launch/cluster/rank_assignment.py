"""Which hosts a job runs on, and which rank stands where.

Problem: mpirun, horovodrun and deepspeed each read host lists in a way of their own, and start on
what they understood of a
slip: a host that is named twice becomes two, a missing number becomes one. Idea: one small grammar,
everything that is wrong with it said at once, and ranks numbered host by host, so that neighbours
in rank are neighbours in memory.

    -H a:2,b:2            hostfile:  a slots=2      # a comment
                                     b slots=2      or  b:2
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from braid.errors import ConfigError

__all__ = ["Host", "Place", "assign", "parse_hostfile", "parse_hosts"]

# user@name, an IPv4 address, or an IPv6 address in brackets; never an option for the command that
# reaches it
NAME = re.compile(r"(?:[\w.+][\w.+-]*@)?(?:\[[0-9A-Fa-f:.%\w]+\]|\w[\w.-]*)", re.ASCII)
LINE = re.compile(r"(\S+)(?:\s+slots\s*=\s*(\S+))?", re.ASCII)
SLOTS = re.compile(r"[1-9][0-9]{0,3}", re.ASCII)


class Host(NamedTuple):
    """A machine, as the user names it.

    Attributes:
        name: As given to the command that reaches it.
        slots: How many ranks it may have.
    """

    name: str
    slots: int = 1

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


class Place(NamedTuple):
    """Where a rank stands.

    Attributes:
        rank: Global rank.
        node: Number of its host.
        local_rank: Rank among those of its host.
        local_world_size: Number of ranks of its host.
    """

    rank: int
    node: int
    local_rank: int
    local_world_size: int


def parse_hosts(text: str) -> tuple[Host, ...]:
    """The hosts of `a:2,b:2`; one slot where there is no number.

    Raises:
        ConfigError: An item that is empty or malformed, or a host that is named twice; the message
            lists all.
    """
    problems: list[str] = []
    hosts = [_item(item.strip(), f"-H {text}", problems) for item in text.split(",")]
    return _checked(hosts, problems)


def parse_hostfile(text: str, name: str = "hostfile") -> tuple[Host, ...]:
    """The hosts of a file with lines `a slots=2` or `a:2`; `#` begins a comment.

    Args:
        text: What the file holds.
        name: How errors call the file.

    Raises:
        ConfigError: A line that is malformed, a host that is named twice, or no host at all.
    """
    problems: list[str] = []
    hosts = []
    for number, raw in enumerate(text.splitlines(), 1):
        text, where = raw.partition("#")[0].strip(), f"{name}:{number}"
        line = LINE.fullmatch(text)
        if line is not None:
            hosts.append(_item(":".join(filter(None, line.groups())), where, problems))
        elif text:
            problems.append(f"{where}: {text!r} is no line such as `a slots=2`")
    if not hosts and not problems:
        problems.append(f"{name} names no host: write lines such as `a slots=2`")
    return _checked(hosts, problems)


def assign(hosts: Sequence[Host], num_ranks: int | None = None) -> tuple[Place, ...]:
    """Give ranks their places, host by host; hosts that get none are left out.

    Args:
        hosts: In order.
        num_ranks: Number of ranks; all slots when None.

    Raises:
        ConfigError: There are fewer slots than ranks.
    """
    slots = sum(host.slots for host in hosts)
    wanted = slots if num_ranks is None else num_ranks
    if not 1 <= wanted <= slots:
        listed = ",".join(map(str, hosts))
        msg = (
            f"expected 1 to {slots} ranks on {listed}, found -n {wanted}: name more hosts or slots"
        )
        raise ConfigError(msg)
    places: list[Place] = []
    for node, host in enumerate(hosts):
        size = min(host.slots, wanted - len(places))
        places += [Place(len(places) + local, node, local, size) for local in range(size)]
    return tuple(places)


def _item(item: str, where: str, problems: list[str]) -> Host:
    name, slots = item, "1"
    if ":" in item and not item.endswith("]"):
        name, _, slots = item.rpartition(":")
    if not item:
        problems.append(f"{where} has an empty item")
    elif NAME.fullmatch(name) is None:
        problems.append(f"{where}: {name!r} is no name of a host")
    elif SLOTS.fullmatch(slots) is None:
        problems.append(f"{where}: {name} has {slots!r} slots, expected a number from 1 to 9999")
    else:
        return Host(name, int(slots))
    return Host(name)


def _checked(hosts: Sequence[Host], problems: list[str]) -> tuple[Host, ...]:
    names = [host.name for host in hosts if host.name]
    twice = sorted({name for name in names if names.count(name) > 1})
    problems += [
        f"{name} is named {names.count(name)} times: give its slots once" for name in twice
    ]
    if problems:
        msg = f"expected hosts such as a:2,b:2, found: {'; '.join(problems)}"
        raise ConfigError(msg)
    return tuple(hosts)
