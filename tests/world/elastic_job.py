"""A training for tests: prints a digest of its state, and kills itself where it is told to.

Arguments: deaths as RANK:STEP, numbers of ranks at the launcher. A rank dies in its first forward
of that step, or `RANK:STEP:update` in its update; `RANK:STEP:parent` kills what has started it,
`RANK:STEP:notice` is a notice that it will be ended, `RANK:STEP:error` an exception,
`RANK:STEP:wait` waits until the launcher has named it, `RANK:STEP:stuck` waits with a child for
good, `RANK:STEP:drain` asks what has started it to end, `RANK:STEP:kill:PID` kills another process,
`RANK:STEP:notified:PROGRAM` runs a program and waits for the notice that it causes,
`RANK:STEP:read:FIFO` waits for a byte, and `RANK:STEP:host` kills all processes of its network
namespace. `RANK:cut:SECONDS` leaves all networks (as root), and tries to reach the launcher for these
seconds. `RANK:agreed` dies when it has agreed on a last epoch. SAVES names a directory for checkpoints, SAVES_EVERY the number of steps
between two of them. FAULTS names a directory with a plan of further faults (`elastic_faults`).
PASSES is the number of passes over the data, 8 steps each.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import braid
from braid.runtime.rendezvous import membership
from elastic_faults import Strikes
from elastic_points import add_points

NOTICE_LIMIT_S = 60.0
CLONE_NEWNET = 0x40000000


class Noise(torch.utils.data.Dataset):
    """Samples with random numbers that are drawn when they are read."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), index / 48.0) + torch.rand(8) * 0.1


class InUpdate(TorchDispatchMode):
    """Visits "updating" after the update of each parameter: others are still to be updated."""

    def __init__(self, visit: Callable[[str], object]) -> None:
        super().__init__()
        self._visit = visit

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple = (), kwargs: object = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.addcdiv_.default:
            self._visit("updating")
        return result


def strike(number: int, step: int, deaths: set[tuple[str, ...]]) -> None:
    here = (str(number), str(step))
    if (*here, "parent") in deaths:
        os.kill(os.getppid(), signal.SIGKILL)
    if (*here, "drain") in deaths:
        os.kill(os.getppid(), signal.SIGTERM)
    if (*here, "stuck") in deaths:
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    while deaths & {(*here, "parent"), (*here, "stuck")}:
        signal.pause()
    for *point, argument in tuple(deaths):
        if point == [*here, "kill"]:
            os.kill(int(argument), signal.SIGKILL)
        if point == [*here, "notified"]:
            wait_for_notice(argument)
        if point == [*here, "read"]:
            deaths.remove((*here, "read", argument))  # also if the rank computes several shards
            with Path(argument).open("rb", buffering=0) as fifo:
                fifo.read(1)
    if (*here, "host") in deaths:
        kill_host()


def wait_for_notice(program: str) -> None:
    is_notified, handler = threading.Event(), signal.getsignal(signal.SIGTERM)
    assert callable(handler)

    def on_signal(signum: int, frame: FrameType | None) -> None:
        handler(signum, frame)
        is_notified.set()

    signal.signal(signal.SIGTERM, on_signal)
    subprocess.run([program, str(os.getppid())], check=True)
    assert is_notified.wait(NOTICE_LIMIT_S)


def seconds_cut_off(number: int, deaths: set[tuple[str, ...]]) -> float:
    """Leave all networks, if this rank is to; return how long it tries to reach its launcher."""
    cut_s = [float(seconds) for *point, seconds in deaths if point == [str(number), "cut"]]
    if not cut_s:
        return 600.0
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    return max(cut_s)


def kill_host() -> None:
    def ip(*words: str) -> list[str]:
        command = ["ip", "netns", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    (name,) = ip("identify")
    for pid in sorted(map(int, ip("pids", name)), key=os.getpid().__eq__):  # itself last
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def agree_and_die(agree: Callable[..., object], *facts: object) -> None:
    agree(*facts)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    number = int(os.environ["RANK"])
    deaths = {tuple(text.split(":")) for text in sys.argv[1:]}
    if (str(number), "agreed") in deaths:
        membership.agree_on_last_epoch = partial(agree_and_die, membership.agree_on_last_epoch)
    strikes = Strikes(os.environ.get("FAULTS", ""))
    if strikes.faults:
        add_points(setattr, strikes.visit)
    strikes.visit("start")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    braid.init(timeout_s=seconds_cut_off(number, deaths))
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def visit(_layer: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        strikes.visit("forward")
        output.register_hook(lambda _: strikes.visit("backward"))

    model[1].register_forward_hook(visit)

    def die_at(*point: str) -> None:
        if point in deaths:
            os.kill(os.getpid(), signal.SIGKILL)

    def update() -> None:
        die_at(str(number), str(training.num_steps), "update")
        strikes.visit("update")
        with InUpdate(strikes.visit):
            optimizer.step()
        strikes.visit("updated")

    loader = DataLoader(Noise(), batch_size=4, shuffle=True)
    saves = os.environ.get("SAVES", "")
    every = int(os.environ.get("SAVES_EVERY", "100"))
    options = {"checkpoints": saves, "checkpoint_every": every * bool(saves)}
    training = strikes.training = braid.elastic(
        model, optimizer, update=update, shards=3, **options
    )
    with training:
        for _ in training.epochs(int(os.environ.get("PASSES", "2"))):
            for x in training.batches(loader):
                strikes.wait_for_newcomer()
                with training.step():
                    die_at(str(number), str(training.num_steps))
                    if (str(number), str(training.num_steps), "wait") in deaths:
                        deaths.clear()  # the step is done again
                        signal.sigwait({signal.SIGUSR2})
                    if (str(number), str(training.num_steps), "error") in deaths:
                        raise ValueError("shard 7 is missing")
                    if (str(number), str(training.num_steps), "notice") in deaths:
                        os.kill(os.getpid(), signal.SIGTERM)
                    strike(number, training.num_steps, deaths)
                    functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    state = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    print(f"{training.num_steps} {hashlib.sha256(state).hexdigest()}", flush=True)


main()
