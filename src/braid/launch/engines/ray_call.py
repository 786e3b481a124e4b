"""The program of a rank of `launch.ray.run`: calls the function, and leaves its result for Ray.

python -m braid.launch.engines.ray_call    under an actor's agent, see `ray_client.run_agent`

Function and result are pickled by Ray's pickler. They lie in a directory of the actor that only
this user can read, and are sent in Ray's calls: they are as secure as any call of Ray.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from braid.errors import ConfigError, PeerLostError

__all__ = ["CALL", "Results", "check_results", "main", "read_result"]

CALL = "BRAID_RAY_CALL"  # names the directory
Results: TypeAlias = Mapping[int, tuple[Any, BaseException | None]]  # value or error, by rank


def main() -> int:
    """Call the function of `launch.ray.run`; an exception ends this rank as it ends a script."""
    place = os.environ.get(CALL, "")
    if not place:
        msg = (
            f"{CALL} is not set: do not start this program yourself, braid.launch.ray.run starts it"
        )
        raise ConfigError(msg)
    fn, args, kwargs = pickle.loads(Path(place, "call").read_bytes())  # noqa: S301 - of this job
    result = Path(place, f"result.{os.environ['RANK']}")
    try:
        value = fn(*args, **kwargs)
    except BaseException as exc:
        _write(result, None, exc)
        raise
    _write(result, value, None)
    return 0


def read_result(text: bytes) -> tuple[Any, BaseException | None]:
    """Return the value that a rank has returned, or the exception that it has raised."""
    try:
        value, error = pickle.loads(text)  # noqa: S301 - of this job
    except Exception as exc:  # noqa: BLE001 - of the user's own classes
        return None, TypeError(f"what this rank has returned or raised cannot be unpickled: {exc}")
    return value, error


def check_results(results: Results, num_workers: int) -> None:
    """Raise if a rank of a run with fixed members has not returned a value."""
    errors = {rank: error for rank, (_, error) in results.items() if error is not None}
    for error in errors.values():
        if not isinstance(error, SystemExit):
            raise error  # such as a result that cannot be unpickled here
    missing = [r for r in range(num_workers) if r in errors or r not in results]
    if missing:
        ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        msg = (
            f"{ranks} returned no result: the function has ended its process (sys.exit, os._exit), "
            "or the node was lost before Ray delivered the result"
        )
        raise PeerLostError(msg, rank=missing[0])


def _write(file: Path, value: Any, error: BaseException | None) -> None:
    from ray import cloudpickle  # noqa: PLC0415 - an extra, on the nodes of a cluster

    try:
        text = cloudpickle.dumps((value, error))
    except Exception as exc:
        what = "result" if error is None else "exception"
        shown = value if error is None else error
        problem = TypeError(f"the {what} {shown!r:.200} of this rank cannot be pickled: {exc}")
        text = pickle.dumps((None, problem))
        file.write_bytes(text)
        if error is None:
            raise problem from exc
        return
    file.write_bytes(text)


if __name__ == "__main__":
    sys.exit(main())
