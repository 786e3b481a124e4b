"""`braid probe --gpus`: the GPUs of this host as a cluster: which are near each other, and what a copy between them costs.

One process copies; for every level the first two neighbours of its first unit stand for all. Where GPUs cannot reach each other, the
driver copies through the host's memory, and that is what is measured.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time

import torch

from braid.bench.probe import level_of
from braid.bench.workers.probe import SMALL_BYTES, Measured
from braid.errors import ConfigError
from braid.topology import Cluster, Rings, gpu_levels, parse_links

__all__ = ["probe_gpus"]

SIZES = tuple(1 << power for power in range(16, 29, 3))  # 64 KiB to 256 MiB
LIMIT_S = 30.0


def probe_gpus(rounds: int) -> Cluster:
    """Measure copies between GPUs.

    Args:
        rounds: Of each size; medians count.

    Raises:
        ConfigError: There are not two GPUs, or nvidia-smi does not say how they are joined.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        msg = f"expected 2 GPUs or more that torch {torch.__version__} can use, found {count}"
        raise ConfigError(msg)
    found = [_measure(level, rounds) for level in gpu_levels(parse_links(_said(), count=count))]
    return Cluster([level_of(level) for level in found])


def _said() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        msg = "expected nvidia-smi, which knows how GPUs are joined, found none: install the driver's tools"
        raise ConfigError(msg)
    done = subprocess.run(
        [program, "topo", "-m"], capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    if done.returncode:
        msg = f"expected the matrix of nvidia-smi topo -m, found exit code {done.returncode}: {done.stderr.strip()}"
        raise ConfigError(msg)
    return done.stdout


def _measure(level: Rings, rounds: int) -> Measured:
    first, second = (torch.device("cuda", gpu) for gpu in level.rings[0][:2])
    seconds, both_s = {}, 0.0
    for size in (SMALL_BYTES, *SIZES):
        pair = [torch.zeros(size // 4, device=device) for device in (first, second)]
        back = [torch.empty_like(tensor) for tensor in reversed(pair)]
        seconds[size] = _median_s(rounds, [(back[0], pair[0])])
        both_s = _median_s(rounds, list(zip(back, pair, strict=True)))
    return Measured(
        name=level.name,
        size=level.size,
        latency_s=seconds.pop(SMALL_BYTES),
        seconds=seconds,
        both_ways_s=both_s,
    )


def _median_s(rounds: int, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Seconds until all copies, (to, from), are done; the first round is not counted."""
    streams = [torch.cuda.Stream(device=source.device) for _, source in copies]  # type: ignore[no-untyped-call]  # torch's own
    times = []
    for _ in range(rounds + 1):
        for stream in streams:
            stream.synchronize()
        start = time.perf_counter()
        for stream, (target, source) in zip(streams, copies, strict=True):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        for stream in streams:
            stream.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
