"""Claims of braid.launch.process.job, memory and the command line: what cannot work is refused before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.cli import main, separate_command
from braid.errors import ConfigError
from braid.launch import JobSpec
from braid.launch.process.job import (
    MEMORY_VARIABLES,
    check_command,
    choose_threads,
    command_line,
    rank_environ,
)
from braid.launch.process.oom import OomMonitor, parse_counter, parse_limit
from braid.runtime.diagnose.verdict import MemoryKill
from braid.runtime.rendezvous import JobEnvironment


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_ranks": 0}, "number of ranks must be 1 to 4096, got 0"),
        ({"command": ()}, "there is no program to run"),
        ({"port": 70_000}, "port must be 1 to 65535 or auto, got 70000"),
        ({"threads": 0}, "threads must be at least 1, got 0"),
        ({"timeout_s": 0.0}, "timeout must be more than 0 s, got 0 s"),
        ({"grace_s": float("nan")}, "grace_s must be 0 or more, got nan"),
    ],
)
def test_a_job_that_cannot_work_is_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        JobSpec(**{"command": ("train.py",), **change})


def test_all_problems_of_a_job_are_told_together():
    with pytest.raises(ConfigError, match=r"ranks .* got -1;.*port .* got 0;.*threads .* got 0"):
        JobSpec(command=("x",), num_ranks=-1, port=0, threads=0)


def test_a_good_script_passes(script):
    check_command(JobSpec(command=(str(script), "--lr", "1")))


def test_a_syntax_error_is_found_with_its_line(script):
    script.write_text("x = 1\ny = = 2\n")
    with pytest.raises(ConfigError, match=r"not valid Python: invalid syntax +train.py:2\ny = = 2"):
        check_command(JobSpec(command=(str(script),)))


def test_a_script_with_a_null_byte_is_no_python(script):
    script.write_bytes(b"x = 1\0")
    with pytest.raises(ConfigError, match="not valid Python"):
        check_command(JobSpec(command=(str(script),)))


def test_a_missing_script_and_a_directory_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the script .*: No such file"):
        check_command(JobSpec(command=(str(tmp_path / "nix.py"),)))
    with pytest.raises(ConfigError, match="is a directory, not a Python script"):
        check_command(JobSpec(command=(str(tmp_path),)))


def test_programs_must_exist_and_be_executable(script):
    check_command(JobSpec(command=("sh", "-c", "true"), kind="program"))
    with pytest.raises(ConfigError, match=r"train.py is not executable: chmod \+x it"):
        check_command(JobSpec(command=(str(script),), kind="program"))
    with pytest.raises(ConfigError, match="the program no-such-program is not on PATH"):
        check_command(JobSpec(command=("no-such-program",), kind="program"))


def test_modules_are_looked_for_without_importing_them():
    check_command(JobSpec(command=("json.tool",), kind="module"))
    with pytest.raises(ConfigError, match="the Python module 'no_such_module' was not found"):
        check_command(JobSpec(command=("no_such_module.train",), kind="module"))


def test_the_command_line_of_each_kind():
    lines = [
        command_line(JobSpec(command=("t.py", "-n", "9"))),
        command_line(JobSpec(command=("a.b", "x"), kind="module")),
        command_line(
            JobSpec(command=("sh", "-c", "true"), kind="program", environ={"PATH": "/bin"})
        ),
    ]
    assert lines == [
        [sys.executable, "t.py", "-n", "9"],
        [sys.executable, "-m", "a.b", "x"],
        ["/bin/sh", "-c", "true"],
    ]


def test_threads_are_as_given_else_the_users_else_cores_by_ranks():
    given = choose_threads(JobSpec(command=("x",), threads=3, environ={"OMP_NUM_THREADS": "7"}))
    own = choose_threads(JobSpec(command=("x",), environ={"OMP_NUM_THREADS": "7"}))
    count, reason = choose_threads(JobSpec(command=("x",), num_ranks=4000, environ={}))
    assert (given, own, count) == (("3", "as given"), ("7", "from the environment"), "1")
    assert reason.endswith(" / 4000")


@pytest.mark.parametrize(
    ("given", "split"),
    [
        (["-n", "4", "t.py", "-n", "9"], ["-n", "4", "--", "t.py", "-n", "9"]),
        (["-n=4", "t.py"], ["-n=4", "--", "t.py"]),
        (["-n", "2", "-m", "a.b", "--x"], ["-n", "2", "-m", "--", "a.b", "--x"]),
        (["--no-python", "ls", "-l"], ["--no-python", "--", "ls", "-l"]),
        (["--no-compare", "train", "-n", "4"], ["--no-compare", "--", "train", "-n", "4"]),
        (["-n", "2", "--", "t.py", "--"], ["-n", "2", "--", "t.py", "--"]),
        (["--help"], ["--help"]),
        (["-n"], ["-n"]),
        ([], []),
    ],
)
def test_everything_after_the_script_belongs_to_the_script(given, split):
    assert separate_command(given) == split


@given(st.lists(st.sampled_from(["-n", "2", "-m", "--no-python", "--port=1", "t.py", "--", "-x"])))
def test_separating_twice_is_separating_once(words):
    once = separate_command(words)
    assert separate_command(once) == once


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["run"], "there is no program to run: give a script"),
        (["run", "-n", "0", "t.py"], "number of ranks must be 1 to 4096, got 0"),
        (["run", "nix.py"], "cannot read the script nix.py: No such file or directory"),
        (["run", "--port", "x", "t.py"], "--port must be auto or a number, got 'x'"),
        (["run", "-m", "--no-python", "t"], "-m and --no-python exclude each other"),
    ],
)
def test_the_command_refuses_with_one_block_and_exit_code_2(
    capsys, monkeypatch, tmp_path, arguments, problem
):
    monkeypatch.chdir(tmp_path)
    exit_code = main(arguments)
    out, err = capsys.readouterr()
    assert (exit_code, out, list(tmp_path.iterdir())) == (2, "", [])
    assert err.startswith("braid: nothing was started (exit 2)\n  problem  ")
    assert problem in err


V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
V2 = "low 0\nhigh 0\nmax 31\noom 2\noom_kill {}\noom_group_kill 0\n"


@pytest.mark.parametrize(("text", "count"), [(V1, 3), (V2, 3)])
def test_both_generations_count_kills(text, count):
    assert parse_counter(text.format(count)) == count


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("536870912\n", 536870912),
        ("max\n", 0),
        ("9223372036854771712\n", 0),
        ("", 0),
        ("\u0663", 0),
    ],
)
def test_limits_are_read(text, nbytes):
    assert parse_limit(text) == nbytes


@given(st.text())
def test_any_text_of_the_kernel_is_read(text):
    assert (parse_counter(text) >= 0, parse_limit(text) >= 0) == (True, True)


def make_v1(root: Path, kills: int) -> None:
    group = root / "memory" / "job"
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.oom_control").write_text(V1.format(kills))
    (group / "memory.limit_in_bytes").write_text("64000000\n")
    (group / "memory.max_usage_in_bytes").write_text("63000000\n")


def make_v2(root: Path, kills: int) -> None:
    group = root / "job"
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.events").write_text(V2.format(kills))
    (group / "memory.max").write_text("64000000\n")
    (group / "memory.peak").write_text("63000000\n")


@pytest.mark.parametrize(
    ("make", "membership"),
    [(make_v1, "5:cpu:/\n4:memory:/job\n0::/other\n"), (make_v2, "0::/job\n")],
)
def test_a_rising_counter_is_a_kill_and_is_reported_once_per_process(tmp_path, make, membership):
    make(tmp_path, 1)
    watch = OomMonitor(membership, tmp_path)
    before = watch.new_kill()
    make(tmp_path, 3)
    kill = MemoryKill(64_000_000, 63_000_000)
    assert [before, *(watch.new_kill() for _ in range(3))] == [None, kill, kill, None]


def test_a_system_without_groups_sees_no_kill(tmp_path):
    assert OomMonitor("", tmp_path).new_kill() is None


def test_ranks_get_settings_of_memory():
    values = rank_environ({}, JobEnvironment(), "2")
    names = ("THP_MEM_ALLOC_ENABLE", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
    assert [values[name] for name in names] == ["1", "536870912", "33554432"]
    assert values["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize("name", MEMORY_VARIABLES)
def test_a_setting_of_memory_that_the_user_has_made_replaces_all(name):
    values = rank_environ({name: "0"}, JobEnvironment(), "2")
    assert {key: values[key] for key in MEMORY_VARIABLES if key in values} == {name: "0"}
