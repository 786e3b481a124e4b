"""Claims of the launcher, with real processes: deaths are noticed and reported, no process is left behind."""

from __future__ import annotations

import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from braid.errors import ConfigError
from braid.launch import JobSpec, Outcome, QuietConsole, Supervisor, spawn
from braid.runtime.diagnose.block import error_block, render_block
from braid.runtime.diagnose.run_record import RunRecord
from braid.runtime.events import EventRing

pytestmark = [pytest.mark.procs, pytest.mark.launcher]
JOBS = str(Path(__file__).with_name("launch_jobs.py"))


@pytest.fixture
def console() -> QuietConsole:
    return QuietConsole()


@pytest.fixture
def run(tmp_path: Path, console: QuietConsole):
    def start(*command: str, n: int = 3, **options: object) -> Outcome:
        options = {"grace_s": 0.2, "log_dir": str(tmp_path / "run"), **options}
        job = JobSpec(command=(JOBS, *command), num_ranks=n, **options)
        return Supervisor(console).run(job)

    return start


def lines(console: QuietConsole, rank: int) -> list[str]:
    return [text.decode() for r, _, text in console.lines if r == rank]


def cause(outcome: Outcome) -> list[int]:
    return [end.rank for end in outcome.cause]


def test_torchruns_contract_is_kept(run, console):
    outer = {**os.environ, "TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "7"}
    outcome = run("environment", n=2, threads=1, environ=outer)
    assert (outcome.exit_code, outcome.verdict.kind) == (0, "finished")
    told, left_of_outer = lines(console, 1)
    assert told == (
        "RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 GROUP_WORLD_SIZE=1 "
        "NODE_RANK=0 ROLE_RANK=1 ROLE_NAME=default ROLE_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 "
        "TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_MAX_RESTARTS=0 OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1"
    )
    assert left_of_outer == ""


def test_ranks_inherit_the_named_descriptors_and_no_other(run, console):
    with socket.socket() as other:
        other.set_inheritable(True)
        run("descriptors", n=2)
    assert [lines(console, rank) for rank in range(2)] == [["True"], ["True"]]


@pytest.mark.parametrize(
    ("how", "reason", "exit_code"),
    [
        ("kill", "killed by signal 9 (SIGKILL)", 137),
        ("exit", "exited with code 3", 3),
        ("raise", "ValueError: shard-7 is missing      launch_jobs.py:", 1),
    ],
)
def test_the_rank_that_fails_is_the_cause(run, how, reason, exit_code):
    outcome = run("fail", how)
    assert (cause(outcome), outcome.exit_code) == ([1], exit_code)
    assert f"  cause    rank 1 (pid {outcome.cause[0].pid}): {reason}" in str(outcome)
    assert "  affected ranks 0,2 ended by braid (SIGTERM)\n" in str(outcome)


def test_survivors_are_told_who_died_and_why_at_once(run, console, tmp_path):
    outcome = run("train", "kill", "6", grace_s=30.0)
    victim = [line for line in lines(console, 0) if line.startswith("braid.errors")]
    error = "braid.errors.PeerLostError: rank 1 was killed by signal 9 (SIGKILL)"
    assert victim == [f"{error}  (traceback in {tmp_path}/run/rank0.log)"]
    assert re.sub(r"pid \d+|after [\d.]+ s|:\d+ in \w+", "*", str(outcome)).split("\n")[:5] == [
        "braid: run stopped at step 6 * (exit 137)",
        "  cause    rank 1 (*): killed by signal 9 (SIGKILL) in backward, bucket 1 of 2, at step 6",
        "  affected ranks 0,2 were waiting in barrier()#6 called at launch_jobs.py*, at step 6 - stopped cleanly",
        "  saved    checkpoint step 4 (sha256 ok), 2 steps not saved",
        f"  resume   braid run --resume auto -n 3 --log-dir {tmp_path}/run {JOBS} train kill 6",
    ]


def test_a_rank_that_reports_its_error_and_hangs_is_the_cause(run):
    outcome = run("train", "say", "2")
    assert cause(outcome) == [1]
    assert "ValueError: shard-7 is missing      train.py:7 in step" in str(outcome)


def test_a_stopped_rank_is_named_then_given_up(run, console):
    outcome = run("train", "stop", "3", stopped_limit_s=0.2, grace_s=5.0)
    (end,) = outcome.cause
    assert (end.rank, end.declared_dead, end.signal) == (1, True, 9)
    doing = "in backward, bucket 1 of 2, at step 3"
    assert re.search(rf"stopped by SIGSTOP for [\d.]+ s, killed by braid {doing}", str(outcome))
    (warning,) = [text for text in console.notices if "is killed after" in text]
    assert f"was stopped by SIGSTOP {doing}; it is killed after 0.2 s" in warning


def test_a_stopped_rank_that_goes_on_finishes(tmp_path):
    class Helpful(QuietConsole):
        def notice(self, text: str) -> None:
            super().notice(text)
            if advice := re.search(r"kill -CONT (\d+)", text):
                os.kill(int(advice[1]), signal.SIGCONT)

    console = Helpful()
    job = JobSpec(command=(JOBS, "stop_once"), log_dir=str(tmp_path / "run"))
    outcome = Supervisor(console).run(job)
    told = [re.sub(r"[(].*[)] | by .*", "", text) for text in console.notices[1:]]
    assert (outcome.exit_code, told) == (0, ["rank 0 was stopped", "rank 0 goes on"])


def test_a_time_out_says_who_was_doing_what(run):
    outcome = run("hang", timeout_s=2.0)
    text = re.sub(r":\d+ in \w+", "", str(outcome))
    assert (outcome.exit_code, cause(outcome)) == (124, [])
    assert "ranks 0,2 were waiting in barrier()#1 called at launch_jobs.py, at step 7" in text
    assert "rank 1 was at step 7" in text


def test_a_time_out_shows_stacks_of_ranks_without_events(run, tmp_path):
    outcome = run("hang_without_events", n=1, timeout_s=3.0)
    (end,) = outcome.affected
    assert re.sub(r"\d+", "N", end.last_events) == "at launch_jobs.py:N in wait"
    assert "most recent call first" in (tmp_path / "run/stacks/rank0.txt").read_text()


def test_orphans_of_a_rank_are_ended(run, console):
    run("leave_children", n=2)
    pids = [int(line.split()[1]) for rank in range(2) for line in lines(console, rank)]
    assert [Path(f"/proc/{pid}").exists() for pid in pids] == [False, False]


def test_the_log_is_complete_and_the_ranks_are_not_blocked(run, tmp_path, console):
    run("print_much", "20000", n=2)
    wanted = "".join(f"line {number} of rank 1\n" for number in range(20000))
    assert (tmp_path / "run/rank1.log").read_text() == wanted
    assert len(lines(console, 1)) == 20000


def test_a_terminal_gets_the_last_lines_of_each_rank_and_one_total(tmp_path):
    console = QuietConsole(limited=True)
    job = JobSpec(command=(JOBS, "print_much", "20000"), num_ranks=2, log_dir=str(tmp_path / "run"))
    assert Supervisor(console).run(job).ok
    for rank in range(2):
        shown = lines(console, rank)
        assert shown[-1] == f"line 19999 of rank {rank}"
        assert any(
            re.fullmatch(rf"\.\.\. [\d,]+ lines not shown, see .*rank{rank}.log", x) for x in shown
        )
    assert re.fullmatch(
        r"[\d,]+ lines not shown in all: the logs in .* have every line", console.notices[-1]
    )


def test_the_record_of_a_run_says_what_happened(run, tmp_path):
    outcome = run("train", "exit", "5")
    record = msgspec.json.decode((tmp_path / "run/run.json").read_bytes(), type=RunRecord)
    assert record.outcome is not None
    assert render_block(error_block(record.outcome)) == str(outcome)
    ring = EventRing((tmp_path / "run/events/rank1.ring").read_bytes())
    assert (ring.rank, ring.pid) == (1, outcome.cause[0].pid)


def test_a_port_in_use_is_refused_by_name(run):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} .* in use by pid {os.getpid()}"):
            run("environment", port=port)


