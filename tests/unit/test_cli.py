"""Claims of braid.cli: help and mistakes are about the command that was typed."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from braid.cli import COMMANDS, main
from braid.cli.command_line import Lazy
from braid.cli.commands.overview import GROUPS
from braid.launch import JobSpec, Supervisor


def exit_and_output(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    try:
        code = main(arguments)
    except SystemExit as exc:
        code = int(exc.code or 0)
    found = capsys.readouterr()
    return code, found.out + found.err


def test_commands_that_are_imported_late_are_listed_with_their_own_words():
    for command in COMMANDS.values():
        if isinstance(command, Lazy):
            target = command.load()
            doc = target.__doc__ if callable(target) else target.options.__doc__
            assert doc.split("\n\n")[0] == command.summary


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_that_of_the_command_and_tells_each_default_once(command, capsys):
    code, text = exit_and_output([*command.split(), "--help"], capsys)
    assert (code, text.split("\n")[0].startswith(f"usage: braid {command} ")) == (0, True)
    assert "None" not in text


def test_a_family_of_commands_lists_its_own_only(capsys):
    code, text = exit_and_output(["checkpoint", "--help"], capsys)
    assert (code, text.split("\n")[0]) == (
        0,
        "usage: braid checkpoint {ls,verify,export,reshard} [OPTIONS ...]",
    )
    assert "List, verify, export" in text
    assert "bench" not in text


@pytest.mark.parametrize(
    ("arguments", "exit_code"), [([], 2), (["qqq"], 2), (["--help"], 0), (["-h"], 0)]
)
def test_without_a_known_command_all_are_listed(arguments, exit_code, capsys):
    code, text = exit_and_output(arguments, capsys)
    assert (code, all(command in text for command in COMMANDS)) == (exit_code, True)


def test_every_command_is_in_one_group_of_the_help(capsys):
    _, text = exit_and_output(["--help"], capsys)
    assert [text.count(f"\n  {command}  ") for command in COMMANDS] == [1] * len(COMMANDS)
    assert sorted({command.split()[0] for command in COMMANDS}) == sorted(sum(GROUPS.values(), ()))
    assert "--version" in text
    assert max(map(len, text.split("\n"))) <= 80


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [(["runn"], "did you mean run?"), (["bench", "com"], "did you mean bench comm?"),
     (["bench", "qqq"], "choose one of bench comm, bench ddp")],
)  # fmt: skip
def test_a_misspelt_command_is_answered_with_the_one_that_may_be_meant(arguments, hint, capsys):
    code, text = exit_and_output(arguments, capsys)
    assert (code, hint in " ".join(text.split())) == (2, True)


def test_an_unknown_option_points_at_the_help_of_its_command(capsys):
    code, text = exit_and_output(["run", "--nope", "train.py"], capsys)
    assert (code, "braid run --help" in text, "report" in text) == (2, True, False)


def test_a_directory_that_is_not_there_is_not_an_empty_one(tmp_path, capsys):
    code, text = exit_and_output(["checkpoint", "ls", str(tmp_path / "x")], capsys)
    assert (code, f"{tmp_path / 'x'} is not a directory of a run" in text) == (2, True)
    code, text = exit_and_output(["checkpoint", "ls", str(tmp_path)], capsys)
    assert (code, text) == (1, f"no checkpoints in {tmp_path}\n")


@pytest.fixture
def closed_pipe():
    """A stream whose reader has gone, as of `| head`."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as stream:
        yield stream


@pytest.fixture
def full_disk():
    with Path("/dev/full").open("w") as stream:
        yield stream


def run_talk(monkeypatch, stream, printed=print):
    """A command that prints to `stream`, as the process's output."""
    monkeypatch.setattr("sys.stdout", stream)
    commands = {"talk": lambda: [printed("word"), 0][1]}
    monkeypatch.setattr("braid.cli.command_line.COMMANDS", commands)
    return main(["talk"])


def print_richly(text):
    Console().print(text)


@pytest.mark.parametrize("printed", [print, print_richly])
def test_a_reader_that_has_gone_ends_every_command_quietly(
    printed, monkeypatch, closed_pipe, capsys
):
    code = run_talk(monkeypatch, closed_pipe, printed)
    assert (code, capsys.readouterr().err) == (141, "")


@pytest.mark.parametrize("printed", [print, print_richly])
def test_a_full_disk_is_told_in_one_block(printed, monkeypatch, full_disk, capsys):
    code = run_talk(monkeypatch, full_disk, printed)
    assert (code, capsys.readouterr().err.split("\n")) == (
        74,
        [
            "braid: stopped (exit 74)",
            "  problem  No space left on device: the standard output",
            "           make room there, or send the output elsewhere",
            "",
        ],
    )


@pytest.mark.parametrize(
    ("words", "mesh", "num_ranks"),
    [([], "pp=2", 2), (["-n", "3"], "pp=3", 3), (["--mesh", "pp=4"], "pp=4", 4)],
)
def test_an_asynchronous_pipeline_has_a_stage_on_each_rank(monkeypatch, words, mesh, num_ranks):
    from types import SimpleNamespace

    from braid.cli import main
    from braid.train import command

    started = []

    def train(config, *, num_ranks, **_others):
        started.append((config.mesh, num_ranks))
        return SimpleNamespace(ok=True, exit_code=0)

    monkeypatch.setattr(command, "train", train)
    assert main(["train", "--versions", "stash", *words]) == 0
    assert started == [(mesh, num_ranks)]


@pytest.mark.parametrize(
    "words",
    [
        ["-n", "3", "--spares=1", "--min-ranks=2", "--restarts=5"],
        ["-n", "5", "--servers=2", "--workers=2", "--replicas=1", "--on-worker-loss=shrink"],
        ["-n", "3", "--role=ps:1", "--role=actor:2", "--expendable-role=actor"],
    ],
)
def test_the_line_that_resumes_repeats_what_ranks_are(monkeypatch, words):
    jobs = []

    class Started(BaseException):
        """Ends the command where it would start ranks."""

    def run(_: object, job: JobSpec) -> None:
        jobs.append(job)
        raise Started

    monkeypatch.setattr(Supervisor, "run", run)
    with pytest.raises(Started):
        main(["run", *words, "train.py"])
    line = shlex.split(jobs[0].resume_line("auto"))
    assert line == ["braid", "run", "--resume", "auto", *words, "train.py"]
