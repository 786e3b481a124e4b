"""Claim of docs/several-machines.md: every command on the page does what the page says, typed as it stands there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "several-machines.md"
CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)
TYPED = re.compile(r"^([ab]?)\$ (.*)$")
TRAIN = """
import os
print("trained", os.environ["RANK"], os.environ["WORLD_SIZE"], flush=True)
"""
# The page's commands reach namespaces: what they call is found here before the real one.
SSH = '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift 2; done\nhost=$1; shift\nexec %s netns exec %s$host sh -c "$*"\n'
IP = '#!/bin/sh\nhost=$3; shift 3\nexec %s netns exec %s$host "$@"\n'
BRAID = '#!/bin/sh\nexec %s -m braid "$@"\n'


def blocks():
    """Each block of commands: what is typed on which machine (empty: where one sits), and what the page shows below it."""
    for text in CONSOLE.findall(PAGE.read_text()):
        typed: list[tuple[str, str, list[str]]] = []
        for line in text.splitlines():
            found = TYPED.match(line)
            if found:
                typed.append((found[1], found[2], []))
            elif line:
                typed[-1][2].append(line)
        yield typed


@pytest.fixture
def machines(lab, tmp_path):
    """Machines a and b with the page's address, and a shell on each: `shell(host, command)`."""
    hosts = lab(2, network="10.0.0")
    shims = tmp_path / "bin"
    shims.mkdir()
    ip = shutil.which("ip")
    for name, text in (
        ("ssh", SSH % (ip, hosts.prefix)),
        ("ip", IP % (ip, hosts.prefix)),
        ("braid", BRAID % sys.executable),
    ):
        (shims / name).write_text(text)
        (shims / name).chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text(TRAIN)
    environ = {**os.environ, "PATH": f"{shims}:{os.environ['PATH']}", "DATA_DIR": "/data"}
    environ["BRAID_SECRET_FILE"] = ""  # until the page says otherwise

    def shell(host: str, command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [ip, "netns", "exec", hosts.prefix + (host or "a"), "bash", "-c", command],
            cwd=work, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    return shell, work, environ


def test_the_page_can_be_followed_word_by_word(machines):
    shell, work, environ = machines
    runs = 0
    for typed in blocks():
        started = []
        for host, command, shown in typed:
            if command.startswith("cat "):
                (work / command.split()[1]).write_text("\n".join(shown) + "\n")
            if command.startswith("export "):
                environ["BRAID_SECRET_FILE"] = str(work / "job.secret")
            started.append((command, shell(host, command)))
            if not host:
                started[-1][1].wait(60)
        said = [(command, *_end(process)) for command, process in started]
        assert [(command, code, out) for command, code, out in said if code] == []
        out = "".join(text for _, _, text in said)
        if "braid run" in out or any("braid run" in command for command, _, _ in said):
            runs += 1
            ranks = [line.split("trained ")[1] for line in out.splitlines() if "trained " in line]
            assert sorted(set(ranks)) == [f"{rank} 4" for rank in range(4)], out
            assert "braid: 4 ranks on " in out
    assert runs == 4


def _end(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=200)
    return process.returncode, out