def test_a_program_of_any_kind_is_run(tmp_path, console):
    job = JobSpec(
        command=("sh", "-c", "echo rank $RANK; exit $RANK"),
        kind="program",
        num_ranks=2,
        grace_s=5.0,
        log_dir=str(tmp_path / "run"),
    )
    outcome = Supervisor(console).run(job)
    assert (cause(outcome), outcome.exit_code, lines(console, 0)) == ([1], 1, ["rank 0"])


def test_a_signal_before_the_first_rank_starts_none(tmp_path):
    class Interrupting(QuietConsole):
        def notice(self, text: str) -> None:
            super().notice(text)
            if len(self.notices) == 1:
                signal.raise_signal(signal.SIGTERM)

    job = JobSpec(command=(JOBS, "wait"), num_ranks=2, log_dir=str(tmp_path / "run"))
    outcome = Supervisor(Interrupting()).run(job)
    # The first rank may exist by the time that the signal is read; no second one is started.
    assert (outcome.exit_code, outcome.verdict.kind, len(outcome.affected) <= 1) == (
        143,
        "interrupted",
        True,
    )


def test_only_the_main_thread_may_launch(run):
    errors = []

    def launch() -> None:
        with pytest.raises(ConfigError, match=r"Call Supervisor.run\(\) from the main thread"):
            run("environment")
        errors.append("refused")

    thread = threading.Thread(target=launch, name="not-main")
    thread.start()
    thread.join()
    assert errors == ["refused"]


