"""`python -m benchmarks NAME`: measure braid against other systems, in turns in one run.

A benchmark, `BENCH` of its module, consists of a dataclass of options, a function that measures,
and functions that make tables and verdicts. Run it in the root of this repository, in an
environment with braid installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from benchmarks import (
    coordinator,
    elastic,
    hooks,
    horovod,
    launch,
    messages,
    model,
    net,
    pipeline,
    placed,
    plan,
    ps,
    rpc,
    strategies,
    tp,
    zero,
)
from braid.cli import TYRO_CONFIG, answer
from braid.cli.bench.harness.report import Benchmark
from braid.runtime.last_words import ending_well

__all__ = ["BENCHMARKS", "main"]


BENCHMARKS: dict[str, Benchmark[Any, Any]] = {
    "coordinator": coordinator.BENCH,
    "elastic": elastic.BENCH,
    "hooks": hooks.BENCH,
    "horovod": horovod.BENCH,
    "launch": launch.BENCH,
    "messages": messages.BENCH,
    "model": model.BENCH,
    "net": net.BENCH,
    "pipeline": pipeline.BENCH,
    "placed": placed.BENCH,
    "plan": plan.BENCH,
    "ps": ps.BENCH,
    "rpc": rpc.BENCH,
    "strategies": strategies.BENCH,
    "tp": tp.BENCH,
    "zero": zero.BENCH,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark that the arguments name, and return the exit code."""

    def measure() -> int:
        kinds: dict[str, Callable[..., Any]] = {
            name: bench.options for name, bench in BENCHMARKS.items()
        }
        options: Any = tyro.extras.subcommand_cli_from_dict(
            kinds, prog="python -m benchmarks", args=arguments, config=TYRO_CONFIG
        )
        chosen = next(bench for bench in BENCHMARKS.values() if bench.options is type(options))
        return chosen.run(options)

    return ending_well(lambda: answer(measure, "done"))


if __name__ == "__main__":
    sys.exit(main())
