"""Claims of braid.cli: help and mistakes are about the command that was typed."""

from __future__ import annotations

import pytest

from braid.cli import COMMANDS, main


def exit_and_output(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    try:
        code = main(arguments)
    except SystemExit as exc:
        code = int(exc.code or 0)
    found = capsys.readouterr()
    return code, found.out + found.err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_that_of_the_command_and_tells_each_default_once(command, capsys):
    code, text = exit_and_output([*command.split(), "--help"], capsys)
    assert (code, text.split("\n")[0].startswith(f"usage: braid {command} ")) == (0, True)
    assert "None" not in text


def test_a_family_of_commands_lists_its_own_only(capsys):
    code, text = exit_and_output(["checkpoint", "--help"], capsys)
    assert (code, text.split("\n")[0]) == (0, "usage: braid checkpoint [-h] {ls,verify}")


@pytest.mark.parametrize("arguments", [[], ["nope"]])
def test_without_a_known_command_all_are_listed(arguments, capsys):
    code, text = exit_and_output(arguments, capsys)
    flat = " ".join(text.replace("│", " ").split())
    assert (code, all(command in flat for command in COMMANDS)) == (2, True)


def test_an_unknown_option_points_at_the_help_of_its_command(capsys):
    code, text = exit_and_output(["run", "--nope", "train.py"], capsys)
    assert (code, "braid run --help" in text, "report" in text) == (2, True, False)


def test_a_directory_that_is_not_there_is_not_an_empty_one(tmp_path, capsys):
    code, text = exit_and_output(["checkpoint", "ls", str(tmp_path / "x")], capsys)
    assert (code, f"found none at {tmp_path / 'x'}" in text) == (2, True)
    code, text = exit_and_output(["checkpoint", "ls", str(tmp_path)], capsys)
    assert (code, text) == (1, f"no checkpoints in {tmp_path}\n")