def test_limits_of_the_system_are_told_and_nothing_is_left(run):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 30, hard))
    try:
        with pytest.raises(ConfigError, match=r"cannot start rank \d+ of 20: Too many open files"):
            run("wait", "deaf", n=20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_handlers_of_the_program_are_restored(run):
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    run("environment", n=1)
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)] == before


def test_spawn_runs_a_function_by_its_name(tmp_path, console):
    outcome = spawn(
        os.path.join, 2, ["a", "b"], console=console, log_dir=str(tmp_path / "run"), grace_s=0.2
    )
    assert (outcome.exit_code, outcome.verdict.kind) == (0, "finished")


def test_a_spawned_function_prints_no_warning(tmp_path, console, monkeypatch):
    (tmp_path / "job_of_mine.py").write_text("def work(*words):\n    print(*words)\n")
    monkeypatch.syspath_prepend(tmp_path)
    work = __import__("job_of_mine").work
    spawn(work, 1, ["a", 2], console=console, log_dir=str(tmp_path / "run"))
    assert console.lines == [(0, 1, b"a 2")]


def test_a_spawned_function_gets_its_struct(tmp_path, console, monkeypatch):
    text = "import msgspec\nclass Size(msgspec.Struct):\n    width: int\n"
    text += "def show(size: Size, other: dict):\n    print(size.width, other)\n"
    (tmp_path / "job_of_mine_with_a_struct.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    module = __import__("job_of_mine_with_a_struct")
    arguments = [module.Size(3), {"width": 4}]
    spawn(module.show, 1, arguments, console=console, log_dir=str(tmp_path / "run"))
    assert console.lines == [(0, 1, b"3 {'width': 4}")]


def test_what_a_spawned_function_returns_is_kept_or_printed(tmp_path, console, monkeypatch):
    text = "import os\ndef keep():\n    return [1, 2] if os.environ['RANK'] == '0' else None\n"
    text += "def show():\n    yield {'a': 1}\n    yield {'b': 2}\n"
    (tmp_path / "job_of_mine_with_results.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    module = __import__("job_of_mine_with_results")
    file = tmp_path / "results.json"
    spawn(module.keep, 2, console=console, results=file, log_dir=str(tmp_path / "kept"))
    assert json.loads(file.read_text()) == [1, 2]
    spawn(module.show, 1, console=console, log_dir=str(tmp_path / "shown"))
    assert console.lines == [(0, 1, b'{"a":1}'), (0, 1, b'{"b":2}')]


def test_spawn_refuses_what_a_rank_cannot_find(tmp_path):
    with pytest.raises(ConfigError, match="to the top level of a module"):
        spawn(lambda: None, 2)
    with pytest.raises(ConfigError, match="cannot be sent as JSON"):
        spawn(os.path.join, 2, [object()])


class Cli:
    """`braid run` as a person starts it."""

    def __init__(self, tmp_path: Path, *arguments: str) -> None:
        # The test may itself be run in the background, or by nohup, where these are ignored.
        reset = "signal.signal(signal.SIGINT, signal.default_int_handler); "
        reset += "signal.signal(signal.SIGHUP, signal.SIG_DFL); "
        code = f"import signal, sys; {reset}from braid.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", code, "run", "--log-dir", str(tmp_path / "run")]
        self.process = subprocess.Popen(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def pids(self, count: int) -> list[int]:
        """Wait until `count` ranks have said their pid."""
        said = [self.process.stdout.readline() for _ in range(count)]
        return [int(line.rpartition("pid ")[2]) for line in said]

    def end(self) -> tuple[int, str]:
        _, err = self.process.communicate(timeout=200)
        return self.process.returncode, err


@pytest.mark.parametrize(
    ("signum", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_are_forwarded_and_give_the_exit_code(tmp_path, signum, exit_code):
    cli = Cli(tmp_path, "-n", "2", JOBS, "wait", "handled")
    cli.pids(2)
    cli.process.send_signal(signum)
    found, err = cli.end()
    assert (found, "braid: run interrupted" in err) == (exit_code, True)


def test_ctrl_c_ends_with_the_block_and_no_traceback(tmp_path):
    cli = Cli(tmp_path, "-n", "2", JOBS, "wait", "handled")
    cli.pids(2)
    cli.process.send_signal(signal.SIGINT)
    _, err = cli.end()
    after = err[err.index("passing it on") :].splitlines()
    assert after[1].startswith("braid: run interrupted")
    assert after[-1] == f"  logs     {tmp_path / 'run'}/"
    assert "KeyboardInterrupt" in (tmp_path / "run/rank1.log").read_text()


def test_a_second_ctrl_c_kills(tmp_path):
    cli = Cli(tmp_path, "-n", "2", JOBS, "wait", "deaf")
    cli.pids(2)
    cli.process.send_signal(signal.SIGINT)
    while "passing it on" not in cli.process.stderr.readline():
        pass
    cli.process.send_signal(signal.SIGINT)
    found, err = cli.end()
    assert (found, "ranks 0,1 did not stop when asked, killed by braid" in err) == (130, True)


def test_ranks_die_with_a_killed_launcher(tmp_path):
    cli = Cli(tmp_path, "-n", "2", JOBS, "wait", "deaf")
    pidfds = [os.pidfd_open(pid) for pid in cli.pids(2)]
    cli.process.kill()
    gone = [bool(select.select([fd], [], [], 10)[0]) for fd in pidfds]
    for fd in pidfds:
        os.close(fd)
    assert (gone, cli.end()[0]) == ([True, True], -9)


@pytest.mark.parametrize("words", [["run", "nix.py"], ["train", "--steps", "0"]])
def test_the_command_imports_no_torch(tmp_path, words):
    code = f"import sys; from braid.cli import main; main({words}); print('torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert found.stdout == "False\n"


PLAIN_TORCH = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(x)
print("sum", x.item())
dist.destroy_process_group()
"""


def test_a_plain_torch_program_runs_unchanged(tmp_path, console):
    script = tmp_path / "plain.py"
    script.write_text(PLAIN_TORCH)
    job = JobSpec(command=(str(script),), num_ranks=2, log_dir=str(tmp_path / "run"))
    outcome = Supervisor(console).run(job)
    assert (outcome.exit_code, lines(console, 0)[-1:]) == (0, ["sum 3.0"])  # after those of Gloo


V1_MEMORY = Path("/sys/fs/cgroup/memory")


@pytest.mark.root
@pytest.mark.skipif(
    os.geteuid() != 0 or not (V1_MEMORY / "memory.limit_in_bytes").exists(),
    reason="needs root and a memory cgroup of version 1",
)
def test_a_kill_for_memory_is_told_from_other_kills(tmp_path):
    group = V1_MEMORY / f"braid-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as exc:
        pytest.skip(f"cannot make a memory cgroup: {exc.strerror}")
    try:
        (group / "memory.limit_in_bytes").write_text(str(96 << 20))
        inside = (
            f"echo $$ > {group}/cgroup.procs; exec {sys.executable} -m braid run -n 2 --grace 0.2"
        )
        found = subprocess.run(
            ["sh", "-c", f"{inside} --log-dir {tmp_path}/run {JOBS} eat"],
            check=False,
            capture_output=True,
            text=True,
        )
    finally:
        group.rmdir()
    assert found.returncode == 137
    assert "killed by the kernel for memory (cgroup limit 101 MB, peak 101 MB)" in found.stderr


GLOO = "import torch.distributed as d; d.init_process_group('gloo'); d.destroy_process_group()"


@pytest.mark.parametrize(
    ("program", "is_told"),
    [("import torch", True), ("import torch; raise ValueError", False), (GLOO, False)],
    ids=["alone", "raises", "gloo"],
)
def test_ranks_that_never_communicate_are_one_line(tmp_path, console, program, is_told):
    script = tmp_path / "train.py"
    script.write_text(program + "\n")
    job = JobSpec(command=(str(script),), num_ranks=2, log_dir=str(tmp_path / "run"))
    Supervisor(console).run(job)
    logs = [(tmp_path / "run" / f"rank{rank}.log").read_text() for rank in (0, 1)]
    line = "braid: each of 2 ranks ran the whole program, and the ranks never communicated"
    assert [line in text for text in logs] == [is_told, False]
