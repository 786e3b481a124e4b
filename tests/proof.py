"""`make proof`, last part: measures what README.md and docs/figures.md claim, and writes it there.

What stands between marks (the demo's output and the error blocks in README.md, the tables in docs/figures.md) is replaced by what these
commands print and measure now, on this machine. A target that is missed fails the run, after the figures have been written.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.faults import FaultReport, run_fault_trials
from benchmarks.hooks import BENCH as HOOKS_BENCH
from benchmarks.hooks import HooksBench, HooksReport, hooks_verdicts
from benchmarks.horovod import BENCH as HOROVOD_BENCH
from benchmarks.horovod import FusionBench, fusion_verdicts
from benchmarks.lab import what_is_missing
from benchmarks.messages import BENCH as MESSAGES_BENCH
from benchmarks.messages import MessageBench, message_verdicts
from benchmarks.model import BENCH as MODEL_BENCH
from benchmarks.model import ModelBench, ModelReport, verdicts
from benchmarks.net import BENCH as NET_BENCH
from benchmarks.net import LARGE_BYTES, NetBench, NetReport, targets
from benchmarks.pipeline import BENCH as PIPELINE_BENCH
from benchmarks.pipeline import PipelineBench, pipeline_verdicts
from benchmarks.ps import BENCH as PS_BENCH
from benchmarks.ps import PsBench, ps_verdicts
from benchmarks.rpc import BENCH as RPC_BENCH
from benchmarks.rpc import RpcBench, rpc_verdicts
from benchmarks.tp import BENCH as TP_BENCH
from benchmarks.tp import TpBench, tp_verdicts
from benchmarks.zero import BENCH as ZERO_BENCH
from benchmarks.zero import ZeroBench, zero_verdicts
from braid.cli.bench.comm import BENCH as COMM_BENCH
from braid.cli.bench.comm import CommBench, CommReport, plot
from braid.cli.bench.ddp import (
    BENCH as DDP_BENCH,
)
from braid.cli.bench.ddp import (
    CASES,
    HEADINGS,
    DdpBench,
    DdpReport,
    ddp_lines,
    ddp_verdicts,
    share_text,
)
from braid.cli.bench.harness.report import BenchVerdict, Report
from braid.cli.bench.workers.comm import Row
from braid.runtime.events import Recorder
from braid.runtime.text import bytes_text

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures.md"

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

# what the README shows of a run that stands still
HANGING_JOB = """\
import time
import torch
import braid


def load_shard(rank, step):
    if (rank, step) == (1, 88):
        time.sleep(14)  # an archive on a slow disk
    return torch.randn(4, 8)


group = braid.init()
model = braid.DistributedDataParallel(torch.nn.Linear(8, 1), process_group=group)
for step in range(100):
    with group.context.events.span("step", seq=step):
        loss = model(load_shard(group.rank, step)).square().mean()
        loss.backward()
