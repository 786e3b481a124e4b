"""Claim of the launcher: the default way to a host, ssh, works with a real server on loopback."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

JOBS = str(Path(__file__).parents[1] / "netns" / "host_jobs.py")
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")

pytestmark = [
    pytest.mark.sshd,
    pytest.mark.skipif(SSHD is None or shutil.which("ssh") is None, reason="needs ssh and sshd"),
]


@pytest.fixture
def ssh(tmp_path):
    """Words that reach this host through an ssh server of our own."""
    assert SSHD is not None
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)  # fmt: skip
    shutil.copy(tmp_path / "user.pub", tmp_path / "authorized")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = tmp_path / "sshd_config"
    config.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {tmp_path}/host\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"AuthorizedKeysFile {tmp_path}/authorized\nPasswordAuthentication no\nPermitRootLogin yes\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True) if os.geteuid() == 0 else None
    with subprocess.Popen([SSHD, "-D", "-e", "-f", str(config)], stderr=subprocess.PIPE) as server:
        while server.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.02)
        if server.returncode is not None:
            pytest.skip(f"sshd does not start: {server.stderr.read().decode()[-200:]}")
        yield (
            f"ssh -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "
            f"-i {tmp_path}/user -p {port} {{host}}"
        )
        server.terminate()


def run(ssh: str, cwd: Path, *words: str):
    """`braid run` to its end: exit code, stdout, stderr."""
    python = f"env PYTHONPATH={Path(JOBS).parents[2] / 'src'} {sys.executable}"
    command = [sys.executable, "-m", "braid", "run", "--rsh", ssh, "--remote-python", python, *words]  # fmt: skip
    ended = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200, check=False)  # fmt: skip
    return ended.returncode, ended.stdout, ended.stderr


def test_ranks_are_started_through_ssh_in_this_directory(ssh, tmp_path):
    work = tmp_path / "a directory"
    work.mkdir()
    shutil.copy(JOBS, work / "jobs.py")
    code, out, text = run(ssh, work, "-H", "127.0.0.1:1,localhost:2", "jobs.py", "meet")
    said = "all 127.0.0.1 127.0.0.1 127.0.0.1"
    assert sorted(out.splitlines()) == [f"[rank {r}] {said}" for r in range(3)], text
    assert code == 0


def test_a_rank_that_dies_behind_ssh_is_named_and_nothing_is_left(ssh, tmp_path):
    code, _, text = run(
        ssh, tmp_path, "-H", "127.0.0.1,localhost", "--grace", "0.3", JOBS, "fail", "kill"
    )
    pids = [int(p) for r in range(2) for p in (tmp_path / f"here-{r}").read_text().split()]
    assert "cause    rank 1 on host localhost (pid " in text
    assert (code, [pid for pid in pids if Path(f"/proc/{pid}").exists()]) == (137, [])


def test_what_ssh_says_of_a_host_is_passed_on(ssh, tmp_path):
    code, _, text = run(ssh, tmp_path, "-H", "nowhere.invalid", JOBS, "place")
    assert "ended with exit code 255: ssh: Could not resolve hostname nowhere.invalid" in text
    assert code == 2
