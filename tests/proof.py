"""`make proof`, last part: measure what the README claims, and write it there.

Everything between the two marks in README.md is replaced by what was measured now, on this machine, by these
commands. A target that is missed fails the run, after the figures have been written.
"""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

from braid.bench.comm import CommBench, CommReport, plot, run_comm
from braid.bench.faults import FaultReport, run_fault_trials
from braid.events import Recorder

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
NUM_TRIALS, SEED = 50, 2026


def main() -> int:
    comm = run_comm(CommBench(rounds=7, out=ROOT / "runs" / "proof-comm"))
    plot(comm, ROOT / "docs" / "comm.png")
    faults = run_fault_trials(
        NUM_TRIALS, SEED, ROOT / "tests" / "world" / "comm_fault_job.py", stopped_limit_s=1.0
    )
    import_ms, event_us = import_time_ms(), event_cost_us()
    demo_s = demo_time_s()
    figures = "\n".join(
        [
            f"Measured on {comm.machine}, Python {platform.python_version()}, torch {comm.torch}, by `make proof`.",
            "",
            *comm_table(comm),
            "",
            (
                "Median microseconds of `Group` called directly, against Gloo through `torch.distributed`, both in the same "
                "two processes in alternating rounds (`braid bench comm`); `x` is the median ratio. Plot: "
                "[docs/comm.png](docs/comm.png)."
            ),
            "",
            "| what | measured |",
            "|---|---|",
            f"| seeded kills, stops, exceptions, exits in a {3}-rank training job: culprit right | {faults.correct} of {NUM_TRIALS} |",
            f"| processes left behind by them | {faults.orphans} |",
            f"| death by signal known to the survivors | {milliseconds(faults.survived_s)} |",
            f"| death by signal known to the launcher | {milliseconds(faults.noticed_s)} |",
            f"| `braid demo`, from the command to its end | {demo_s:.0f} s |",
            f"| `import braid` on top of `import torch` | {import_ms:.1f} ms |",
            f"| one recorded span, begin and end | {event_us:.1f} us |",
        ]
    )
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{BEGIN}\n{figures}\n{END}{after}")
    missed = targets_missed(comm, faults, import_ms, event_us, demo_s)
    for text in missed:
        print(f"missed: {text}", file=sys.stderr)
    print(figures)
    return 1 if missed else 0


def comm_table(report: CommReport) -> list[str]:
    lines = [
        "| operation | bytes | Gloo | braid | x | braid, registered | x |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in report.rows:
        size = f"{row.nbytes >> 10} KiB" if row.nbytes < 1 << 20 else f"{row.nbytes >> 20} MiB"
        cells = [row.operation, size if row.nbytes else "", f"{row.seconds['gloo'] * 1e6:,.0f}"]
        for name in ("braid", "registered"):
            known = name in row.seconds
            cells.append(f"{row.seconds[name] * 1e6:,.0f}" if known else "")
            cells.append(f"{row.ratio[name]:.1f}" if known else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def targets_missed(
    comm: CommReport, faults: FaultReport, import_ms: float, event_us: float, demo_s: float
) -> list[str]:
    ratios = {
        (row.nbytes, name): ratio
        for row in comm.rows
        if row.operation == "all_reduce"
        for name, ratio in row.ratio.items()
    }
    floors = {
        (1 << 10, "braid"): 5,
        (16 << 10, "braid"): 5,
        (256 << 10, "braid"): 2,
        (1 << 20, "braid"): 2,
        (4 << 20, "braid"): 2,
        (16 << 20, "braid"): 2,
        (1 << 20, "registered"): 6,
        (16 << 20, "registered"): 6,
    }
    missed = [
        f"all_reduce {key}: {ratios[key]:.1f} x Gloo, expected at least {floor}"
        for key, floor in floors.items()
        if ratios[key] < floor
    ]
    limits = [
        ("culprits wrong", NUM_TRIALS - faults.correct, 0),
        ("orphans", faults.orphans, 0),
        ("survivors know, median ms", faults.survived_s(0.5) * 1e3, 200),
        ("import ms", import_ms, 300),
        ("event us", event_us, 2),
        ("demo s", demo_s, 90),
    ]
    return missed + [
        f"{what}: {found:.1f}, at most {most}" for what, found, most in limits if not found <= most
    ]


def milliseconds(quantile) -> str:
    return f"median {quantile(0.5) * 1e3:.0f} ms, p95 {quantile(0.95) * 1e3:.0f} ms"


def import_time_ms() -> float:
    code = (
        "import time, torch; t = time.perf_counter(); import braid; "
        "braid.init, braid.DistributedDataParallel; print(time.perf_counter() - t)"
    )
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
        for _ in range(5)
    ]
    return statistics.median(times) * 1e3


def event_cost_us(count: int = 50_000) -> float:
    recorder = Recorder()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(count):
            with recorder.span("step", seq=1, nbytes=2):
                pass
        times.append((time.perf_counter() - start) / count)
    return statistics.median(times) * 1e6


def demo_time_s() -> float:
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "braid", "demo", "--log-dir", str(ROOT / "runs" / "proof-demo")],
        check=True,
        capture_output=True,
    )
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