"""

NUM_TRIALS, SEED = 50, 2026
KIB, MIB = 1 << 10, 1 << 20
SIZES = (KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 32 * MIB, 64 * MIB)
SHOWN = (KIB, MIB, 16 * MIB)

# least speed-up over Gloo: (operation, bytes, library) -> times
FLOORS = {
    ("all_reduce", KIB, "braid"): 8,
    ("all_reduce", 16 * KIB, "braid"): 5,
    ("all_reduce", 256 * KIB, "braid"): 4,
    ("all_reduce", 256 * KIB, "registered"): 10,
    ("all_reduce", MIB, "braid"): 2.5,
    ("all_reduce", MIB, "registered"): 6,
    ("all_reduce", 4 * MIB, "braid"): 2.5,
    ("all_reduce", 4 * MIB, "registered"): 6,
    ("all_reduce", 16 * MIB, "braid"): 4,
    ("all_reduce", 16 * MIB, "registered"): 8,
    ("all_reduce", 64 * MIB, "braid"): 2.3,
    ("all_reduce", 64 * MIB, "registered"): 4,
    ("all_gather", 32 * MIB, "braid"): 6,  # 16 MiB of each rank
    ("reduce_scatter", 32 * MIB, "braid"): 6,
    ("broadcast", 16 * MIB, "braid"): 2.5,
    ("broadcast", 16 * MIB, "torch"): 3,
    ("all_to_all", 16 * MIB, "braid"): 2.5,
    ("send_recv", 16 * MIB, "braid"): 2.5,
}
# likewise over MPI, where it is installed, of all_reduce
FLOORS_OVER_MPI = {
    (4 * MIB, "braid"): 0.7,
    (4 * MIB, "registered"): 2,
    (16 * MIB, "braid"): 0.7,
    (16 * MIB, "registered"): 2,
}


def main(parts: Sequence[str]) -> int:
    """Measure the parts that are named, or all."""
    known = {
        "figures": host_proof,
        "training": training_proof,
        "busy": busy_proof,
        "hooks": hooks_proof,
        "horovod": horovod_proof,
        "pipeline": pipeline_proof,
        "zero": zero_proof,
        "messages": messages_proof,
        "rpc": rpc_proof,
        "ps": ps_proof,
        "network": network_proof,
    }
    by_name = {**known, "tp": tp_proof}  # whose models are in the environment of `make frameworks`
    commit = commit_of_tree()
    missed = [text for name in parts or known for text in by_name[name](commit)]
    for text in missed:
        print(f"missed: {text}", file=sys.stderr)
    return 1 if missed else 0


def training_proof(commit: str) -> list[str]:
    """Data parallel training on this host."""
    ddp = DDP_BENCH.measure(DdpBench(rounds=200, budget_s=120.0, out=ROOT / "runs" / "proof-ddp"))
    told = [
        f"Measured on {ddp.machine}, torch {ddp.torch}, by `make proof`, on commit {commit}; `braid bench ddp` does the same.",
        "",
        *ddp_table(ddp),
        "",
        (
            "Data parallel training on two ranks: median times of a step. Exposed communication is the time by which a mean step is longer "
            "than a step with torch's DDP sending nothing. In brackets: the 5th and 95th percentile of the share over resampled rounds."
        ),
        "",
        *(f"* {line}" for line in ddp_lines(ddp)),
    ]
    replace_section("training", "\n".join(told), FIGURES)
    return missed(ddp_verdicts(ddp))


def hooks_proof(commit: str) -> list[str]:
    """Communication hooks over a slow network."""
    reason = what_is_missing()
    if reason:
        print(f"figures of hooks are left as they are: {reason}", file=sys.stderr)
        return []
    hooks = HOOKS_BENCH.measure(HooksBench(out=ROOT / "runs" / "proof-hooks"))
    replace_section(
        "hooks", "\n".join(hooks_section(hooks, commit)), ROOT / "docs" / "slow-networks.md"
    )
    told = [
        f"Over a slow network, by communication hook ([slow networks](slow-networks.md), on commit {commit}):",
        "",
        *(f"* {line}" for line in hooks_verdicts(hooks)),
    ]
    replace_section("hooks", "\n".join(told), FIGURES)
    return missed(hooks_verdicts(hooks))


def busy_proof(commit: str) -> list[str]:
    """Data parallel training while others compute, too: steps differ much, so it takes many of them."""
    bench = DdpBench(
        cases=CASES[:3], rounds=400, budget_s=600.0, busy=1, out=ROOT / "runs" / "proof-ddp-busy"
    )
    lines = ddp_verdicts(DDP_BENCH.measure(bench))
    told = [
        f"While another process computes on one of the two cores (`braid bench ddp --busy 1`, on commit {commit}):",
        "",
        *(f"* {line}" for line in lines),
    ]
    replace_section("busy", "\n".join(told), FIGURES)
    return missed(lines)


def horovod_proof(commit: str) -> list[str]:
    """The negotiated engine, beside Gloo and beside our own wrapper."""
    report = HOROVOD_BENCH.measure(FusionBench(out=ROOT / "runs" / "proof-horovod"))
    told = [
        f"Measured on {report.machine}, torch {report.torch}, {report.ranks} ranks, by `make proof`, on commit {commit}; `python -m benchmarks horovod` does the same.",
        "",
        *(f"* {line}" for line in fusion_verdicts(report)),
    ]
    replace_section("horovod", "\n".join(told), ROOT / "docs" / "from-horovod.md")
    return missed(fusion_verdicts(report))


def pipeline_proof(commit: str) -> list[str]:
    """Pipelines, beside torch's and beside their own formulas."""
    report = PIPELINE_BENCH.measure(PipelineBench(out=ROOT / "runs" / "proof-pipeline"))
    return targets_of(
        "pipeline", "python -m benchmarks pipeline", report, pipeline_verdicts(report), commit
    )


