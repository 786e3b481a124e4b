"""`make proof`, last part: measure what the README claims, and write it there.

What stands between marks in README.md (the demo's output, the error block, the figures) is replaced by what these
commands print and measure now, on this machine. A target that is missed fails the run, after the figures have been written.
"""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from braid.bench.comm import CommBench, CommReport, plot, run_comm
from braid.bench.faults import FaultReport, run_fault_trials
from braid.events import Recorder

ROOT = Path(__file__).parents[1]

# what the README shows of a run that fails
FAILING_JOB = """\
import torch
import braid


def load_shard(rank, step):
    if (rank, step) == (1, 213):
        raise FileNotFoundError("dataset file shard-7 is missing")
    return torch.randn(4, 8)


group = braid.init()
model = braid.DistributedDataParallel(torch.nn.Linear(8, 1), process_group=group)
for step in range(1000):
    with group.context.events.span("step", seq=step):
        loss = model(load_shard(group.rank, step)).square().mean()
        with group.context.events.span("backward"):
            loss.backward()
"""

NUM_TRIALS, SEED = 50, 2026


def main() -> int:
    comm = run_comm(CommBench(rounds=7, out=ROOT / "runs" / "proof-comm"))
    plot(comm, ROOT / "docs" / "comm.png")
    faults = run_fault_trials(
        NUM_TRIALS, SEED, ROOT / "tests" / "world" / "comm_fault_job.py", stopped_limit_s=1.0
    )
    import_ms, event_us = import_time_ms(), event_cost_us()
    demo, demo_s = run_demo()
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
            f"| left behind by them | {', '.join(f'{n} {what}' for what, n in faults.left_behind.items())} |",
            f"| death by signal known to the survivors | {milliseconds(faults.survived_s)} |",
            f"| death by signal known to the launcher | {milliseconds(faults.noticed_s)} |",
            f"| `braid demo`, from the command to its end | {demo_s:.0f} s |",
            f"| `import braid` on top of `import torch` | {import_ms:.1f} ms |",
            f"| one recorded span, begin and end | {event_us:.1f} us |",
        ]
    )
    replace_section("figures", figures)
    replace_section("demo", f"```console\n$ make demo\n{demo}\n```")
    replace_section("failure", f"```\n{run_failing_job()}\n```")
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
        ("left behind", sum(faults.left_behind.values()), 0),
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


def run_demo() -> tuple[str, float]:
    """What it prints, less the lines of progress, and how long it takes."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "braid", "demo"],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    elapsed_s = time.perf_counter() - start
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    shown = [
        line for line in lines if not line.startswith("      step") and not line.endswith(" ...")
    ]
    return "\n".join(shown), elapsed_s


def run_failing_job() -> str:
    """The error block of a job whose rank 1 misses a file."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "train.py").write_text(FAILING_JOB)
        command = [
            sys.executable,
            "-m",
            "braid",
            "run",
            "-n",
            "4",
            "--log-dir",
            "runs/a3f",
            "train.py",
        ]
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=directory)
    return done.stderr[done.stderr.rindex("braid: run stopped") :].strip()


def replace_section(name: str, text: str) -> None:
    """Put `text` between the marks of a section of the README."""
    readme = ROOT / "README.md"
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = readme.read_text().partition(begin)
    _, _, after = rest.partition(end)
    readme.write_text(f"{before}{begin}\n{text}\n{end}{after}")


if __name__ == "__main__":
    sys.exit(main())
