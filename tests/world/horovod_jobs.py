"""What ranks of the tests of Horovod's front run: functions, a script, and the session that these live in."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch takes long to import, and functions of ranks need none
    from braid.comm import Group


@contextlib.contextmanager
def horovod(group: Group, **variables: str) -> Iterator[None]:
    """A session of the front for torch on `group`, with HOROVOD_* as given."""
    from braid.compat.horovod import session
    from braid.compat.horovod.environment import HorovodEnvironment

    session.start(group, HorovodEnvironment.of({f"HOROVOD_{k}": v for k, v in variables.items()}))
    try:
        yield
    finally:
        session.stop()


def said(call: Callable[[], object]) -> str:
    """The error of a call, or its result, as text."""
    try:
        return repr(call())
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


class TwoPartsError(Exception):
    """An error that pickle cannot make again: it is made of two arguments and remembers one."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def rank() -> int:
    return int(os.environ["RANK"])


def told(a: int, *, b: str = "") -> tuple[int, int, int, str, str]:
    size = int(os.environ["WORLD_SIZE"])
    return rank(), size, a, b, os.environ.get("HOROVOD_CYCLE_TIME", "")


def fail_on_rank_1(how: str) -> int:
    if rank() != 1:
        return rank()
    if how == "raise":
        raise KeyError("shard-7")
    if how == "two parts":
        raise TwoPartsError("sha", "rd")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "leave":
        sys.exit(0)
    if how == "vanish":
        os._exit(0)
    return threading.Lock()  # type: ignore[return-value] # what cannot be pickled


def modes() -> list[str]:
    """Of the directory through which the function has come, and what lies in it."""
    directory = Path(sys.argv[-1].strip('[]"'))
    found = [directory, *sorted(directory.glob("function*"))]
    return [stat.filemode(path.stat().st_mode) for path in found]


if __name__ == "__main__":
    from braid.compat.horovod.launcher.job_plan import OF_RANKS

    values = {name: text for name, text in os.environ.items() if name.startswith("HOROVOD_")}
    own = {name: values.pop(name, "") for name in OF_RANKS}
    same = own.pop("HOROVOD_HOSTNAME") == platform.node()
    print(sys.argv[1:], dict(sorted(values.items())), "/".join(own.values()) if same else own)
    sys.exit(3 if sys.argv[1:] == ["fail"] and rank() == 1 else 0)
