"""Hosts with a network on one machine: network namespaces connected by a bridge.

Problem: the cost of a collective over a network can be measured only on a network, and two machines
with an idle network are rare. Loopback has no rate limit and hardly any latency.

Idea: the kernel has all parts. Each namespace is a host with a network interface; a veth pair is
its cable; a bridge is the switch; and a token bucket at both ends of each cable limits the rate,
including frame headers:

    host a   eth0 ==[tbf]==> port a  |        |  port b ==[tbf]==> eth0   host b
             eth0 <==[tbf]== port a  | bridge |  port b <==[tbf]== eth0

The bucket holds a millisecond of the link: on a busy machine the kernel fills it late, and a
smaller one would not reach the rate. So data sent after a pause is faster than the link for one
millisecond. To time less than some megabytes, empty the bucket first. Latency includes only the
kernel's, without cables and switches; congestion control is "reno", independent of the machine's
default.

Source: tc-tbf(8), ip-netns(8).
"""

from __future__ import annotations

import os
import re
import shutil
import string
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

import psutil

from braid.cli.bench.harness.ranks import Where
from braid.errors import ConfigError

__all__ = ["Lab", "abandoned", "bucket_bytes", "cabling", "what_is_missing"]

HOSTS = string.ascii_lowercase
BUCKET_S = 1e-3
LEAST_BUCKET_BYTES = 16 << 10
# available in every kernel; other algorithms pace packets by their estimate of the rate
CONGESTION_CONTROL = "reno"
QUEUE = "20ms"  # packets that wait longer at a link are dropped
LIMIT_S = 30.0

Words = tuple[str, ...]


class Lab:
    """Hosts a, b, ... with addresses 10.77.0.1, .2, ... at links of one rate; a context manager.

    Args:
        num_hosts: Number of hosts, up to 26.
        bits_per_s: Rate of each host's link in each direction; unlimited when 0.

    Raises:
        ConfigError: Namespaces cannot be created here, with the reason (on entering).
    """

    def __init__(self, num_hosts: int, bits_per_s: float) -> None:
        if not 1 <= num_hosts <= len(HOSTS) or bits_per_s < 0:
            msg = (
                f"a lab must have 1 to {len(HOSTS)} hosts and a rate, got {num_hosts} hosts at "
                f"{bits_per_s:g} bit/s"
            )
            raise ConfigError(msg)
        self.hosts = tuple(HOSTS[:num_hosts])
        self._bits_per_s = bits_per_s
        self._tag = f"bn{os.getpid()}"
        self._undo = ExitStack()

    def where(self, ranks_per_host: int = 1) -> Where:
        """Return the hosts and commands for ranks; the launcher is on the first host."""
        return Where(
            hosts=",".join(f"{host}:{ranks_per_host}" for host in self.hosts),
            rsh=f"ip netns exec {self._tag}{{host}}",
            inside=("ip", "netns", "exec", f"{self._tag}{self.hosts[0]}"),
        )

    def __enter__(self) -> Lab:
        missing = what_is_missing()
        if missing:
            raise ConfigError(missing)
        for command in abandoned(_output("ip", "netns", "list"), psutil.pid_exists):
            _attempt(command)
        with ExitStack() as undo:
            for make, unmake in cabling(self._tag, self.hosts, self._bits_per_s):
                if unmake:  # registered first, since an interrupted command may have taken effect
                    undo.callback(_attempt, unmake)
                _do(make)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._undo.close()


def cabling(tag: str, hosts: Sequence[str], bits_per_s: float) -> list[tuple[Words, Words]]:
    """Return the commands that create a lab, each with the command that undoes it.

    Args:
        tag: Prefix of all names, at most 13 characters.
        hosts: Letter of each host.
        bits_per_s: Rate of each link; unlimited when 0.
    """
    commands: list[tuple[Words, Words]] = []

    def add(text: str, undo: str = "") -> None:
        commands.append((tuple(text.split()), tuple(undo.split())))

    add(f"ip link add {tag} type bridge", f"ip link del {tag}")
    add(f"ip link set {tag} up")
    for number, host in enumerate(hosts, 1):
        name, port = tag + host, f"{tag}p{host}"
        add(f"ip netns add {name}", f"ip netns del {name}")
        # a namespace disappears some time after its name, a cable immediately
        add(f"ip link add {port} type veth peer name eth0 netns {name}", f"ip link del {port}")
        add(f"ip link set {port} master {tag} up")
        add(f"ip -n {name} addr add 10.77.0.{number}/24 dev eth0")
        add(f"ip -n {name} link set eth0 up")
        add(f"ip -n {name} link set lo up")
        add(f"ip netns exec {name} sysctl -qw net.ipv4.tcp_congestion_control={CONGESTION_CONTROL}")
        if bits_per_s:
            limit = (
                f"tbf rate {round(bits_per_s)}bit burst {bucket_bytes(bits_per_s)}b latency {QUEUE}"
            )
            add(f"tc -n {name} qdisc add dev eth0 root {limit}")
            add(f"tc qdisc add dev {port} root {limit}")
    return commands


def bucket_bytes(bits_per_s: float) -> int:
    """Return the number of bytes that an idle link transfers without the rate limit."""
    return max(LEAST_BUCKET_BYTES, round(bits_per_s / 8 * BUCKET_S))


def abandoned(listed: str, exists: Callable[[int], bool]) -> list[Words]:
    """Return the commands that remove labs of killed processes.

    Args:
        listed: Output of `ip netns list`.
        exists: Function that returns whether a process id exists.
    """
    commands: dict[Words, None] = {}
    for name, pid, host in re.findall(r"^(bn(\d+)([a-z]))\b", listed, re.MULTILINE):
        if not exists(int(pid)):
            commands["ip", "netns", "del", name] = None
            commands["ip", "link", "del", f"bn{pid}p{host}"] = None
            commands["ip", "link", "del", f"bn{pid}"] = None
    return list(commands)


def what_is_missing() -> str:
    """Return why a lab cannot be created on this machine; empty if it can."""
    if os.geteuid() != 0:
        return (
            f"only root may make network namespaces, and this is user {os.geteuid()}: use "
            "sudo, or name real hosts with --hosts"
        )
    absent = [name for name in ("ip", "tc", "sysctl") if shutil.which(name) is None]
    if absent:
        return (
            "network namespaces need the commands ip, tc and sysctl, and there is no "
            f"{' and no '.join(absent)}: install iproute2 and procps, or name real hosts with "
            "--hosts"
        )
    return ""


def _do(words: Words) -> None:
    result = subprocess.run(words, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if result.returncode:
        msg = (
            f"cannot create network namespaces here: `{' '.join(words)}` failed with "
            f"{result.stderr.strip()!r}"
        )
        raise ConfigError(msg)


def _attempt(words: Words) -> None:
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(words, capture_output=True, check=False, timeout=LIMIT_S)


def _output(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout
