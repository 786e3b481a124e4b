"""Claims of jobs over several hosts, with agents on this machine: `--rsh 'env NAME={host}'` reaches a host that is this one."""

from __future__ import annotations

import os
import random
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from braid.errors import ConfigError
from braid.launch import Hosts, JobSpec, Outcome, QuietConsole, parse_hosts
from braid.launch.cluster.several_hosts import HostsSupervisor
from braid.launch.process.job import ElasticLimits
from braid.runtime.diagnose.run_record import RunHost, RunRecord
from support.leaks import no_leaks

pytestmark = [pytest.mark.procs, pytest.mark.launcher]
JOBS = str(Path(__file__).with_name("launch_jobs.py"))
HERE = "env FAKE_HOST={host}"
LIMIT_S = 60


@pytest.fixture
def console() -> QuietConsole:
    return QuietConsole()


@pytest.fixture
def run(tmp_path: Path, console: QuietConsole):
    def start(
        *command: str, hosts: str = "a:1,b:2", rsh: str = HERE, python: str = "", **options: object
    ) -> Outcome:
        options = {"grace_s": 0.2, "log_dir": str(tmp_path / "run"), **options}
        where = Hosts(hosts=parse_hosts(hosts), rsh=rsh, remote_python=python)
        with no_leaks():
            return HostsSupervisor(console).run(JobSpec(command=(JOBS, *command), **options), where)

    return start


def lines(console: QuietConsole, rank: int) -> list[str]:
    return [text.decode() for r, _, text in console.lines if r == rank]


def cause(outcome: Outcome) -> list[tuple[int, str]]:
    return [(end.rank, end.host) for end in outcome.cause]


def test_the_record_of_a_run_says_on_which_hosts_it_was(run, tmp_path):
    assert run("environment", threads=1).ok
    record = msgspec.json.decode((tmp_path / "run/run.json").read_bytes(), type=RunRecord)
    assert record.hosts == (
        RunHost(name="a", address="127.0.0.1", num_ranks=1),
        RunHost(name="b", address="127.0.0.1", num_ranks=2),
    )


