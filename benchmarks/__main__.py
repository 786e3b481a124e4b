"""`python -m benchmarks NAME`: measure braid beside other systems, in turns in one run.

A benchmark, `BENCH` of its module, is the dataclass of its options, a function that measures, and
functions that make tables and verdicts. Run it where this repository is, in an environment in which
braid is installed.
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
