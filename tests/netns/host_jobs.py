"""Programs for jobs over several hosts; `python host_jobs.py NAME ARGS...` runs the function NAME."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def place() -> None:
    """Where this rank stands, as it was told."""
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "BRAID_LISTEN")  # fmt: skip
    say(" ".join(os.environ[name] for name in names))


def listening() -> None:
    """On rank 0, which shares its host with the launcher: where ranks dial the store, and where that listens."""
    import psutil

    dialled, _, port = os.environ["BRAID_STORE"].rpartition(":")
    if os.environ["RANK"] == "0":
        listeners = [c for c in psutil.net_connections("tcp") if c.status == "LISTEN"]
        for address in {c.laddr.ip for c in listeners if c.laddr.port == int(port)}:
            say(f"{dialled} at {address}")


def gloo() -> None:
    """Sum ranks with torch's own backend, through the launcher's MASTER_ADDR."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    say(f"sum {total.item()}")
    dist.destroy_process_group()


def meet() -> None:
    """Meet all ranks in the launcher's store."""
    from braid.runtime.rendezvous import JobEnvironment
    from braid.runtime.store import STORE_ROLE, StoreClient
    from braid.runtime.wire import Identity, Secret, connect

    env = JobEnvironment.from_os()
    assert env.secret_fd is not None
    me = Identity(env.run_id, STORE_ROLE, env.rank)
    secret = Secret.from_fd(env.secret_fd)
    with StoreClient(connect(env.store_address, secret, me, timeout_s=10)) as store:
        store.set(f"here/{env.rank}", env.listen.encode())
        store.wait([f"here/{rank}" for rank in range(env.world_size)])
        say("all " + " ".join(store.get(f"here/{r}").decode() for r in range(env.world_size)))


def steps() -> None:
    """Average numbers until the end of days."""
    import torch

    import braid

    group = braid.init()
    say("here")
    while True:
        group.all_reduce(torch.ones(1000))
        time.sleep(0.02)


def fail(how: str) -> None:
    """The last rank fails; the others would go on for ever."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(f"here-{os.environ['RANK']}").write_text(f"{os.getpid()} {child.pid}")
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        while any(not Path(f"here-{r}").exists() for r in range(int(os.environ["WORLD_SIZE"]))):
            time.sleep(0.01)
        if how == "raise":
            raise ValueError("dataset file shard-7 is missing")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "agent":
            os.kill(os.getppid(), signal.SIGKILL)
        if how == "told":
            say("ready")
    time.sleep(600)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