def zero_proof(commit: str) -> list[str]:
    """Sharding, beside FSDP2 and beside its formulas, and saves behind a training."""
    report = ZERO_BENCH.measure(ZeroBench(out=ROOT / "runs" / "proof-zero"))
    return targets_of("zero", "python -m benchmarks zero", report, zero_verdicts(report), commit)


def messages_proof(commit: str) -> list[str]:
    """Messages of each path."""
    report = MESSAGES_BENCH.measure(MessageBench(out=ROOT / "runs" / "proof-messages"))
    command = "python -m benchmarks messages"
    return targets_of("messages", command, report, list(message_verdicts(report)), commit)


def rpc_proof(commit: str) -> list[str]:
    """Remote calls, beside torch's RPC."""
    report = RPC_BENCH.measure(RpcBench(out=ROOT / "runs" / "proof-rpc"))
    return targets_of("rpc", "python -m benchmarks rpc", report, list(rpc_verdicts(report)), commit)


def ps_proof(commit: str) -> list[str]:
    """A parameter server, beside sockets, torch's RPC and an all-reduce; a hundred servers are killed."""
    report = PS_BENCH.measure(PsBench(rounds=24, kills=100, out=ROOT / "runs" / "proof-ps"))
    return targets_of(
        "ps", "python -m benchmarks ps --kills 100", report, ps_verdicts(report), commit
    )


def tp_proof(commit: str) -> list[str]:
    """Tensor parallelism, beside transformers' own plan and torch's."""
    report = TP_BENCH.measure(TpBench(out=ROOT / "runs" / "proof-tp"))
    return targets_of("tp", "python -m benchmarks tp", report, tp_verdicts(report), commit)


def targets_of(
    name: str, command: str, report: Report, verdicts: Sequence[BenchVerdict], commit: str
) -> list[str]:
    """Write a section that consists of targets."""
    told = [
        f"Measured on {report.machine} (load before: {report.load:.1f} a core), torch {report.torch}, by `{command}`, on commit {commit}:",
        "",
        *(f"* {line}" for line in verdicts),
    ]
    replace_section(name, "\n".join(told), FIGURES)
    return missed(verdicts)


def missed(verdicts: Sequence[BenchVerdict]) -> list[str]:
    """Those that do not hold, in words."""
    return [str(verdict) for verdict in verdicts if verdict.held is False]


