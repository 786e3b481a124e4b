"""Claims of braid.compat.horovod's launcher and of its alias, with real processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import horovod_jobs as jobs
import pytest

import braid
from braid.compat import horovod
from braid.compat.horovod.launcher import function_rank, run_function
from braid.compat.horovod.launcher.function_rank import read_private, write_private
from braid.compat.horovod.launcher.horovodrun import is_own_python, main
from braid.compat.horovod.launcher.run_function import RunError
from braid.errors import ConfigError

pytestmark = [pytest.mark.procs, pytest.mark.launcher]
JOBS = str(Path(jobs.__file__))
FAKES = Path(__file__).parents[1] / "fakes/bin"
ALIAS = Path(__file__).parents[2] / "packages/horovod-alias"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # runs leave their logs in ./runs
    for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
        monkeypatch.delenv(name)


FAKE_SSH = """#!/bin/sh
echo "$@" >> {log}
while [ "${{1#-}}" != "$1" ]; do shift 2; done
shift
exec sh -c "$*"
"""


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """A command `ssh` that reaches any host, which is this one; the file that tells how it was called."""
    log = tmp_path / "ssh.log"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ssh").write_text(FAKE_SSH.format(log=log))
    (tmp_path / "bin/ssh").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return log


def lines(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if line.startswith("["))


# The command


def test_a_script_runs_on_all_ranks_with_its_arguments_and_variables(capfd, tmp_path):
    (tmp_path / "c.yaml").write_text("params:\n  cycle-time-ms: 3\n  cache-capacity: 5\n")
    told = ["--config-file", "c.yaml", "--cache-capacity", "7", "--output-filename", "out"]
    assert main(["-np", "2", *told, sys.executable, JOBS, "--lr", "1"]) == 0
    expected = "['--lr', '1'] {'HOROVOD_CACHE_CAPACITY': '7', 'HOROVOD_CYCLE_TIME': '3'}"
    found = [f"[rank {rank}] {expected} {rank}/2/{rank}/2/0/1" for rank in range(2)]
    assert lines(capfd.readouterr().out) == found
    assert (tmp_path / "out/rank1.log").read_text().strip().endswith(found[1][9:])


def test_hosts_of_a_file_are_used_and_variables_go_there(capfd, tmp_path):
    (tmp_path / "hosts").write_text("\ufefflocalhost slots = 2  # this one\n")
    options = ["--verbose", "--prefix-output-with-timestamp", "--cycle-time-ms", "3"]
    assert main(["--hostfile", "hosts", *options, sys.executable, JOBS]) == 0
    found = capfd.readouterr()
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"
    expected = re.escape("[] {'HOROVOD_CYCLE_TIME': '3'}")
    assert [
        re.fullmatch(rf"\[rank {rank}\] {stamp} {expected} {rank}/2/{rank}/2/0/1", line) is not None
        for rank, line in enumerate(lines(found.out))
    ] == [True, True]
    told = "HOROVOD_CYCLE_TIME=3 braid run --hostfile hosts --env HOROVOD_CYCLE_TIME"
    assert f"braid: the same as: {told} {JOBS}\n" in found.err


def test_hosts_are_reached_through_ssh_with_its_port_and_key(ssh, capfd):
    options = ["-np", "2", "-H", "a:1,b:1", "-p", "2222", "-i", "key", "--no-stall-check"]
    assert main([*options, sys.executable, JOBS]) == 0
    expected = "[] {'HOROVOD_STALL_CHECK_DISABLE': '1'}"
    found = [f"[rank {rank}] {expected} {rank}/2/0/1/{rank}/2" for rank in range(2)]
    assert lines(capfd.readouterr().out) == found
    called = sorted(
        line.partition(f" {sys.executable} ")[0] for line in ssh.read_text().splitlines()
    )
    assert [line.split()[-5:] for line in called] == [
        ["-p", "2222", "-i", "key", host] for host in ("a", "b")
    ]


def test_mpirun_starts_ranks_with_their_variables(capfd, monkeypatch):
    monkeypatch.setenv("PATH", f"{FAKES}:{os.environ['PATH']}")
    options = ["-np", "2", "--mpi", "--mpi-args=--oversubscribe", "--cycle-time-ms", "3"]
    assert main([*options, sys.executable, JOBS]) == 0
    found = [
        f"[rank {rank}] [] {{'HOROVOD_CYCLE_TIME': '3'}} {rank}/2/{rank}/2/0/1" for rank in (0, 1)
    ]
    assert lines(capfd.readouterr().out) == found


def test_the_exit_code_is_that_of_the_causing_rank(capfd):
    assert main(["-np", "2", sys.executable, JOBS, "fail"]) == 3
    assert "cause    rank 1" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["-np", "2", "--config-file", "no", "x.py"], "configuration file no cannot be read: No such"),
        (["-np", "2", "--config-file", "bad", "x.py"], "bad is not valid YAML: "),
        (["-np", "2", "--hostfile", "no", "x.py"], "file of hosts no cannot be read: No such"),
        (["-np", "2", "x.py"], "cannot read the script x.py"),
        (["-np", "2", "./x"], "the program ./x is not on PATH"),
    ],
)  # fmt: skip
def test_what_cannot_start_ends_with_2(arguments, problem, capfd):
    Path("bad").write_text("a: [1")
    code, found = main(arguments), capfd.readouterr()
    assert (code, found.out, problem in " ".join(found.err.split())) == (2, "", True)


def test_help_version_and_build_are_answered(capfd):
    assert [main(["--help"]), main(["--version"]), main(["-cb"])] == [0, 0, 0]
    found = capfd.readouterr().out
    assert found.startswith("usage: horovodrun")
    assert f"\n{braid.__version__}\n" in found
    assert "[ ] TensorFlow" in found


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "braid.compat.horovod.run", "--version"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (found.stdout, found.stderr) == (f"{braid.__version__}\n", "")


def test_only_the_interpreter_of_this_environment_is_our_own(tmp_path, monkeypatch):
    other = tmp_path / "python3"
    other.symlink_to(Path(sys.executable).resolve())  # of another environment, perhaps
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [is_own_python(w) for w in (sys.executable, "python", "python3", str(other))] == [
        True, True, False, False,
    ]  # fmt: skip


# The function


def test_results_come_in_the_order_of_ranks(monkeypatch):
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "4")
    found = horovod.run(jobs.told, args=(5,), kwargs={"b": "x"}, np=3)
    assert found == [(rank, 3, 5, "x", "4") for rank in range(3)]


def test_one_rank_is_the_default_and_num_proc_another_name():
    assert horovod.run(jobs.told, (1,)) == [(0, 1, 1, "", "")]
    assert len(horovod.run(jobs.told, (1,), num_proc=2, hosts="localhost:2")) == 2
    with pytest.raises(ConfigError, match="--num-proc has two values, 1 and num_proc=2"):
        horovod.run(jobs.told, (1,), np=1, num_proc=2)


def test_named_hosts_have_as_many_ranks_as_slots():
    assert len(horovod.run(jobs.told, (1,), hosts="localhost:2")) == 2


def test_a_closure_travels_with_cloudpickle():
    pytest.importorskip("cloudpickle")
    base = 40
    assert horovod.run(lambda x: base + x, args=(2,), np=2) == [42, 42]


def test_an_interpreter_can_be_named():
    assert horovod.run(jobs.told, (1,), executable=sys.executable) == [(0, 1, 1, "", "")]


LIBRARIES = ((os, 0), (pytest, 1))
FAKE_PYTHON = """#!/bin/sh
echo "$PYTHONPATH" > {log}
exec {python} "$@"
"""


def test_another_interpreter_is_not_given_the_libraries_of_this_one(tmp_path):
    other, log = tmp_path / "python3", tmp_path / "path"
    other.write_text(FAKE_PYTHON.format(log=log, python=sys.executable))
    other.chmod(0o700)
    assert horovod.run(jobs.told, (1,), executable=str(other)) == [(0, 1, 1, "", "")]
    given = log.read_text().strip().split(os.pathsep)
    assert str(Path(JOBS).parent) in given
    assert not {str(Path(module.__file__).parents[n]) for module, n in LIBRARIES} & set(given)


def test_what_a_rank_raises_is_the_cause_of_an_error_with_its_rank():
    with pytest.raises(RunError, match="rank 1: KeyError: 'shard-7'") as caught:
        horovod.run(jobs.fail_on_rank_1, args=("raise",), np=2)
    assert (caught.value.rank, repr(caught.value.__cause__)) == (1, "KeyError('shard-7')")
    assert "horovod_jobs.py" in str(caught.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("two parts", "rank 1: horovod_jobs.TwoPartsError: shard\n"),
        ("kill", "killed by signal 9"),
        ("leave", "rank 1: SystemExit: 0"),
        ("vanish", "rank 1 ended without a result"),
        ("lock", "result of the function cannot be pickled, got lock"),
    ],
)
def test_a_rank_without_a_result_is_named(how, message):
    with pytest.raises(RunError, match=re.escape(message)) as caught:
        horovod.run(jobs.fail_on_rank_1, args=(how,), np=2)
    assert caught.value.rank == 1


def test_the_function_lies_where_nobody_else_can_touch_it_and_is_gone_afterwards(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    assert horovod.run(jobs.modes, shared_directory=shared) == [["drwx------", "-rw-------"]]
    assert list(shared.iterdir()) == []


def test_a_function_may_leave_the_directory_that_the_shared_one_is_relative_to(tmp_path):
    Path("shared").mkdir()
    assert horovod.run(os.chdir, ("/",), shared_directory="shared") == [None]
    assert list(Path("shared").iterdir()) == []


def test_functions_are_not_sent_to_other_hosts_by_default():
    with pytest.raises(
        ConfigError,
        match=r"ranks on elsewhere.invalid cannot receive the function, which is not sent over",
    ):
        horovod.run(jobs.told, (1,), np=2, hosts="localhost:1,elsewhere.invalid:1")


def test_a_shared_directory_lets_ranks_of_several_hosts_return_results(ssh, tmp_path):
    found = horovod.run(jobs.told, (1,), np=2, hosts="a:1,b:1", shared_directory=tmp_path)
    assert found == [(rank, 2, 1, "", "") for rank in range(2)]
    assert len(ssh.read_text().splitlines()) == 2


@pytest.mark.parametrize("option", ["min_np", "max_np", "slots", "reset_limit", "min_num_proc"])
def test_functions_run_on_a_fixed_number_of_ranks(option):
    with pytest.raises(ConfigError, match="with a function, which needs a fixed number of ranks"):
        horovod.run(jobs.told, (1,), **{option: 2})


def test_without_cloudpickle_a_function_without_a_module_is_refused(monkeypatch):
    import pickle

    monkeypatch.setattr(run_function, "dumps", pickle.dumps)
    with pytest.raises(ConfigError, match="is not a function at the top level of a module"):
        horovod.run(lambda: 1)
    with pytest.raises(ConfigError, match=r"its arguments cannot be pickled.*installs cloudpickle"):
        horovod.run(jobs.told, (lambda: 1,))


def test_a_file_that_others_can_write_is_not_read(tmp_path):
    path = tmp_path / "function.pickle"
    write_private(path, b"x")
    assert (read_private(path), path.stat().st_mode & 0o777) == (b"x", 0o600)
    path.chmod(0o620)
    with pytest.raises(ConfigError, match=r"alone can write, got user .* and mode -rw--w----"):
        read_private(path)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        read_private(link)


def test_the_name_run_stays_the_function():
    code = (
        "import braid.compat.horovod.run as one; from braid.compat import horovod; import braid.compat.horovod.run; "
        "from braid.compat.horovod.launcher.run_function import run; print(one is run, horovod.run is run)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "True True\n"
    with pytest.raises(AttributeError, match="has no attribute 'walk'"):
        horovod.walk  # noqa: B018
    assert function_rank.FUNCTION == "function.pickle"


# The alias

SCRIPT = """
import sys
import horovod

