"""Remote calls between hosts: programs run unchanged, and a host that is cut off fails its calls."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
CUT = """
import os, sys, time
from pathlib import Path
from braid import rpc
from braid.errors import CommTimeout, PeerLostError

here, rank = Path(sys.argv[1]), int(os.environ["RANK"])


def sleep_long():
    (here / "cut").write_text("")
    time.sleep(6)


def echo(x):
    return x


if __name__ == "__main__":
    rpc.init_rpc(f"w{rank}")
    if rank == 0:
        assert rpc.rpc_sync("w1", echo, (1,)) == 1
        try:
            rpc.rpc_sync("w1", sleep_long, timeout=3)
        except (CommTimeout, PeerLostError) as exc:
            print("failed:", exc, flush=True)
        (here / "heal").write_text("")
        time.sleep(4)
        print("again", rpc.rpc_sync("w1", echo, (2,)), flush=True)
    rpc.shutdown()
"""


def test_programs_of_calls_run_on_several_hosts(lab, tmp_path):
    hosts = lab(2)
    roles = ("--role", "ps:1", "--role", "trainer:2")
    script = str(EXAMPLES / "rpc_parameter_server.py")
    done = hosts.run("-H", "a:2,b:1", *roles, script, cwd=tmp_path)
    assert done.code == 0, done.text
    assert "equal one process: True" in done.out
    assert "310 pushes" in done.out


@pytest.mark.proof
def test_calls_to_a_host_that_is_cut_off_fail_and_later_ones_do_not(lab, tmp_path):
    hosts = lab(2)
    script = tmp_path / "job.py"
    script.write_text(CUT)

    def strike() -> None:
        for name, state in (("cut", "down"), ("heal", "up")):
            until_s = time.monotonic() + 60
            while not (tmp_path / name).exists() and time.monotonic() < until_s:
                time.sleep(0.01)
            hosts.ip("link", "set", hosts.port("b"), state)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        done = hosts.run("-H", "a:1,b:1", str(script), str(tmp_path), cwd=tmp_path)
    finally:
        for name in ("cut", "heal"):
            (tmp_path / name).write_text("")
        thread.join()
    assert done.code == 0, done.text
    assert "failed: w1 did not answer __main__:sleep_long in time" in done.out
    assert "again 2" in done.out
