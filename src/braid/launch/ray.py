"""Functions on the ranks of a Ray cluster.

    import braid.launch.ray

    def train(lr):
        group = braid.init()
        ...
        return loss

    losses = braid.launch.ray.run(train, num_workers=4, args=(0.1,), resources={"GPU": 1})

Works in a driver that has called `ray.init`, inside of `ray job submit`, and where RAY_ADDRESS or a
cluster of this machine is found. Ranks talk to each other as under `braid run`; Ray starts them,
watches them and carries the function and its results.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from braid.errors import ConfigError, PeerLostError
from braid.launch import Console, JobSpec, Outcome
from braid.launch.engines.client import EngineSupervisor
from braid.launch.engines.options import EngineOptions
from braid.launch.engines.ray_call import Results, check_results, read_result

__all__ = ["run"]

RUNNER = "braid.launch.engines.ray_call"
T = TypeVar("T")


def run(
    fn: Callable[..., T],
    *,
    num_workers: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    resources: Mapping[str, float] | None = None,
    strategy: Literal["pack", "spread"] = "pack",
    address: str = "",
    console: Console | None = None,
    start_limit_s: float = 60.0,
    **options: Any,
) -> list[T]:
    """Call a function on `num_workers` ranks of a Ray cluster, and return their results.

    Args:
        fn: Function; a closure or a function of `__main__` works, as for tasks of Ray.
        num_workers: Number of ranks.
        args: Arguments of the function.
        kwargs: Arguments by name.
        resources: Resources of each rank, such as `{"GPU": 1}`; one CPU besides, unless named.
        strategy: `pack` to use the fewest nodes, `spread` to use the most nodes.
        address: Address of the cluster; this process's cluster or RAY_ADDRESS when empty.
        console: Console for output; kept in memory when None.
        start_limit_s: Seconds to wait for the nodes, and again until their agents have joined.
        **options: Further fields of `JobSpec`, such as `timeout_s` and `log_dir`.

    Returns:
        Return values in the order of ranks. In an elastic run (`elastic=`), ranks that were lost or
            dismissed have no entry.

    Raises:
        ConfigError: No cluster answers, its free resources do not suffice, or the caller is not on
            the main thread.
        PeerLostError: A rank was lost without an exception; the message is the error block. Or a
            rank has returned no result.
        Exception: The exception of the rank that failed first; its cause is the error block.

    Cost: some seconds to start. Function and results pass through Ray.
    On failure: all ranks have ended when the exception is raised.
    """
    try:
        import ray  # noqa: PLC0415 - an extra
        from ray import cloudpickle  # noqa: PLC0415
    except ModuleNotFoundError as exc:
        msg = "braid.launch.ray.run needs Ray: pip install 'braid-train[ray]'"
        raise ConfigError(msg) from exc
    if threading.current_thread() is not threading.main_thread():
        msg = (
            "braid.launch.ray.run handles signals, so only the main thread can call it: call it "
            "there"
        )
        raise ConfigError(msg)
    if not address and ray.is_initialized():
        address = ray.get_runtime_context().gcs_address
    environ = dict(options.pop("environ", os.environ))
    paths = [path or str(Path.cwd()) for path in sys.path]
    environ["PYTHONPATH"] = os.pathsep.join(paths)  # so that ranks import the same modules
    with tempfile.TemporaryDirectory(prefix="braid-ray-") as place:
        call = Path(place, "call")
        call.write_bytes(cloudpickle.dumps((fn, tuple(args), dict(kwargs or {}))))
        listed = ",".join(f"{name}={count:g}" for name, count in (resources or {}).items())
        words = [f"--payload={call}", f"--strategy={strategy}"]
        words += [f"--resources={listed}"] if listed else []
        words += [f"--address={address}"] if address else []
        where = EngineOptions(
            engine="ray",
            num_ranks=num_workers,
            words=tuple(words),
            start_limit_s=start_limit_s,
        )
        job = JobSpec(
            command=(RUNNER,), kind="module", num_ranks=num_workers, environ=environ, **options
        )
        outcome = EngineSupervisor(console).run_on(job, where)
        files = {int(path.suffix[1:]): path for path in Path(place).glob("call.*")}
        results = {rank: read_result(file.read_bytes()) for rank, file in sorted(files.items())}
    if not outcome.ok:
        raise _failure(outcome, results)
    if job.elastic is None:
        check_results(results, num_workers)
    return [value for value, error in results.values() if error is None]


def _failure(outcome: Outcome, results: Results) -> Any:
    """Return the exception of the rank that is the cause, or one with the error block."""
    ranks = [end.rank for end in outcome.cause]
    lost = PeerLostError(str(outcome), rank=ranks[0] if ranks else -1)
    for rank in ranks:
        _, error = results.get(rank, (None, None))
        if error is not None:
            error.__cause__ = lost
            return error
    return lost
