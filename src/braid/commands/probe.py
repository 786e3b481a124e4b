"""`braid probe`: measure what messages cost here, for simulations and plans."""

from __future__ import annotations

from typing import Annotated

import tyro

from braid.errors import ConfigError

__all__ = ["probe"]


def probe(
    *,
    n: Annotated[int, tyro.conf.arg(name="num-ranks", aliases=["-n"])] = 2,
    out: str = "cluster.toml",
    rounds: int = 15,
    log_dir: str = "runs/probe",
) -> int:
    """Measure latency and bandwidth between the ranks of this host, and write them as a cluster.

    Args:
        n: Number of ranks, all sending at the same time.
        out: File that `braid schedule simulate --cluster` and `compare` read.
        rounds: Of each size, at least; medians count.
        log_dir: Directory for the logs of the ranks.
    """
    from pathlib import Path

    from braid.bench.probe import Probe
    from braid.bench.probe import probe as measure
    from braid.topology import to_toml

    found = measure(Probe(ranks=n, rounds=rounds, log_dir=Path(log_dir)))
    text = to_toml(found)
    try:
        Path(out).write_text(text, encoding="utf-8")
    except OSError as exc:
        msg = f"expected a place to write to, found {out}: {exc}; the cluster is\n{text}"
        raise ConfigError(msg) from exc
    (host,) = found.levels
    print(f"latency {host.latency_s * 1e6:.1f} us; bytes per second of a message by its size:")
    for nbytes, rate in host.by_size:
        print(f"  {nbytes / 1024:>8,.0f} KiB  {rate / 1e9:6.2f} GB/s")
    print(f"cluster  {out}")
    return 0
