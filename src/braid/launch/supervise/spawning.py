"""Runs a function on N ranks.

    spawn(train, n=4, args=(0.1,))
    braid run -n 4 -m braid.launch.process.spawned module:train [0.1]    # the same

Ranks import the function by its name, and arguments are sent as JSON, so nothing is pickled. The
function must be in a module that can be imported. Functions of `__main__`, lambdas and closures are
refused with advice.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from braid.errors import ConfigError
from braid.launch.process.job import JobSpec, Outcome
from braid.launch.process.output import Console
from braid.launch.supervise.local_backend import Supervisor

__all__ = ["spawn", "spawned_command"]

RUNNER = "braid.launch.process.spawned"


def spawn(
    fn: Callable[..., object],
    n: int,
    args: Sequence[Any] = (),
    *,
    console: Console | None = None,
    results: Path | None = None,
    **options: Any,
) -> Outcome:
    """Run `fn(*args)` in `n` processes and wait for their end.

    Args:
        fn: Function at the top level of an importable module.
        n: Number of ranks.
        args: Arguments of the function, of types that JSON can represent: also dataclasses and
            `msgspec.Struct`.
        console: Console for output; kept in memory when None.
        results: File for the value that `fn` returns on one rank, as JSON. Without it, the items of
            an iterator are printed, one JSON line each.
        **options: Further fields of `JobSpec`.

    Returns:
        Outcome of the run; see `Outcome.ok`.

    Raises:
        ConfigError: The function cannot be imported by its name, or an argument cannot be sent.
    """
    environ = dict(options.pop("environ", os.environ))
    paths = [path or str(Path.cwd()) for path in sys.path]
    environ["PYTHONPATH"] = os.pathsep.join(paths)  # so that ranks import the same modules
    job = JobSpec(
        command=spawned_command(fn, args, results),
        kind="module",
        num_ranks=n,
        environ=environ,
        **options,
    )
    return Supervisor(console).run(job)


def spawned_command(
    fn: Callable[..., object], args: Sequence[Any], results: Path | None = None
) -> tuple[str, ...]:
    """Return the module and its arguments with which `python -m` calls `fn`; see `spawn`."""
    target = f"{fn.__module__}:{fn.__qualname__}"
    if fn.__module__ == "__main__" or "<" in fn.__qualname__:
        msg = (
            f"ranks cannot import {target}: move the function to the top level of a module and "
            "import it from there"
        )
        raise ConfigError(msg)
    try:
        text = msgspec.json.encode(list(args)).decode()
    except TypeError as exc:
        msg = (
            f"arguments of {target} cannot be sent as JSON ({exc}): pass numbers, text, names or "
            "paths"
        )
        raise ConfigError(msg) from exc
    return RUNNER, target, text, *([] if results is None else [str(results.resolve())])
