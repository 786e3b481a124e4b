"""`braid bench ...`: measure communication and training steps, in turns in one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

import tyro

from braid.cli.commands import NO_DEFAULT
from braid.cli.commands.engines import bench_launch
from braid.cli.commands.plan_pipedream import bench_plan
from braid.errors import ConfigError

__all__ = ["BENCHES"]


def bench_comm(
    *,
    n: Annotated[tuple[int, ...], tyro.conf.arg(name="num-ranks", aliases=["-n"])] = (2,),
    operations: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="NAME [NAME ...]", help_behavior_hint=NO_DEFAULT)
    ] = (),
    sizes_kib: tuple[int, ...] = (1, 16, 256, 1024, 4096, 16384),
    dtypes: tuple[str, ...] = ("float32",),
    complete: bool = False,
    rounds: int = 5,
    out: str = "runs/bench-comm",
    no_plot: bool = False,
) -> int:
    """Measure collectives against Gloo and MPI, in turns in one run: table, JSON, plot.

    Args:
        n: Number of ranks; several are measured one after the other.
        operations: Collectives to measure; all when empty.
        sizes_kib: KiB of the largest full buffer of a rank.
        dtypes: Such as float32 bfloat16 int64.
        complete: Measure 2 and 4 ranks, 1 KiB to 256 MiB, float32, bfloat16 and int64, whatever the
            other options are; takes long.
        rounds: Alternating rounds for each row; the ratios shown are medians over them.
        out: Directory for comm.json and comm.png.
        no_plot: Do not draw comm.png, which needs matplotlib.
    """
    from pathlib import Path

    from braid.bench import comm

    bench = comm.CommBench(
        ranks=comm.COMPLETE_RANKS if complete else n,
        operations=operations or comm.OPERATIONS,
        sizes_bytes=(
            comm.COMPLETE_SIZES_BYTES if complete else tuple(size << 10 for size in sizes_kib)
        ),
        dtypes=comm.COMPLETE_DTYPES if complete else dtypes,
        rounds=rounds,
        out=Path(out),
    )
    report = comm.run_comm(bench)
    comm.print_report(report, bench.out)
    if not no_plot:
        try:
            print(f"plot  {comm.plot(report, bench.out / 'comm.png')}")
        except ConfigError as exc:  # the figures are written; only the picture is missing
            print(f"plot  none: {exc}")
    return 0


def bench_ddp(
    *,
    n: Annotated[int, tyro.conf.arg(name="num-ranks", aliases=["-n"])] = 2,
    cases: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MODEL:BATCH [...]")] = (
        "mlp:64",
        "gpt:2",
        "conv:2",
        "mlp:256",
        "gpt:8",
        "conv:8",
    ),
    rounds: int = 96,
    budget: float = 60.0,
    busy: int = 0,
    out: str = "runs/bench-ddp",
) -> int:
    """Measure data parallel training: torch's DDP over Gloo and over braid, and braid's own.

    Args:
        n: Number of ranks.
        cases: Models with the batch of a rank: mlp and gpt (25 million parameters), conv (11
            million, with batch norm).
        rounds: Largest number of steps of each wrapper, in turns; figures are medians over them.
        budget: Seconds for a case, about.
        busy: Number of processes that compute at the same time, one core each, to measure on a
            machine that others use, too.
        out: Directory for ddp.json.
    """
    from pathlib import Path

    from braid.bench import ddp
    from braid.bench.workers.ddp import Case

    chosen = []
    for text in cases:
        model, _, batch = text.partition(":")
        if not batch.isdecimal():
            msg = f"a case must be a model and a batch size such as mlp:64, got {text!r}"
            raise ConfigError(msg)
        chosen.append(Case(model, int(batch)))
    bench = ddp.DdpBench(
        ranks=n, cases=tuple(chosen), rounds=rounds, budget_s=budget, busy=busy, out=Path(out)
    )
    ddp.print_ddp(ddp.run_ddp(bench), bench.out)
    return 0


def bench_horovod(
    *,
    n: Annotated[int, tyro.conf.arg(name="num-ranks", aliases=["-n"])] = 2,
    cases: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MODEL:BATCH [...]")] = (
        "mlp:64",
        "gpt:2",
        "tiny:32",
    ),
    rounds: int = 60,
    budget: float = 30.0,
    out: str = "runs/bench-horovod",
) -> int:
    """Measure the negotiated engine against Gloo and braid's DDP.

    Args:
        n: Number of ranks.
        cases: Models with the batch of a rank: mlp and gpt (25 million parameters), conv, and tiny
            (a step of some milliseconds).
        rounds: Number of steps of each engine, in turns; figures are medians over them.
        budget: Seconds for a case, about.
        out: Directory for fusion.json.
    """
    from pathlib import Path

    from braid.bench import horovod as fusion

    chosen = []
    for text in cases:
        model, _, batch = text.partition(":")
        if not batch.isdecimal():
            msg = f"a case must be a model and a batch size such as mlp:64, got {text!r}"
            raise ConfigError(msg)
        chosen.append((model, int(batch)))
    bench = fusion.FusionBench(
        ranks=n, cases=tuple(chosen), rounds=rounds, budget_s=budget, out=Path(out)
    )
    fusion.print_fusion(fusion.run_fusion(bench), bench.out)
    return 0


def bench_hooks(
    *,
    hooks: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME [NAME ...]")] = (
        "bf16",
        "int8",
        "topk:0.01",
        "powersgd:rank=4,start=2",
    ),
    gbit: float = 1.0,
    num_hosts: int = 2,
    batch: int = 16,
    rounds: int = 160,
    out: str = "runs/bench-hooks",
) -> int:
    """Measure communication hooks over a slow network of namespaces (as root).

    Args:
        hooks: Names, as DistributedDataParallel accepts them.
        gbit: Rate of each host's link, Gbit/s.
        num_hosts: Number of hosts, with one rank each.
        batch: Number of samples of a rank in a step.
        rounds: Number of steps of each hook, in turns; times are medians over them, losses are
            those after the last step.
        out: Directory for hooks.json.
    """
    from pathlib import Path

    from braid.bench import hooks as bench

    wanted = bench.HooksBench(
        hooks=hooks, gbit=gbit, num_hosts=num_hosts, batch=batch, rounds=rounds, out=Path(out)
    )
    bench.print_hooks(bench.run_hooks(wanted), wanted.out)
    return 0


def bench_net(
    *,
    rates_gbit: Annotated[tuple[float, ...], tyro.conf.arg(metavar="GBIT [GBIT ...]")] = (
        1.0,
        10.0,
    ),
    num_hosts: int = 2,
    ranks_per_host: tuple[int, ...] = (1, 2),
    sizes_kib: tuple[int, ...] = (1, 16, 64, 256, 1024, 4096, 16384, 65536),
    wires: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME [NAME ...]")] = (
        "bf16",
        "int8",
        "topk:0.01",
    ),
    turns: int = 7,
    budget: float = 1.0,
    hosts: Annotated[
        str, tyro.conf.arg(aliases=["-H"], metavar="a:2,b:2", help_behavior_hint=NO_DEFAULT)
    ] = "",
    rsh: Annotated[str, tyro.conf.arg(metavar="TEXT", help_behavior_hint=NO_DEFAULT)] = "",
    link_gbit: float = 0.0,
    model: bool = False,
    out: str = "runs/bench-net",
) -> int:
    """Measure all-reduce between hosts against Gloo; as root, on network namespaces.

    Args:
        rates_gbit: Rates of the links between namespaces, Gbit/s.
        num_hosts: Number of namespaces.
        ranks_per_host: Ranks of each host; every number is measured at every rate.
        sizes_kib: KiB of the tensors.
        wires: Formats in which numbers cross the network, besides their own.
        turns: Least number of repetitions of each library; figures are medians over them.
        budget: Seconds of one library and size, about.
        hosts: Measure between these hosts instead, with so many ranks each; braid must be installed
            there.
        rsh: Command that reaches {host} (default: ssh without questions).
        link_gbit: Rate of the links between --hosts, Gbit/s, to show which share of it is used.
        model: Compare the cost model with measured algorithms instead, on 4 namespaces at the first
            rate and on 2 ranks in shared memory.
        out: Directory for net.json, or model.json.
    """
    from pathlib import Path

    if model:
        from braid.bench.model import ModelRun, print_model, run_model

        if hosts:
            msg = (
                "--model measures on namespaces of this machine, where nothing else is on the "
                "links: leave --hosts out"
            )
            raise ConfigError(msg)
        wanted = ModelRun(gbit=rates_gbit[0], turns=turns, out=Path(out))
        print_model(run_model(wanted), wanted.out)
        return 0
    from braid.bench import net

    bench = net.NetBench(
        rates_gbit=rates_gbit,
        num_hosts=num_hosts,
        ranks_per_host=ranks_per_host,
        sizes_bytes=tuple(size << 10 for size in sizes_kib),
        wires=wires,
        turns=turns,
        budget_s=budget,
        hosts=hosts,
        rsh=rsh,
        link_gbit=link_gbit,
        out=Path(out),
    )
    net.print_net(net.run_net(bench), bench.out)
    return 0


def bench_pipeline(
    *,
    n: Annotated[int, tyro.conf.arg(name="num-ranks", aliases=["-n"])] = 2,
    cases: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MODEL:SCHEDULE:M [...]")] = (
        "wide:1f1b:8",
        "wide:gpipe:8",
        "compute:1f1b:8",
        "compute:gpipe:8",
        "compute:interleaved:8",
        "tiny:1f1b:64",
    ),
    rounds: int = 60,
    budget: float = 20.0,
    sweep: Annotated[str, tyro.conf.arg(metavar="NAME", help_behavior_hint=NO_DEFAULT)] = "",
    out: str = "runs/bench-pipeline",
    no_plot: bool = False,
) -> int:
    """Measure pipelines: torch's over Gloo and over braid, braid's own, and their formulas.

    Args:
        n: Number of ranks, 2 or 4.
        cases: Models with a schedule and the number of micro-batches: wide (4 MiB at a boundary,
            little work), compute (much work) and tiny (nothing but the engine); gpipe, 1f1b or
            interleaved.
        rounds: Largest number of steps of each engine, in turns; figures are medians over them.
        budget: Seconds for a case, about.
        sweep: microbatches, to measure and simulate steps over their number instead.
        out: Directory for pipeline.json, and for microbatches.png and .svg of a sweep.
        no_plot: Do not draw the sweep, which needs matplotlib.
    """
    from pathlib import Path

    from braid.bench import pipeline
    from braid.bench.workers.pipeline import Case

    chosen = []
    for text in cases:
        model, _, rest = text.partition(":")
        schedule, _, number = rest.partition(":")
        if not number.isdecimal():
            msg = (
                "a case must be a model, a schedule and a number of micro-batches such as "
                f"wide:1f1b:8, got {text!r}"
            )
            raise ConfigError(msg)
        chosen.append(Case(model, schedule, int(number)))
    bench = pipeline.PipelineBench(
        ranks=n,
        cases=tuple(chosen),
        rounds=rounds,
        budget_s=budget,
        sweep=sweep,
        out=Path(out),
    )
    report = pipeline.run_pipeline(bench)
    pipeline.print_pipeline(report, bench.out)
    for suffix in ("png", "svg") if sweep and not no_plot else ():
        try:
            print(f"plot  {pipeline.plot_sweep(report, bench.out / f'{sweep}.{suffix}')}")
        except ConfigError as exc:  # the figures are written; only the picture is missing
            print(f"plot  none: {exc}")
            break
    return 0


def bench_ps(
    *,
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PART [...]")] = (
        "dense",
        "small",
        "pairs",
        "rows",
        "step",
        "failover",
        "stragglers",
    ),
    rounds: int = 8,
    kills: int = 5,
    out: str = "runs/bench-ps",
) -> int:
    """Measure a parameter server: bytes, messages, rows, steps, servers that die, stragglers.

    References run beside it: a plain unix socket, torch's RPC, and the step by all-reduce.

    Args:
        only: Parts to measure.
        rounds: Number of rounds; figures are medians over them.
        kills: Servers that are killed, one after the other.
        out: Directory for ps.json.
    """
    from pathlib import Path

    from braid.bench import ps

    bench = ps.PsBench(only=only, rounds=rounds, kills=kills, out=Path(out))
    ps.print_ps(ps.run_ps(bench), bench.out)
    return 0


def bench_rpc(
    *,
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PART [...]")] = (
        "small",
        "1 MiB",
        "16 MiB",
        "windowed",
        "autograd",
        "serving",
    ),
    rounds: int = 8,
    out: str = "runs/bench-rpc",
) -> int:
    """Measure remote calls, distributed autograd and batched serving beside torch's RPC.

    Args:
        only: Parts to measure.
        rounds: Number of rounds; figures are medians over them.
        out: Directory for rpc.json.
    """
    from pathlib import Path

    from braid.bench import rpc

    bench = rpc.RpcBench(only=only, rounds=rounds, out=Path(out))
    rpc.print_rpc(rpc.run_rpc(bench), bench.out)
    return 0


def bench_tp(
    *,
    n: Annotated[int, tyro.conf.arg(name="num-ranks", aliases=["-n"])] = 2,
    cases: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MODEL:WIDTH:LAYERS:B:T [...]")] = (
        "llama:128:4:2:64",
        "qwen2:128:4:2:64",
        "mistral:64:2:2:32",
    ),
    rounds: int = 60,
    budget: float = 40.0,
    out: str = "runs/bench-tp",
) -> int:
    """Measure tensor parallelism: transformers' plan and torch's, over Gloo and braid, and braid's.

    Args:
        n: Number of ranks, 2 or 4.
        cases: Models (llama, mistral, qwen2) with width, layers, sequences and positions.
        rounds: Largest number of steps of each engine, in turns; figures are medians over them.
        budget: Seconds for a case, about.
        out: Directory for tp.json.
    """
    from pathlib import Path

    from braid.bench import tp

    bench = tp.TpBench(
        ranks=n,
        cases=tuple(map(tp.case_of, cases)),
        rounds=rounds,
        budget_s=budget,
        out=Path(out),
    )
    tp.print_tp(tp.run_tp(bench), bench.out)
    return 0


def bench_zero(
    *,
    n: Annotated[int, tyro.conf.arg(name="num-ranks", aliases=["-n"])] = 2,
    cases: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MODEL:BATCH [...]")] = (
        "gpt:1",
        "gpt:4",
        "mlp:64",
    ),
    rounds: int = 40,
    budget: float = 40.0,
    save_mib: int = 1024,
    out: str = "runs/bench-zero",
) -> int:
    """Measure sharded training: torch's FSDP2 over Gloo and over braid, and braid's three stages.

    Args:
        n: Number of ranks.
        cases: Models with the batch of a rank: gpt and mlp (25 million parameters), and tiny
            (nothing but the engines).
        rounds: Largest number of steps of each engine, in turns; figures are medians over them.
        budget: Seconds for a case, about.
        save_mib: MiB of a checkpoint that is saved at once and behind a training; 0 for none.
        out: Directory for zero.json.
    """
    from pathlib import Path

    from braid.bench import zero

    bench = zero.ZeroBench(
        ranks=n,
        cases=tuple(map(zero.case_of, cases)),
        rounds=rounds,
        budget_s=budget,
        save_mib=save_mib,
        out=Path(out),
    )
    zero.print_zero(zero.run_zero(bench), bench.out)
    return 0


BENCHES: Mapping[str, Callable[..., int]] = {
    "bench comm": bench_comm,
    "bench ddp": bench_ddp,
    "bench hooks": bench_hooks,
    "bench horovod": bench_horovod,
    "bench launch": bench_launch,
    "bench net": bench_net,
    "bench pipeline": bench_pipeline,
    "bench ps": bench_ps,
    "bench plan": bench_plan,
    "bench rpc": bench_rpc,
    "bench tp": bench_tp,
    "bench zero": bench_zero,
}