def commit_of_tree() -> str:
    """The commit that is measured; read before the figures change the tree."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def hooks_section(report: HooksReport, commit: str) -> list[str]:
    lines = [
        (
            f"Measured on {report.machine} (load before: {report.load:.1f} a core), torch {report.torch}, by `make proof`, on commit {commit}: an MLP of 25 million parameters, "
            f"{report.batch} samples a rank, {report.hosts} hosts at {report.gbit:g} Gbit/s."
        ),
        "",
        f"| hook | ms a step | times as fast | quartiles | loss in the last 10 of {report.rounds} steps |",
        "|---|--:|--:|--:|--:|",
    ]
    for way in report.ways:
        low, high = way.spread
        faster = (
            ["", ""]
            if way is report.ways[0]
            else [f"{way.speedup:.2f}", f"{low:.2f} to {high:.2f}"]
        )
        cells = [way.name, f"{way.step_s * 1e3:.0f}", *faster, f"{way.last_loss:.4f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def host_proof(commit: str) -> list[str]:
    """Collectives on this host, faults, the demonstration, what is shown of runs that fail."""
    comm = COMM_BENCH.measure(
        CommBench(sizes_bytes=SIZES, rounds=7, out=ROOT / "runs" / "proof-comm")
    )
    plot(comm, ROOT / "docs" / "comm.png")
    (ROOT / "docs" / "comm.md").write_text(comm_page(comm, commit))
    faults = run_fault_trials(
        NUM_TRIALS, SEED, ROOT / "tests" / "world" / "comm_fault_job.py", stopped_limit_s=1.0
    )
    import_ms, init_ms, event_us = import_time_ms(), init_time_ms(), event_cost_us()
    demo, demo_s = run_demo()
    figures = "\n".join(
        [
            f"Measured on {comm.machine}, Python {platform.python_version()}, torch {comm.torch}, by `make proof`, on commit {commit}.",
            "",
            *comm_summary(comm),
            "",
            (
                "Each number is Gloo's time through `torch.distributed` divided by braid's time; both take turns in the same two "
                "processes (`braid bench comm`). Sizes are those of the largest full buffer of a rank. Registered means tensors of "
                "`Group.empty`, which are in shared memory. [All sizes](comm.md), [plot](comm.png)."
            ),
            "",
            "| what | measured |",
            "|---|---|",
            f"| seeded kills, stops, exceptions, exits in a {3}-rank training job: right rank named | {faults.correct} of {NUM_TRIALS} |",
            f"| left behind by them | {', '.join(f'{n} {what}' for what, n in faults.left_behind.items())} |",
            f"| death by signal known to the survivors | {milliseconds(faults.survived_s)} |",
            f"| death by signal known to the launcher | {milliseconds(faults.noticed_s)} |",
            f"| `braid demo`, from the command to its end | {demo_s:.0f} s |",
            f"| `import braid` on top of `import torch` | {import_ms:.1f} ms |",
            f"| `import braid` and `braid.init()` of two ranks on top of `import torch` | {init_ms:.0f} ms |",
            f"| one recorded span, begin and end | {event_us:.1f} us |",
        ]
    )
    replace_section("figures", figures, FIGURES)
    replace_section("demo", f"```console\n$ make demo\n{demo}\n```")
    failing = run_job(FAILING_JOB, "runs/a3f")
    failing = failing[failing.rindex("braid: run stopped") :].strip()
    replace_section("failure", f"```\n{failing}\n```")
    hanging = run_job(HANGING_JOB, "runs/b7e").strip()
    replace_section("hang", f"```\n{hanging}\n```")
    return targets_missed(comm, faults, import_ms, init_ms, event_us, demo_s)


def network_proof(commit: str) -> list[str]:
    """Measure over network namespaces and write that section, where they can be made; what was promised and is missed."""
    reason = what_is_missing()
    if reason:
        print(f"figures over a network are left as they are: {reason}", file=sys.stderr)
        return []
    net = NET_BENCH.measure(NetBench(out=ROOT / "runs" / "proof-net"))
    model = MODEL_BENCH.measure(ModelBench(out=ROOT / "runs" / "proof-net"))
    replace_section("network", network_section(net, model, commit), FIGURES)
    told = missed(verdicts(model))
    return [*(str(target) for target in targets(net) if not target.held), *told]


def network_section(net: NetReport, model: ModelReport, commit: str) -> str:
    names = dict.fromkeys(name for case in net.cases for row in case.rows for name in row.ratio)
    wires = [name for name in names if name != "braid"]
    heads = ["bytes", "Gloo ms", "% of link", "braid ms", "% of link", "times as fast", *wires]
    lines = [
        f"Measured on {net.machine} (load before: {net.load:.1f} a core), torch {net.torch}, hosts as network namespaces on this one machine, by `make proof`, on commit {commit}; `sudo python -m benchmarks net` does the same.",
        "",
        f"| network | {' | '.join(heads)} |",
        "|---|" + "--:|" * len(heads),
    ]
    for case in net.cases:
        for row in case.rows:
            cells = [str(case), bytes_text(row.nbytes)]
            for name in ("gloo", "braid"):
                told = case.gbit_per_s and row.nbytes >= LARGE_BYTES
                cells.append(f"{row.seconds[name] * 1e3:.2f}")
                cells.append(f"{case.share(row, name) * 100:.1f}" if told else "")
            cells += [f"{row.ratio[name]:.2f}" if name in row.ratio else "" for name in names]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(
        [
            *lines,
            "",
            (
                "An all-reduce of float32: medians of repetitions in turns, each until the slowest rank is ready. The share of the link is the payload "
                "divided by time and by the link's rate; with frames of 1500 bytes at most 95.6 % is possible. The last three columns are Gloo's time "
                "divided by the time of a format that sends fewer bytes. All hosts share the machine's cores, which limit rates above some Gbit/s."
            ),
            "",
            *(f"* {target}" for target in targets(net)),
            "",
            "Predicted times of the cost model, compared with measured times of the algorithms (`sudo python -m benchmarks model`):",
            "",
            *(f"* {line}" for line in verdicts(model)),
        ]
    )


def comm_summary(report: CommReport) -> list[str]:
    """One row per operation: speed-ups at some sizes."""
    rows = {(row.operation, row.nbytes): row for row in report.rows}
    columns = [("Group", "braid"), ("registered", "registered"), ("torch.distributed", "torch")]
    heads = [f"{head}, {bytes_text(size)}" for head, _ in columns for size in SHOWN]
    lines = [f"| operation | {' | '.join(heads)} |", "|---|" + "--:|" * len(heads)]
    for name in dict.fromkeys(row.operation for row in report.rows):
        cells = []
        for _, library in columns:
            for size in SHOWN:
                row = rows.get((name, size if name != "barrier" else 0))
                shown = row is not None and library in row.ratio
                shown = shown and (name != "barrier" or size == SHOWN[0])
                cells.append(f"{row.ratio[library]:.1f}" if row and shown else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


EXPLAINED = [  # lines of docs/comm.md in front of the choices of a group
    (
        "The next lines are `print(group.engine.explain())` of this run. At the start a group measures the basic "
        "operations of its host, and computes from them which algorithm is the fastest for each size. The first line "
        "has the time of a synchronisation: all ranks wait until all of them have reached the same point. `copy`, "
        "`add` and `pull` are the rates at which a rank copies memory, adds to it, and reads the private memory of "
        "another rank through the kernel. The other lines have the algorithms that the group chooses for each operation:"
    ),
    "",
    "* *staged*: each rank copies its data into slots of shared memory, from which the other ranks read;",
    "* *direct*: the same for an all-reduce, in which each rank adds up the slots of all ranks;",
    "* *pulled*: the other ranks read the private memory of a rank through the kernel.",
    "",
    (
        "Without a size, the algorithm is chosen for all sizes. `staged, from 16 MiB pulled (there pulled 2617 us, "
        "staged 2922 us)` means: *staged* below 16 MiB and *pulled* from 16 MiB on, where *pulled* is predicted to "
        "take 2617 us, and *staged* 2922 us. [Which algorithm when](collectives/chosen.md) describes all algorithms."
    ),
]


def comm_page(report: CommReport, commit: str) -> str:
    """Every row, for docs/comm.md."""
    mpi = any("mpi" in row.seconds for row in report.rows)
    libraries = ["braid", "registered", "torch", *(["mpi"] if mpi else [])]
    heads = {"braid": "Group", "registered": "registered", "torch": "torch", "mpi": "MPI"}
    head = "".join(f" {heads[name]} | x |" for name in libraries)
    lines = [
        "# Collectives, measured",
        "",
        f"{report.machine}, torch {report.torch}{', ' + report.mpi if report.mpi else ''}; written by `make proof`, on commit {commit}.",
        "",
        (
            "How long does each collective take through braid, Gloo and MPI on two ranks of one host? Times are medians in "
            "microseconds; the libraries take turns in the same two processes. The column *Group* is braid's `Group`, called directly; "
            "*registered* is the same on tensors of `Group.empty`, which are in shared memory; *torch* is `torch.distributed` "
            "over braid. *bytes* is the size of the largest full buffer of a rank. An empty cell was not measured."
        ),
        "",
        (
            "A column x is the speed of the library to its left, relative to Gloo. In each round of the measurement, "
            "Gloo's time is divided by the library's time in the same round; x is the median of these ratios. So x is not "
            "exactly the quotient of the two medians in the table: times of small buffers vary most from round to round, "
            "and the table rounds them to whole microseconds."
        ),
        "",
        f"| operation | bytes | Gloo |{head}",
        "|---|--:|--:|" + "--:|--:|" * len(libraries),
    ]
    for row in report.rows:
        size = bytes_text(row.nbytes) if row.nbytes else ""
        cells = [row.operation, size, f"{row.seconds['gloo'] * 1e6:,.0f}"]
        for name in libraries:
            known = name in row.seconds
            cells.append(f"{row.seconds[name] * 1e6:,.0f}" if known else "")
            cells.append(f"{row.ratio[name]:.1f}" if known else "")
        lines.append(f"| {' | '.join(cells)} |")
    if report.explained:
        lines += ["", *EXPLAINED]
    for words in report.explained.values():
        lines += ["", "```", words.strip(), "```"]
    return "\n".join(lines) + "\n"


def ddp_table(report: DdpReport) -> list[str]:
    lines = [
        "| model | wrapper | ms | times as fast as over Gloo | of Gloo's exposed communication gone |",
        "|---|---|--:|--:|--:|",
    ]
    for found in report.models:
        what = f"{found.model} {found.num_params / 1e6:.0f} M, batch {found.batch}"
        for name, step_s in found.step_s.items():
            faster = f"{found.speedup[name]:.2f}" if name in found.speedup else ""
            gone = share_text(found, name)
            lines.append(f"| {what} | {HEADINGS[name]} | {step_s * 1e3:.0f} | {faster} | {gone} |")
    return lines


def targets_missed(
    comm: CommReport,
    faults: FaultReport,
    import_ms: float,
    init_ms: float,
    event_us: float,
    demo_s: float,
) -> list[str]:
    rows: dict[tuple[str, int], Row] = {(row.operation, row.nbytes): row for row in comm.rows}
    missed = [
        f"{name}, {bytes_text(size)}, {library}: {found:.1f} x Gloo, expected at least {floor}"
        for (name, size, library), floor in FLOORS.items()
        if (found := rows[name, size].ratio[library]) < floor
    ]
    missed += [
        f"all_reduce, {bytes_text(size)}, {library}: {found:.2f} x MPI, expected at least {floor}"
        for (size, library), floor in FLOORS_OVER_MPI.items()
        if comm.mpi and (found := rows["all_reduce", size].over_mpi[library]) < floor
    ]
    limits = [
        ("culprits wrong", NUM_TRIALS - faults.correct, 0),
        ("left behind", sum(faults.left_behind.values()), 0),
        ("survivors know, median ms", faults.survived_s(0.5) * 1e3, 200),
        ("import ms", import_ms, 300),
        ("all_reduce of 256 KiB us", rows["all_reduce", 256 * KIB].seconds["braid"] * 1e6, 26),
        ("init ms", init_ms, 120),
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
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    run = partial(subprocess.run, [sys.executable, "-c", code], env=env, check=True)
    times = [float(run(capture_output=True).stdout) for _ in range(6)]
    return statistics.median(times[1:]) * 1e3  # the first writes the bytecode


def init_time_ms() -> float:
    program = (
        "import time, torch; t = time.perf_counter(); import braid; group = braid.init(); "
        "print('took', time.perf_counter() - t) if not group.rank else None"
    )
    command = [sys.executable, "-m", "braid", "run", "-n", "2", "--log-dir"]
    times = []
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "job.py").write_text(program)
        for number in range(6):
            done = subprocess.run(
                [*command, f"{number}", "job.py"],
                check=True,
                capture_output=True,
                text=True,
                cwd=directory,
            )
            times += [
                float(line.split()[-1]) for line in done.stdout.splitlines() if "took" in line
            ]
    return statistics.median(times[1:]) * 1e3


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


def run_job(text: str, log_dir: str) -> str:
    """What `braid run` says of a job of four ranks."""
    command = [sys.executable, "-m", "braid", "run", "-n", "4", "--log-dir", log_dir, "train.py"]
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "train.py").write_text(text)
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=directory)
    return done.stderr


def replace_section(name: str, text: str, page: Path = ROOT / "README.md") -> None:
    """Put `text` between the marks of a section of a page."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
