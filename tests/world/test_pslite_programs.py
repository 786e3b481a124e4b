"""PS-Lite's test programs run: under `braid run`, by hand with its environment, and with losses."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("pslite_program.py")
ROLES = ("BRAID_", "DMLC_", "PS_", "RANK", "WORLD_SIZE")


def _environ(**own: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(ROLES)} | own


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _by_hand(
    servers: int, workers: int, environ: dict[str, str], program: Path = PROGRAM
) -> list[tuple[int, str]]:
    common = _environ(
        DMLC_PS_ROOT_URI="127.0.0.1",
        DMLC_PS_ROOT_PORT=str(_port()),
        DMLC_NUM_SERVER=str(servers),
        DMLC_NUM_WORKER=str(workers),
    )
    roles = ["worker"] * workers + ["server"] * servers + ["scheduler"]
    running = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env=common | {"DMLC_ROLE": role} | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for role in roles
    ]
    try:
        texts = [each.communicate(timeout=200)[0] for each in running]
        return [(each.returncode, text) for each, text in zip(running, texts, strict=True)]
    finally:
        for each in running:
            each.kill()
            each.wait()


@pytest.mark.launcher
def test_the_programs_run_by_hand_though_messages_are_lost():
    drops = {"PS_DROP_MSG": "10", "PS_RESEND": "1", "PS_RESEND_TIMEOUT": "40", "REPEAT": "5"}
    for code, text in _by_hand(1, 1, drops):
        assert code == 0, text
        assert text.endswith("ended\n")
        assert "rank 0 [1, 8, 9] True" in text


@pytest.mark.launcher
@pytest.mark.parametrize("counts", [(1, 1), pytest.param((2, 4), marks=pytest.mark.proof)])
def test_the_programs_run_under_braid_run(tmp_path, counts):
    servers, workers = map(str, counts)
    command = [sys.executable, "-m", "braid", "run", "--servers", servers, "--workers", workers]
    done = subprocess.run(
        [*command, "--log-dir", str(tmp_path / "run"), str(PROGRAM)],
        capture_output=True,
        text=True,
        env=_environ(),
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ended") == 1 + sum(counts)


@pytest.mark.launcher
@pytest.mark.proof
def test_the_programs_run_by_hand_with_several_of_each_and_losses():
    drops = {"PS_DROP_MSG": "10", "PS_RESEND": "1", "PS_RESEND_TIMEOUT": "100"}
    for code, text in _by_hand(2, 3, drops):
        assert code == 0, text
        assert text.endswith("ended\n")
