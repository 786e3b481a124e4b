"""`braid probe`: measure the cost of messages on this machine, for simulations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from braid.errors import ConfigError, below, raise_all
from braid.runtime.option_types import Ranks, Text, shown_as

__all__ = ["ProbeOptions", "probe"]

# 64 KiB to 64 MiB; the time of smaller messages is mostly latency
SIZES = tuple(1 << power for power in range(16, 27, 2))
NETWORK_SIZES = tuple(1 << power for power in range(10, 25, 2))  # 1 KiB to 16 MiB


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeOptions:
    """Options of `braid probe`: ranks and number of rounds.

    Attributes:
        num_ranks: Number of ranks of this host, all sending at the same time.
        hosts: Measure between these hosts instead, such as a:2,b:2 for two ranks each; braid
            must be installed there.
        rsh: Command that runs a program on {host} (default: ssh without prompts).
        remote_python: Interpreter on the hosts (default: the path of this one).
        out: File that `braid schedule simulate --cluster` and `compare` read.
        rounds: Smallest number of turns through all sizes; results are medians over turns.
        no_pin: Do not pin each rank to the processors of one NUMA node.
        log_dir: Directory for the logs of the ranks.
    """

    num_ranks: Ranks = 2
    hosts: Annotated[str, shown_as("a:2,b:2", "-H")] = ""
    rsh: Text = ""
    remote_python: Text = ""
    out: str = "cluster.toml"
    rounds: int = 15
    no_pin: bool = False
    log_dir: str = "runs/probe"

    def __post_init__(self) -> None:
        problems = below(1, rounds=self.rounds)
        if not self.hosts:
            problems += below(2, **{"the number of ranks": self.num_ranks})
            if self.rsh:
                problems.append(f"--rsh {self.rsh} needs hosts: name them with -H")
        raise_all(problems)


def probe(options: Annotated[ProbeOptions, tyro.conf.arg(name="")]) -> int:
    """Measure latency and bandwidth between ranks, and write them as a cluster.

    Args:
        options: Ranks to measure between, and how long.
    """
    import msgspec
    from rich.console import Console

    from braid.cli.bench.harness.ranks import Where, figures_there, run_here
    from braid.cli.bench.probe import as_cluster
    from braid.cli.bench.workers.probe import Probed, ProbePlan, main
    from braid.programs.topology import to_toml

    sizes = NETWORK_SIZES if options.hosts else SIZES
    plan = ProbePlan(sizes=sizes, rounds=options.rounds, pin=not options.no_pin)
    log_dir = Path(options.log_dir, "run")
    log_dir.parent.mkdir(parents=True, exist_ok=True)
    between = f"ranks on {options.hosts}" if options.hosts else f"{options.num_ranks} ranks"
    with Console(stderr=True).status(f"sending messages between {between}"):
        if options.hosts:
            where = Where(hosts=options.hosts, rsh=options.rsh, remote_python=options.remote_python)
            (probed,) = figures_there(where, main, plan, Probed, log_dir=log_dir)
        else:
            lines: list[str] = []
            run_here(options.num_ranks, main, plan, on_line=lines.append, log_dir=log_dir)
            probed = msgspec.json.decode(lines[-1], type=Probed)
    cluster = as_cluster(probed)
    text = to_toml(cluster)
    try:
        Path(options.out).write_text(text, encoding="utf-8")
    except OSError as exc:
        msg = (
            f"{options.out} cannot be written: {exc}; choose another --out. The description of "
            f"the cluster is\n{text}"
        )
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
    print(f"cluster  {options.out}")
    return 0
