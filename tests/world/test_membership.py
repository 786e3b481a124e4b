"""Real processes become ranks: under braid's launcher, under torchrun's contract, alone."""

from __future__ import annotations

import os
import re
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from program_jobs import run_program

from braid.errors import RendezvousError
from braid.launch import JobSpec, QuietConsole, Supervisor

pytestmark = pytest.mark.launcher
JOB = """
import os, sys, signal, time
import torch
import braid
mode = sys.argv[1]
if mode == "early" and os.environ["RANK"] == "1":
    raise ImportError("no module named data")
if mode == "late":  # the others come when the launcher knows already
    noted = os.path.join(os.path.dirname(__file__), "pid")
    if os.environ["RANK"] == "1":
        with open(noted + ".new", "w") as file:
            file.write(str(os.getpid()))
        os.rename(noted + ".new", noted)
        raise ImportError("no module named data")
    while not os.path.exists(noted):
        time.sleep(0.01)
    while os.path.exists("/proc/" + open(noted).read()):  # a zombie is there until it has been reaped
        time.sleep(0.01)
    time.sleep(0.1)
if mode == "last":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
group = braid.init()
assert braid.init() is group is braid.world()
if mode == "twice":
    braid.shutdown()
    group = braid.init()
with group.context.events.span("step", seq=5):
    total = group.all_reduce(torch.tensor([float(group.rank + 1)]))
    if mode == "raise" and group.rank == 1:
        raise ValueError("dataset file shard-7 is missing")
    if mode == "surrogate" and group.rank == 1:
        raise ValueError("no file caf\\udce9")
    if mode == "unprintable" and group.rank == 1:
        class Unprintable(Exception):
            def __str__(self):
                raise TypeError("cannot be told")
        raise Unprintable
    if mode == "kill" and group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "leave" and group.rank == 1:
        sys.exit(0)
    if mode == "last":  # memory that nobody has mapped yet, and the owner has nothing more to do
        if group.rank == 0:
            full = group.empty((1_000_000,))  # of the first extent, which the other has mapped
            group.send(torch.full((120_000,), 7.0), 1)
            sys.exit(0)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        signal.sigwait({signal.SIGALRM})
        print("got", group.recv(torch.empty(120_000), 0).sum().item())
        sys.exit(0)
    if mode == "shape":
        group.all_reduce(torch.ones(2 + group.rank))
    if mode == "device" and group.rank == 0:
        group.all_reduce(torch.ones(2, device="meta"))
    if mode == "async" and group.rank == 0:
        group.all_reduce(torch.ones(1 << 20), async_op=True)  # never waited for
        raise KeyError("no such column")
    if mode == "async":  # not a collective: that would be another one than rank 0's
        group.recv(torch.empty(1), 0)
    if mode == "fork" and os.fork() == 0:
        os._exit(0)
    if mode == "fork-raise":
        if (child := os.fork()) == 0:
            sys.stderr = open(os.devnull, "w")
            raise KeyError("only in the child")
        os.waitpid(child, 0)
        group.context.store.set("still", b"there")
    group.barrier()
print("sum", total.item(), "of", group.size)
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return path


def _run(job: Path, mode: str, ranks: int = 2):
    console = QuietConsole()
    spec = JobSpec(command=(str(job), mode), num_ranks=ranks, log_dir=str(job.parent / "run"))
    outcome = Supervisor(console).run(spec)
    logs = [(job.parent / "run" / f"rank{r}.log").read_text() for r in range(ranks)]
    return outcome, logs


@pytest.mark.parametrize(("mode", "ranks"), [("plain", 3), ("twice", 2)])
def test_ranks_find_each_other(job, mode, ranks):
    outcome, logs = _run(job, mode, ranks)
    total = float(sum(range(1, ranks + 1)))
    assert (outcome.exit_code, logs) == (0, [f"sum {total} of {ranks}\n"] * ranks)


@pytest.mark.procs
@pytest.mark.parametrize(("mode", "ranks"), [("plain", 1), ("fork", 2)])
def test_ranks_find_each_other_by_the_variables_of_any_launcher(procs, job, mode, ranks):
    total = float(sum(range(1, ranks + 1)))
    assert run_program(procs, ranks, job, mode) == [f"sum {total} of {ranks}\n"] * ranks


def test_an_exception_in_a_forked_child_is_not_that_of_the_rank(job):
    outcome, logs = _run(job, "fork-raise")
    said = [log.splitlines()[-1] for log in logs]  # Python 3.12 warns of forks before
    assert (outcome.exit_code, said) == (0, ["sum 3.0 of 2"] * 2)


def test_what_a_rank_sent_last_arrives_though_it_has_nothing_more_to_do(job):
    outcome, logs = _run(job, "last")
    assert (outcome.exit_code, logs) == (0, ["", "got 840000.0\n"])


def test_an_exception_is_blamed_on_its_rank_and_line(job):
    outcome, _ = _run(job, "raise", 3)
    text = str(outcome)
    line = JOB.splitlines().index('        raise ValueError("dataset file shard-7 is missing")') + 1
    assert [end.rank for end in outcome.cause] == [1]
    assert "ValueError: dataset file shard-7 is missing" in text
    assert f"job.py:{line} in <module>" in text
    assert "ranks 0,2 were" in text
    assert "barrier()" in text


@pytest.mark.parametrize("mode", ["early", "late"])
def test_ranks_that_wait_for_others_to_join_hear_that_one_has_died(job, mode):
    outcome, logs = _run(job, mode, 2)
    assert [end.rank for end in outcome.cause] == [1]
    assert "PeerLostError: rank 1 raised ImportError: no module named data" in logs[0]
    assert "before all ranks had joined" in logs[0]


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("surrogate", r"ValueError: no file caf\udce9"),
        ("unprintable", "Unprintable: <its __str__ raised TypeError>"),
    ],
)
def test_an_exception_that_cannot_be_encoded_or_printed_is_blamed_on_its_rank(job, mode, told):
    outcome, _ = _run(job, mode)
    assert [end.rank for end in outcome.cause] == [1]
    assert told in str(outcome), str(outcome)
    assert outcome.affected[0].exit_code == 1


def test_a_kill_is_blamed_on_its_rank_with_what_it_was_doing(job):
    outcome, logs = _run(job, "kill", 2)
    assert (outcome.exit_code, [end.rank for end in outcome.cause]) == (137, [1])
    assert "killed by signal 9 (SIGKILL) at step 5" in str(outcome)
    # the launcher's word on the cause nearly always comes in time; without it the death is seen all the same
    told = (
        r"PeerLostError: rank 1 (was killed by signal 9 \(SIGKILL\)|\(pid \d+\) died), while rank"
    )
    assert re.search(told, logs[0]), logs[0]


def test_a_rank_that_leaves_early_is_blamed_though_it_exits_with_0(job):
    outcome, _ = _run(job, "leave")
    assert [end.rank for end in outcome.cause] == [1]
    assert "exit code 0" in str(outcome)


def test_work_under_way_does_not_hold_up_a_rank_that_fails(job):
    outcome, _ = _run(job, "async")
    assert (outcome.exit_code, [end.rank for end in outcome.cause]) == (1, [0])
    assert "KeyError: 'no such column'" in str(outcome)


def test_a_mismatch_shows_the_table_once(job):
    outcome, logs = _run(job, "shape", 2)
    text = str(outcome)
    assert [end.rank for end in outcome.cause] == [0, 1]
    for rank in range(2):
        assert f"rank {rank}  all_reduce(float32[{2 + rank}], sum)  at " in text
        assert "MismatchError: ranks asked for different operations" in logs[rank]
    assert text.count("float32[3]") == 1


def test_a_device_without_an_engine_is_named(job):
    outcome, _ = _run(job, "device")
    assert [end.rank for end in outcome.cause] == [0]
    assert "cannot communicate a tensor on meta, only on cpu" in str(outcome)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _by_contract(job: Path, size: int, ranks: list[int], **extra: str) -> list[subprocess.Popen]:
    port = str(_free_port())
    return [
        subprocess.Popen(
            [sys.executable, str(job), "plain"],
            env=os.environ
            | {"RANK": str(r), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
            | {"MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
            | extra,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in ranks
    ]


def test_torchruns_contract_is_enough(job):
    children = _by_contract(job, 2, [0, 1])
    assert [child.communicate()[0] for child in children] == ["sum 3.0 of 2\n"] * 2


def test_a_rank_that_is_there_twice_is_refused(job):
    children = _by_contract(job, 3, [0, 1, 1])  # rank 2 never comes: nobody can finish
    fds = {os.pidfd_open(child.pid): child for child in children}
    first = fds[select.select(list(fds), [], [], 60)[0][0]]
    for child in children:
        child.kill()
    _, errors = first.communicate()
    for child in children:
        child.communicate()
    for fd in fds:
        os.close(fd)
    assert first is not children[0]
    assert "RendezvousError: two processes have rank 1" in errors


def test_an_environment_that_makes_no_sense_is_refused(job):
    (child,) = _by_contract(job, 2, [0], WORLD_SIZE="abc")
    _, errors = child.communicate()
    assert child.returncode == 1
    assert (
        "ConfigError: the launcher's environment is invalid: WORLD_SIZE must be an integer >= 0, got 'abc'"
        in errors
    )


@pytest.mark.procs
def test_a_port_that_is_taken_is_named(procs, job):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(RendezvousError, match=f"cannot serve the store .*{port}"):
            run_program(procs, 1, job, "plain", WORLD_SIZE="2", MASTER_PORT=port)


def test_ranks_that_do_not_come_are_named():
    import threading

    from braid.runtime.clock import MonotonicClock
    from braid.runtime.store import HashStore
    from braid.runtime.transport import Health, connect

    clock, store = MonotonicClock(), HashStore()
    with pytest.raises(RendezvousError, match=r"ranks \[1, 2\] of 3 have not joined"):
        connect(0, 3, store, clock, Health(0, clock), timeout_s=0.05)
    assert threading.active_count() >= 1
