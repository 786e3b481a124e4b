"""`braid prove`: compare training on N ranks with one process, bit by bit."""

from __future__ import annotations

from typing import Annotated

import tyro

from braid.errors import ConfigError
from braid.runtime.option_types import Ranks

__all__ = ["prove"]


def prove(
    file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")],
    *,
    n: Ranks = 2,
    steps: int = 5,
    log_dir: str = "runs/prove",
) -> int:
    """Train on N ranks and in one process, and compare all parameters after every step, bit by bit.

    FILE defines model() and loss(model, rank, size, step), the loss of one rank's share of a step.
    It may define optimizer(params) and wrap(model, group) to replace SGD and
    DistributedDataParallel. Exit code 1 means that the two runs differ.

    Args:
        file: Python file.
        n: Number of ranks.
        steps: Number of steps.
        log_dir: Directory for the logs of the ranks.
    """
    from pathlib import Path

    import msgspec

    from braid.cli.bench.harness.ranks import run_here
    from braid.train.prove.proving import Proof
    from braid.train.prove.show import show
    from braid.train.prove.task import load_task
    from braid.train.prove.worker import ProofConfig, main

    problems = [f"--num-ranks {n}"] * (n < 1) + [f"--steps {steps}"] * (steps < 1)
    if problems:
        msg = f"--num-ranks and --steps must be at least 1, got {' and '.join(problems)}"
        raise ConfigError(msg)
    load_task(Path(file))  # reports an unreadable task once, not on every rank
    config = ProofConfig(file=str(Path(file).resolve()), steps=steps)
    result = Path(log_dir) / "proof.json"
    run_here(n, main, config, log_dir=Path(log_dir), results=result)
    proof = msgspec.json.decode(result.read_bytes(), type=Proof)
    result.unlink()
    show(proof)
    return 0 if proof.holds else 1