try:
    import horovod.tensorflow
except ImportError as exc:
    print(exc)

try:
    import horovod.runner.util.network
except ModuleNotFoundError as exc:
    print(exc.name)

def train(x):
    return x + 1

if __name__ == "__main__":
    import horovod.runner
    print(horovod.run(train, args=(1,), np=2), horovod.run is horovod.runner.run)
"""
TORCH_SCRIPT = """
import torch
import horovod.torch as hvd

hvd.init()
print(hvd.rank(), hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum).tolist())
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the alias."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    how = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(folder), str(ALIAS)]
    subprocess.run([*pip, *how], check=True, capture_output=True)
    return folder


def test_unmodified_programs_find_horovod(installed, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    found = subprocess.run(
        [sys.executable, "script.py"],
        check=False,
        env=_with(installed),
        capture_output=True,
        text=True,
    )
    assert (found.stdout, found.returncode) == (
        (
            "there is no horovod.tensorflow: braid's front for Horovod's users is for PyTorch alone\n"
            "horovod.runner.util\n[2, 2] True\n"
        ),
        0,
    ), found.stderr


def test_horovodrun_is_installed_with_it(installed):
    command = [str(installed / "bin/horovodrun"), "-np", "2", "echo", "here"]
    found = subprocess.run(
        command, check=False, env=_with(installed), capture_output=True, text=True
    )
    assert (lines(found.stdout), found.returncode) == (["[rank 0] here", "[rank 1] here"], 0)


def test_the_front_for_torch_is_one_module_under_two_names(installed, tmp_path):
    pytest.importorskip("braid.compat.horovod.torch")
    (tmp_path / "script.py").write_text(TORCH_SCRIPT)
    code = (
        "import horovod.torch, braid.compat.horovod.torch as b; print(horovod.torch is b)\n"
        "from horovod.common.util import extension_available, gloo_built, mpi_built\n"
        "from horovod.common.process_sets import ProcessSet\n"
        "from horovod.common.exceptions import HorovodInternalError\n"
        "from horovod.torch.mpi_ops import allreduce\n"
        "print(extension_available('torch'), gloo_built(), mpi_built(), allreduce is b.allreduce,\n"
        "      ProcessSet is b.ProcessSet, HorovodInternalError is b.HorovodInternalError)"
    )
    same = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        env=_with(installed),
        capture_output=True,
        text=True,
    )
    assert same.stdout == "True\nTrue True False True True True\n", same.stderr
    command = [str(installed / "bin/horovodrun"), "-np", "2", sys.executable, "script.py"]
    found = subprocess.run(
        command, check=False, env=_with(installed), capture_output=True, text=True
    )
    assert lines(found.stdout) == ["[rank 0] 0 [3.0]", "[rank 1] 1 [3.0]"], found.stderr


def _with(folder: Path) -> dict[str, str]:
    paths = [str(folder), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
