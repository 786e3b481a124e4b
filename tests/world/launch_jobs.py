"""Programs that the launcher's tests start; none imports torch, so each starts in a few ten milliseconds.

`python launch_jobs.py NAME ARGS...` runs the function NAME. `Rank` is the smallest braid program: it has a black box, a
control connection and a barrier through the store.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import subprocess
import sys
import time

from braid.errors import PeerLostError
from braid.runtime.events import EventRing, Recorder
from braid.runtime.rendezvous import (
    ControlClient,
    JobEnvironment,
    Left,
    RankFailed,
    RankHello,
    RankLost,
    Saved,
)
from braid.runtime.store import STORE_ROLE, StoreClient
from braid.runtime.wire import Identity, Secret, connect


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Rank:
    """What `braid.init()` does, without torch and without arenas."""

    def __init__(self) -> None:
        env = self.env = JobEnvironment.from_os()
        assert env.secret_fd is not None
        assert env.events_fd is not None
        assert env.stacks_fd is not None
        secret = Secret.from_fd(env.secret_fd)
        ring = EventRing(mmap.mmap(env.events_fd, 0))
        ring.pid = os.getpid()
        self.events = Recorder(ring)
        me = Identity(env.run_id, STORE_ROLE, env.rank)
        self.control = ControlClient.dial(env.store_address, secret, me, timeout_s=10)
        self.store = StoreClient(connect(env.store_address, secret, me, timeout_s=10))
        faulthandler.register(signal.SIGUSR1, file=env.stacks_fd, all_threads=True)
        self.control.send(RankHello(os.getpid()))

    def barrier(self, number: int) -> None:
        """Wait for all ranks, or until one is lost."""
        with self.events.span("barrier()", seq=number, site=self.events.site()):
            last = self.store.add(f"barrier/{number}", 1) == self.env.world_size
            if last:
                self.store.set(f"passed/{number}", b"")
            with self.events.span("wait"):
                self.store.set(f"waits/{number}/{self.env.rank}", b"")
                while not self.store.check([f"passed/{number}"]):
                    for news in self.control.poll():
                        if isinstance(news, RankLost):
                            raise PeerLostError(f"rank {news.rank} {news.reason}", rank=news.rank)
                    time.sleep(0.001)


def environment() -> None:
    """Print what torch programs find."""
    names = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
    )
    names += ("NODE_RANK", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR")
    names += ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "OMP_NUM_THREADS")
    names += ("PYTHONUNBUFFERED",)
    say(" ".join(f"{name}={os.environ[name]}" for name in names))
    known = {*names, "TORCHELASTIC_RUN_ID"}
    say(" ".join(sorted(k for k in os.environ if k.startswith("TORCHELASTIC") and k not in known)))


def descriptors() -> None:
    """Print which descriptors are open, and which of them the environment names."""
    numbers = []
    for fd in range(256):
        try:
            os.fstat(fd)
        except OSError:
            continue
        numbers.append(fd)
    named = [int(os.environ[f"BRAID_{name}_FD"]) for name in ("SECRET", "EVENTS", "STACKS")]
    say(str(numbers == sorted([0, 1, 2, *named])))


def fail(how: str, rank: str = "1") -> None:
    """Let one rank fail while the others wait."""
    say("started")
    if os.environ["RANK"] != rank:
        signal.pause()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exit":
        sys.exit(3)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "exec":
        os.execv("/no/such/program", ["x"])
    else:
        raise ValueError("shard-7 is missing")


def wait(handles: str = "") -> None:
    """Wait for a signal; `handled` ends with exit code 0 on SIGTERM, `deaf` never ends."""
    if handles == "handled":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if handles == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    say(f"pid {os.getpid()}")
    while True:
        signal.pause()


def print_much(lines: str) -> None:
    """Print more than a pipe holds."""
    for number in range(int(lines)):
        say(f"line {number} of rank {os.environ['RANK']}")


def leave_children() -> None:
    """Leave a grandchild in a session of its own, with nobody to wait for it."""
    if os.fork() == 0:
        os.setsid()
        child = subprocess.Popen(["/bin/sleep", "1000"], stdout=subprocess.DEVNULL)
        say(f"orphan {child.pid}")
        child.returncode = 0  # it shall outlive this process
        os._exit(0)
    os.wait()


def stop_once() -> None:
    """Stop, and finish when somebody lets this process go on."""
    os.kill(os.getpid(), signal.SIGSTOP)


def train(how: str, at_step: str) -> None:
    """Rank 1 fails inside backward of a step; rank 0 saves a checkpoint at every second step."""
    rank = Rank()
    try:
        for step in range(100):
            with rank.events.span("step", seq=step):
                if step == 4 and rank.env.rank == 0:
                    rank.control.send(Saved(step, f"ckpt/{step}", sha256_ok=True))
                with rank.events.span("backward"):
                    bucket = rank.events.span("bucket 1 of 2")
                    if step == int(at_step) and rank.env.rank == 1:
                        rank.store.wait([f"waits/{step}/{r}" for r in range(3) if r != 1])
                        time.sleep(0.01)  # longer than survivors may be ahead of the launcher
                        fail(how)
                    bucket.end()
                rank.barrier(step)
    except Exception as exc:
        if how == "say":
            rank.control.send(RankFailed(type(exc).__name__, str(exc), "train.py:7 in step"))
            if rank.env.rank == 1:
                wait("deaf")
        raise
    rank.control.send(Left())


def hang() -> None:
    """All ranks wait in a barrier that rank 1 does not reach."""
    rank = Rank()
    with rank.events.span("step", seq=7):
        if rank.env.rank == 1:
            wait()
        rank.barrier(1)


def hang_without_events() -> None:
    """Wait where only a stack can tell."""
    Rank()
    wait()


def survive(first: str, later: str, victim: str, culprit: str) -> None:
    """One rank dies; another one hears of that and ends the run, by itself or by the launcher."""
    rank = Rank()
    number = os.environ["RANK"]
    if number == victim:
        rank.store.wait(["joined"])
        fail(first, victim)
    if number == culprit:
        rank.store.set("joined", b"")
        while not any(isinstance(news, RankLost) for news in rank.control.poll()):
            time.sleep(0.001)
        if later == "SIGTERM":
            os.kill(int(os.environ["BRAID_LAUNCHER_PID"]), signal.SIGTERM)
        elif later != "timeout":
            fail(later, culprit)
    wait()


def eat() -> None:
    """Use memory until the kernel ends it."""
    hoard = []
    while True:
        hoard.append(bytearray(os.urandom(1 << 20)))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
