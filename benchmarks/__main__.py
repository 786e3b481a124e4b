"""`python -m benchmarks NAME`: measure braid beside other systems, in turns in one run.

A benchmark is the dataclass of its options, a function that measures, and one that prints tables
and verdicts. Run it where this repository is, in an environment in which braid is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from benchmarks.hooks import HooksBench, print_hooks, run_hooks
from benchmarks.horovod import FusionBench, print_fusion, run_fusion
from benchmarks.launch import LaunchBench, print_launch, run_launch
from benchmarks.model import ModelBench, print_model, run_model
from benchmarks.net import NetBench, print_net, run_net
from benchmarks.pipeline import PipelineBench, print_pipeline, run_pipeline
from benchmarks.plan import PlanBench, print_plan, run_plan
from benchmarks.ps import PsBench, print_ps, run_ps
from benchmarks.rpc import RpcBench, print_rpc, run_rpc
from benchmarks.tp import TpBench, print_tp, run_tp
from benchmarks.zero import ZeroBench, print_zero, run_zero
from braid.cli import TYRO_CONFIG, answer
from braid.cli.bench.harness.report import Benchmark
from braid.runtime.last_words import ending_well

__all__ = ["BENCHMARKS", "main"]


BENCHMARKS = {
    "hooks": Benchmark(HooksBench, run_hooks, print_hooks),
    "horovod": Benchmark(FusionBench, run_fusion, print_fusion),
    "launch": Benchmark(LaunchBench, run_launch, print_launch),
    "model": Benchmark(ModelBench, run_model, print_model),
    "net": Benchmark(NetBench, run_net, print_net),
    "pipeline": Benchmark(PipelineBench, run_pipeline, print_pipeline),
    "plan": Benchmark(PlanBench, run_plan, print_plan),
    "ps": Benchmark(PsBench, run_ps, print_ps),
    "rpc": Benchmark(RpcBench, run_rpc, print_rpc),
    "tp": Benchmark(TpBench, run_tp, print_tp),
    "zero": Benchmark(ZeroBench, run_zero, print_zero),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the arguments name, and return the exit code."""

    def measure() -> int:
        kinds: dict[str, Callable[..., Any]] = {
            name: each.options for name, each in BENCHMARKS.items()
        }
        options: Any = tyro.extras.subcommand_cli_from_dict(
            kinds, prog="python -m benchmarks", args=arguments, config=TYRO_CONFIG
        )
        chosen = next(each for each in BENCHMARKS.values() if each.options is type(options))
        return chosen.run(options)

    return ending_well(lambda: answer(measure, "done"))


if __name__ == "__main__":
    sys.exit(main())
