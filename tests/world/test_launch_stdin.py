"""`braid run --stdin RANK`: one rank has the standard input, and the terminal if there is one."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from braid.errors import ConfigError
from braid.launch import JobSpec

BREAKPOINT = """
import sys
import torch
import braid
group = braid.init()
numbers = torch.full([2], float(group.rank + 1))
if group.rank == 1:
    secret = 41
    breakpoint()
group.all_reduce(numbers, timeout_s=0.2)
# one write: several ranks write to this terminal, and lines of others may come between two writes
sys.stdout.write(f"sum {numbers.tolist()} {sys.stdin.isatty()}\\n")
sys.stdout.flush()
"""
LIMIT_S = 60


def run_in_terminal(command: list[str], replies: list[tuple[bytes, bytes]]) -> tuple[int, str]:
    """Run a command in a terminal of its own; type each reply when its prompt has appeared."""
    pid, terminal = pty.fork()
    if pid == 0:  # the child
        os.execv(command[0], command)
    shown, began, waiting = b"", 0, list(replies)
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 0.1)[0]:
            continue
        try:
            chunk = os.read(terminal, 1 << 16)
        except OSError:  # the last process with this terminal has ended
            break
        shown += chunk
        if waiting and waiting[0][0] in shown[began:]:
            began = len(shown)
            time.sleep(0.5)  # longer than the deadline of the collective that others wait in
            os.write(terminal, waiting.pop(0)[1])
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()


def braid_run(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "braid", "run", *arguments]


def test_a_rank_debugs_in_the_terminal_and_deadlines_wait(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BREAKPOINT)
    command = braid_run("-n", "2", "--stdin", "1", "--log-dir", str(tmp_path / "run"), str(script))
    code, shown = run_in_terminal(command, [(b"(Pdb) ", b"p secret + 1\n"), (b"(Pdb) ", b"c\n")])
    assert code == 0, shown
    assert "rank 1 has the terminal" in shown
    assert "\n42" in shown.replace("\r", "")
    assert "sum [3.0, 3.0] True" in shown, repr(shown)  # rank 1, without a prefix
    assert re.search(r"\[rank 0\]\S* sum \[3.0, 3.0\] False", shown)
    assert (tmp_path / "run" / "rank0.log").read_text() == "sum [3.0, 3.0] False\n"


def test_ctrl_c_reaches_the_rank_once_and_ends_the_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, time\n"
        "try:\n    print('ready', flush=True); time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('saving', flush=True); time.sleep(1)\n"
        "    print('saved', flush=True)\n"
    )
    command = braid_run("-n", "1", "--stdin", "0", "--log-dir", str(tmp_path / "run"), str(script))
    code, shown = run_in_terminal(command, [(b"ready", b"\x03")])
    assert code == 130, shown
    assert "saved" in shown, "a second interrupt came while the rank saved"


def test_input_that_is_no_terminal_goes_to_one_rank(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys, os\nprint(os.environ['RANK'], repr(sys.stdin.read()))\n")
    command = braid_run("-n", "2", "--stdin", "1", "--log-dir", str(tmp_path / "run"), str(script))
    ended = subprocess.run(
        command, input="7\n", capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["[rank 0] 0 ''", "[rank 1] 1 '7\\n'"]
    assert (tmp_path / "run" / "rank1.log").read_text() == "1 '7\\n'\n"


def test_a_prompt_without_a_terminal_points_to_the_option(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nif os.environ['RANK'] == '1':\n    breakpoint()\nprint()\n")
    command = braid_run("-n", "2", "--log-dir", str(tmp_path / "run"), str(script))
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False, input=""
    )
    assert "BdbQuit" in ended.stderr
    assert "start with `braid run --stdin 1`" in ended.stderr


def test_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the rank of --stdin must be 0 to 1, got 2"):
        JobSpec(command=("train.py",), num_ranks=2, stdin_rank=2)


def test_several_hosts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    command = braid_run("--stdin", "0", "-H", "a:1,b:1", str(tmp_path / "train.py"))
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False, input=""
    )
    assert ended.returncode == 2
    assert "--stdin 0 needs a job on this host" in ended.stderr
