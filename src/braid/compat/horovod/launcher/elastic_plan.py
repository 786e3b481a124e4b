"""Conversion of horovodrun's elastic options to the limits of an elastic run. Pure.

    --min-np 2 --max-np 4 --host-discovery-script ./discover.sh      at least 2 ranks, at most 4
    --blacklist-cooldown-range 10 100                                host blocked 10 s, 20 s, ...

As in Horovod, the host of a rank that has died is blocked: permanently, or for the seconds of the
cool-down range. If it is the only host, only the slot of the rank is blocked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from braid.compat.horovod.launcher.flags import Flags
from braid.errors import ConfigError, raise_all
from braid.launch import Host
from braid.launch.process.job import MAX_RANKS, ElasticLimits

__all__ = [
    "FURTHER",
    "OPENING",
    "ElasticPlan",
    "elastic_plan",
    "hosts_of_script",
    "local_slots",
    "wants_elastic",
]

OPENING = ("min-np", "max-np", "host-discovery-script")
FURTHER = ("slots", "elastic-timeout", "reset-limit", "blacklist-cooldown-range")
LINE = re.compile(r"([\w.-]+|\[[\w.:%]+\])(?::([0-9]{1,4}))?", re.ASCII)
SCRIPT = "--host-discovery-script"
LOCALHOST = "localhost"


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticPlan:
    """Limits of an elastic job, and the slots (places) for its ranks.

    Attributes:
        num_ranks: Number of ranks to begin with.
        limits: Limits of the run.
        script: Program that lists hosts; empty for fixed slots.
        slots_per_host: Slots of a host that the script lists without a number; 0 to refuse this.
        cooldown_s: Seconds for which a host or slot is blocked after the first death of a rank, and
            the maximum; None to block it permanently.
        hosts: Hosts to begin with; empty if all ranks are on this host, without agents.
    """

    num_ranks: int
    limits: ElasticLimits
    script: str = ""
    slots_per_host: int = 0
    cooldown_s: tuple[float, float] | None = None
    hosts: tuple[Host, ...] = ()

    @property
    def options(self) -> tuple[str, ...]:
        """The limits as options of `braid run`."""
        values = {
            "--min-ranks": self.limits.min_ranks,
            "--restarts": self.limits.restarts,
        }
        return tuple(word for name, value in values.items() for word in (name, str(value)))


def wants_elastic(flags: Flags) -> bool:
    """Return whether the command line requests an elastic run.

    Raises:
        ConfigError: Options for elastic runs are used in a run with fixed ranks.
    """
    if any(name in flags.values for name in OPENING):
        return True
    further = [f"--{name}" for name in FURTHER if name in flags.values]
    if further:
        msg = f"{', '.join(further)} are for elastic runs only: add --min-np or {SCRIPT}"
        raise ConfigError(msg)
    return False


def elastic_plan(
    flags: Flags, hosts: Sequence[Host], is_here: Callable[[str], bool]
) -> ElasticPlan:
    """Return the options of an elastic job, whose ranks may leave and join.

    Args:
        flags: Options and command.
        hosts: Hosts from options or from the script.
        is_here: Function that returns whether a name is a name of this host.

    Raises:
        ConfigError: Values are invalid (all are named), or there are too few slots.
    """
    problems: list[str] = []
    num_ranks, least, most, per_host = (
        _count(flags, name, problems) for name in ("num-proc", "min-np", "max-np", "slots")
    )
    cooldown_s = _cooldown(flags, problems)
    script = flags["host-discovery-script"]
    at_first = (("--min-np", least), ("-np", 0 if hosts else num_ranks))
    problems += [
        f"{name} {count} is more than --max-np {most}: lower {name}, or raise --max-np"
        for name, count in at_first
        if 0 < most < count
    ]
    raise_all(problems)
    # hosts that a script lists later can only reach this host under a name for all
    is_local = all(host.name == LOCALHOST if script else is_here(host.name) for host in hosts)
    num_slots = sum(host.slots for host in hosts) if hosts else num_ranks or least or most
    is_open = bool(script or cooldown_s)
    least = least or num_ranks or 1
    most = most or (MAX_RANKS if script else num_slots)
    if num_slots < least:
        source = SCRIPT if script else "the list of hosts" if hosts else f"-np {num_ranks}"
        msg = (
            f"{source} gives {num_slots} slots{' on this host' * is_local}, but --min-np asks for "
            f"{least}: give more slots"
        )
        raise ConfigError(msg)
    limits = ElasticLimits(min_ranks=least, max_ranks=most, restarts=0, gains_slots=is_open)
    begin_with = min(num_slots, most) if hosts else num_ranks or least
    return ElasticPlan(
        num_ranks=begin_with,
        limits=limits,
        script=script,
        slots_per_host=per_host,
        cooldown_s=cooldown_s,
        hosts=() if is_local else tuple(host for host in hosts if host.slots),
    )


def hosts_of_script(text: str, slots_per_host: int) -> tuple[Host, ...]:
    """Parse the lines of a discovery script: `name:slots`, or `name`.

    Args:
        text: Output of the script.
        slots_per_host: Slots of a host that is listed without a number; 0 to refuse this.

    Raises:
        ConfigError: Lines have another form, or there are no lines.
    """
    hosts: dict[str, Host] = {}
    wrong = []
    for line in filter(None, map(str.strip, text.splitlines())):
        match = LINE.fullmatch(line)
        if match is None or (match[2] is None and not slots_per_host) or match[1] in hosts:
            wrong.append(repr(line[:60]))
            continue
        hosts[match[1]] = Host(match[1], int(match[2] or slots_per_host))
    if wrong:
        hint = "" if slots_per_host else " (or NAME, with --slots-per-host)"
        msg = f"{SCRIPT} must print lines NAME:SLOTS{hint}, each host once, got {wrong[0]}"
        if len(wrong) > 1:
            msg += f" and {len(wrong) - 1} more"
        raise ConfigError(msg)
    if not hosts:
        msg = f"{SCRIPT} has listed no host: print lines NAME:SLOTS"
        raise ConfigError(msg)
    return tuple(hosts.values())


def local_slots(hosts: Sequence[Host], is_here: Callable[[str], bool]) -> int:
    """Return the number of slots (places for ranks) on this host.

    Raises:
        ConfigError: Some hosts are not this host.
    """
    elsewhere = [host.name for host in hosts if host.slots and not is_here(host.name)]
    if elsewhere:
        msg = (
            f"the run has begun on {LOCALHOST} only: leave out {', '.join(elsewhere[:5])}, or list "
            "this host by its host name from the start"
        )
        raise ConfigError(msg)
    return sum(host.slots for host in hosts)


def _count(flags: Flags, name: str, problems: list[str]) -> int:
    text = flags[name]
    if not text:
        return 0
    if re.fullmatch(r"[0-9]{1,4}", text) and 1 <= int(text) <= MAX_RANKS:
        return int(text)
    problems.append(f"--{name} must be a whole number, 1 to {MAX_RANKS}, got {text!r}")
    return 0


def _cooldown(flags: Flags, problems: list[str]) -> tuple[float, float] | None:
    text = flags["blacklist-cooldown-range"]
    if not text:
        return None
    try:
        low, high = map(float, text.replace(",", " ").split())
    except ValueError:
        low, high = 0.0, 0.0
    if not 0 < low <= high < float("inf"):
        problems.append(
            f"--blacklist-cooldown-range must be two numbers of seconds above 0, the smaller one "
            f"first, got {text!r}"
        )
    return low, high
