"""`braid probe`: measure the cost of messages on this machine, for simulations."""

from __future__ import annotations

from typing import Annotated

from braid.errors import ConfigError
from braid.runtime.option_types import Ranks, Text, shown_as

__all__ = ["probe"]


def probe(
    *,
    n: Ranks = 2,
    hosts: Annotated[str, shown_as("a:2,b:2", "-H")] = "",
    rsh: Text = "",
    remote_python: Text = "",
    out: str = "cluster.toml",
    rounds: int = 15,
    no_pin: bool = False,
    log_dir: str = "runs/probe",
) -> int:
    """Measure latency and bandwidth between ranks, and write them as a cluster.

    Args:
        n: Number of ranks of this host, all sending at the same time.
        hosts: Measure between these hosts instead, with so many ranks each; braid must be installed
            there.
        rsh: Command that reaches {host} (default: ssh without questions).
        remote_python: Interpreter on the hosts (default: the path of this one).
        out: File that `braid schedule simulate --cluster` and `compare` read.
        rounds: Least number of turns through all sizes; results are medians over them.
        no_pin: Let ranks run on any processor, rather than on those of one NUMA node each.
        log_dir: Directory for the logs of the ranks.
    """
    from pathlib import Path

    from braid.cli.bench.harness.ranks import Where
    from braid.cli.bench.probe import Probe
    from braid.cli.bench.probe import probe as measure
    from braid.programs.topology import to_toml

    where = Where(hosts=hosts, rsh=rsh, remote_python=remote_python) if hosts else None
    if rsh and not hosts:
        msg = f"--rsh {rsh} needs hosts: name them with -H"
        raise ConfigError(msg)
    wanted = Probe(ranks=n, rounds=rounds, where=where, pin=not no_pin, log_dir=Path(log_dir))
    cluster = measure(wanted)
    text = to_toml(cluster)
    try:
        Path(out).write_text(text, encoding="utf-8")
    except OSError as exc:
        msg = f"{out} cannot be written: {exc}; the cluster is\n{text}"
        raise ConfigError(msg) from exc
    for level in cluster.levels:
        ways = "each way" if level.full_duplex else "both ways together"
        print(
            f"{level.name} of {level.size}: latency {level.latency_s * 1e6:.1f} us; "
            f"bytes per second of a message by its size, {ways}:"
        )
        for nbytes, rate in level.by_size:
            print(f"  {nbytes / 1024:>8,.0f} KiB  {rate / 1e9:6.3f} GB/s")
        if level.burst_bytes:
            print(
                f"  after a rest {level.burst_bytes / 1024:,.0f} KiB beside its rate of "
                f"{level.bytes_per_s / 1e9:.3f} GB/s"
            )
    print(f"cluster  {out}")
    return 0