@pytest.mark.parametrize("is_elastic", [False, True])
def test_ranks_of_an_elastic_run_have_equal_numbers_of_threads(
    run, console, monkeypatch, is_elastic
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = min(len(os.sched_getaffinity(0)), psutil.cpu_count(logical=False) or 1)
    chosen = [max(1, cores), max(1, cores // 2), max(1, cores // 2)]
    outcome = run("environment", elastic=ElasticLimits(min_ranks=1) if is_elastic else None)
    assert outcome.ok, str(outcome)
    texts = [" ".join(lines(console, rank)) for rank in range(3)]
    found = [int(re.search(r"OMP_NUM_THREADS=(\d+)", text)[1]) for text in texts]
    assert found == ([min(chosen)] * 3 if is_elastic else chosen)
    if is_elastic and len(set(chosen)) > 1:
        assert (
            f"OMP_NUM_THREADS={min(chosen)} (the least of {chosen[0]} (cores" in console.notices[1]
        )


def test_ranks_know_their_places(run, console):
    outcome = run("environment", threads=1)
    assert outcome.exit_code == 0
    assert lines(console, 2)[0] == (
        "RANK=2 LOCAL_RANK=1 WORLD_SIZE=3 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 GROUP_WORLD_SIZE=2 "
        "NODE_RANK=1 ROLE_RANK=2 ROLE_NAME=default ROLE_WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 "
        "TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_MAX_RESTARTS=0 OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1"
    )
    assert (
        console.notices[0] == "a, b are one machine: ranks with the same LOCAL_RANK share devices"
    )
    assert console.notices[1].startswith("3 ranks on a:1,b:2, logs in ")


@pytest.mark.parametrize(
    ("how", "reason", "exit_code"),
    [
        ("kill", "killed by signal 9 (SIGKILL)", 137),
        ("exit", "exited with code 3", 3),
        ("raise", "ValueError: shard-7 is missing      launch_jobs.py:", 1),
    ],
)
def test_the_rank_that_fails_is_causing_and_its_host_is_named(run, how, reason, exit_code):
    outcome = run("fail", how)
    assert (cause(outcome), outcome.exit_code) == ([(1, "b")], exit_code)
    assert f"  cause    rank 1 on host b (pid {outcome.cause[0].pid}): {reason}" in str(outcome)


def test_survivors_on_other_hosts_are_told_who_died_and_the_dead_with_last_events(
    run, console, tmp_path
):
    outcome = run("train", "kill", "6", grace_s=30.0)
    victim = [line for line in lines(console, 0) if line.startswith("braid.errors")]
    error = "braid.errors.PeerLostError: rank 1 was killed by signal 9 (SIGKILL)"
    assert victim == [f"{error}  (traceback in {tmp_path}/run/rank0.log)"]
    block = re.sub(r"pid \d+|after [\d.]+ s|:\d+ in \w+", "*", str(outcome)).split("\n")
    assert block[:4] == [
        "braid: run stopped at step 6 * (exit 137)",
        "  cause    rank 1 on host b (*): killed by signal 9 (SIGKILL) in backward, bucket 1 of 2, at step 6",
        "  affected ranks 0,2 were waiting in barrier()#6 called at launch_jobs.py*, at step 6 - stopped cleanly",
        "  saved    checkpoint step 4 (sha256 ok), 2 steps not saved",
    ]
    assert sorted(p.name for p in (tmp_path / "run/events").iterdir()) == [
        "launcher.jsonl", "rank0.ring", "rank1.ring", "rank2.ring",
    ]  # fmt: skip


def test_a_stopped_rank_is_named_then_given_up(run, console):
    outcome = run("train", "stop", "3", stopped_limit_s=0.2, grace_s=5.0)
    (end,) = outcome.cause
    assert (end.rank, end.host, end.declared_dead, end.signal) == (1, "b", True, 9)
    (warning,) = [text for text in console.notices if "is killed after" in text]
    assert f"rank 1 on host b (pid {end.pid}) was stopped by SIGSTOP" in warning


def test_a_time_out_shows_stacks_of_ranks_without_events(run):
    outcome = run("hang_without_events", hosts="b:1", timeout_s=3.0)
    assert re.sub(r"\d+", "N", outcome.affected[0].last_events) == "at launch_jobs.py:N in wait"


def test_the_output_is_complete(run, tmp_path):
    outcome = run("print_much", "300000", hosts="a:1,b:1")
    logs = [(tmp_path / f"run/rank{rank}.log").read_bytes().splitlines() for rank in range(2)]
    assert (outcome.exit_code, [len(log) for log in logs]) == (0, [300_000] * 2)
    assert [line.replace(b"rank 0", b"rank 1") for line in logs[0]] == logs[1]


def test_a_rank_that_keeps_another_host_waiting_is_named_with_its_line(
    tmp_path, console, monkeypatch
):
    monkeypatch.setenv("HANG_JOBS_S", "3")  # what is seen goes through agents, on a busy machine
    jobs = Path(__file__).with_name("hang_jobs.py")
    job = JobSpec(command=(str(jobs), "out_of_batches"), threads=1, hang_report_s=0.5, log_dir=str(tmp_path / "run"))  # fmt: skip
    outcome = HostsSupervisor(console).run(job, Hosts(hosts=parse_hosts("a:1,b:1"), rsh=HERE))
    reports = [text for text in console.notices if "in out_of_batches" in text]
    assert outcome.ok
    assert re.sub(r"\d+", "N", reports[0].splitlines()[2]) == (
        "  missing  rank N (pid N)   at hang_jobs.py:N in write_results   cpu N %, sleeping"
    )
    assert re.fullmatch(r"rank 1 went on after \d+\.\d s", console.notices[-1])


def refused(run, *command: str, **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        run(*(command or ("environment",)), **options)
    return str(caught.value)


def test_a_host_that_cannot_be_reached_is_named_with_the_reason(run):
    rsh = 'sh -c \'test {host} = a && exec "$0" "$@"; echo no route to {host} >&2; exit 255\''
    text = refused(run, rsh=rsh)
    assert "host b has no agent, `sh -c " in text
    assert "ended with exit code 255: no route to b\nnothing is wrong with a" in text


def test_a_host_without_the_interpreter_is_named_with_the_option(run):
    text = refused(run, python="/nowhere/python")
    assert "host a has no agent" in text
    assert "host b has no agent" in text
    assert text.count("name its interpreter with --remote-python") == 2


def test_a_host_without_braid_is_named_with_the_option(run):
    text = refused(run, python=f"env PYTHONPATH= {sys.executable} -S")
    assert text.count("or name an interpreter that has it with --remote-python") == 2


def test_a_host_with_another_braid_is_refused_by_name(run, tmp_path):
    fake = tmp_path / "python"
    code = (
        f"#!{sys.executable}\n"
        "import os, braid._version\n"
        "braid._version.__version__ = '9.9' if os.environ['FAKE_HOST'] == 'b' else braid._version.__version__\n"
        "import sys; from braid.launch.cluster.agent_main import main; sys.exit(main())\n"
    )
    fake.write_text(code)
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    text = refused(run, python=str(fake))
    assert "host b has braid 9.9, but the launcher has " in text
    assert text.endswith("nothing is wrong with a")


def test_a_program_that_is_missing_is_said_for_each_host(run):
    where = Hosts(hosts=parse_hosts("a,b"), rsh=HERE)
    with pytest.raises(ConfigError) as caught:
        HostsSupervisor().run(JobSpec(command=("nowhere.py",)), where)
    assert str(caught.value).count("cannot run this: cannot read the script nowhere.py") == 2  # fmt: skip


def test_an_interface_that_no_host_has_is_refused_with_what_there_is(tmp_path):
    where = Hosts(hosts=parse_hosts("a"), rsh=HERE, interfaces=("eth77",))
    with pytest.raises(
        ConfigError, match=r"host a has no address on eth77; it has .*lo 127\.0\.0\.1"
    ):
        HostsSupervisor().run(JobSpec(command=(JOBS, "environment"), log_dir=str(tmp_path)), where)


WAIT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("here", os.getpid(), child.pid, os.getppid(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def started(tmp_path: Path):
    """`braid run` on hosts a and b, once all ranks are up, with what it has started: (launcher, pids, agents by host)."""
    script = tmp_path / "wait.py"
    script.write_text(WAIT)
    command = ["run", "-H", "a:1,b:1", "--rsh", HERE, "--grace", "0.2", "--log-dir", str(tmp_path / "run"), str(script)]  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-m", "braid", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launcher:  # fmt: skip
        assert launcher.stdout is not None
        said = {}
        while len(said) < 2:
            words = launcher.stdout.readline().split()
            said[words[1]] = [int(word) for word in words[3:]]
        pids = [pid for rank, child, _ in said.values() for pid in (rank, child)]
        yield launcher, pids, {"a": said["0]"][2], "b": said["1]"][2]}
        launcher.kill()


def gone(pids: list[int]) -> bool:
    """Whether processes end within some seconds."""
    deadline_s = time.monotonic() + 10
    while any(_runs(pid) for pid in pids):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


def _runs(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_nothing_is_left_when_an_agent_is_killed_and_its_host_is_named(started):
    launcher, pids, agents = started
    os.kill(agents["b"], signal.SIGKILL)
    _, text = launcher.communicate(timeout=LIMIT_S)
    block = text[text.index("  cause") :].splitlines()
    assert re.sub(r"pid \d+", "*", block[0]) == (
        "  cause    rank 1 on host b (*): HostLost: host b is gone: its agent (*) was killed by signal 9 (SIGKILL)"
    )
    assert (launcher.returncode, gone([*pids, *agents.values()])) == (1, True)


def test_nothing_is_left_when_the_launcher_is_killed(started):
    launcher, pids, agents = started
    launcher.kill()
    launcher.communicate(timeout=LIMIT_S)
    assert gone([*pids, *agents.values()])


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_for_the_launcher_ends_ranks_on_all_hosts(started, signum):
    launcher, pids, agents = started
    launcher.send_signal(signum)
    _, text = launcher.communicate(timeout=LIMIT_S)
    assert f"{signum.name} received, passing it on to all ranks" in text
    assert (launcher.returncode, gone([*pids, *agents.values()])) == (128 + signum, True)


def test_a_signal_for_an_agent_ends_the_run_and_says_where_it_came(started):
    launcher, pids, agents = started
    os.kill(agents["b"], signal.SIGTERM)
    _, text = launcher.communicate(timeout=LIMIT_S)
    assert "SIGTERM received on host b, passing it on to all ranks" in text
    assert (launcher.returncode, gone([*pids, *agents.values()])) == (143, True)


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(24))
def test_the_culprit_is_right_wherever_it_is_and_whenever_it_fails(run, seed):
    draw = random.Random(seed)
    hosts, host = draw.choice([("a:1,b:2", "b"), ("a:2,b:1", "a"), ("a:1,b:1,c:1", "b")])
    outcome = run("train", draw.choice(["kill", "exit"]), str(draw.randrange(30)), hosts=hosts, grace_s=10.0)  # fmt: skip
    assert cause(outcome) == [(1, host)]
