"""Run a function on N ranks: `spawn(train, n=4, args=(0.1,))` is `braid run -n 4 -m braid.launch.process.spawned module:train [0.1]`.

The function is found by its name and its arguments travel as JSON: no pickle, and a rank is started
the same way whether a person or a program asks for it. It must therefore live in a module that can
be imported; functions of `__main__`, lambdas and closures are refused with the way out.
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
from braid.launch.supervise.supervisor import Supervisor

__all__ = ["spawn"]

RUNNER = "braid.launch.process.spawned"


def spawn(
    fn: Callable[..., object],
    n: int,
    args: Sequence[Any] = (),
    *,
    console: Console | None = None,
    **options: Any,
) -> Outcome:
    """Run `fn(*args)` in `n` processes and wait for them.

    Args:
        fn: A function at the top level of an importable module.
        n: Number of ranks.
        args: Its arguments, of types that JSON knows.
        console: Where output goes; kept in memory when None.
        **options: Further fields of `JobSpec`.

    Returns:
        What came of it; see `Outcome.ok`.

    Raises:
        ConfigError: The function cannot be found by its name, or an argument cannot be sent.
    """
    target = f"{fn.__module__}:{fn.__qualname__}"
    if fn.__module__ == "__main__" or "<" in fn.__qualname__:
        msg = (
            f"expected a function at the top level of a module, found {target}: each rank imports "
            "it by "
            "name, so move it into a file of its own and import it from there"
        )
        raise ConfigError(msg)
    try:
        text = msgspec.json.encode(list(args)).decode()
    except TypeError as exc:
        msg = f"expected arguments for {target} that JSON knows, found {exc}: pass names or paths"
        raise ConfigError(msg) from exc
    environ = dict(options.pop("environ", os.environ))
    paths = [path or str(Path.cwd()) for path in sys.path]
    environ["PYTHONPATH"] = os.pathsep.join(paths)  # a rank finds what this process has found
    job = JobSpec(
        command=(RUNNER, target, text), kind="module", num_ranks=n, environ=environ, **options
    )
    return Supervisor(console).run(job)
