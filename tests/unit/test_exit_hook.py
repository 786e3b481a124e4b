"""Claims of braid.runtime.rendezvous.exit_hook: what ends a process by `sys.exit` is known at once, and exactly."""

from __future__ import annotations

import builtins
import subprocess
import sys

import pytest

from braid.runtime.rendezvous.exit_hook import ExitHook

PROGRAM = """
import atexit, importlib.util, pickle, sys, threading
spec = importlib.util.spec_from_file_location("exit_hook", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
hook = module.ExitHook(lambda code, handled: print("exit", code, repr(handled)))
atexit.register(print, "atexit")

def main():
    try:
        sys.exit(9)
    except SystemExit as exc:
        assert type(pickle.loads(pickle.dumps(exc))) is SystemExit
    thread = threading.Thread(target=sys.exit, args=(8,))
    thread.start()
    thread.join()
    exec(sys.argv[2])

main()
"""


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ("sys.exit(3)", 3, "exit 3 None\natexit\n"),
        ("exit(-1)", 255, "exit 255 None\natexit\n"),
        ("try: {}[0]\nexcept KeyError: sys.exit('no data')", 1, "exit 1 KeyError(0)\natexit\n"),
        ("try: sys.exit(3)\nexcept SystemExit: raise", 3, "exit 3 None\natexit\n"),
        ("try: sys.exit(3)\nexcept SystemExit: pass", 0, "atexit\n"),
        ("sys.exit()", 0, "exit 0 None\natexit\n"),
    ],
)
def test_the_exit_that_ends_the_process_is_told_before_the_shutdown(line, code, told):
    path = sys.modules[ExitHook.__module__].__file__
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, path, line], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (code, told), done.stderr
    assert done.stderr.replace("no data\n", "") == ""


def test_a_closed_hook_leaves_nothing_behind():
    before = sys.exit, builtins.exit
    hook = ExitHook(print)
    assert sys.exit is not before[0]
    with pytest.raises(SystemExit) as caught:
        sys.exit(4)
    assert caught.value.code == 4
    hook.close()
    assert (sys.exit, builtins.exit) == before
