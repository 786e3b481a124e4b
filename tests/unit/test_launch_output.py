"""Claims of the launcher's output: complete logs, whole lines, a limit that says what it left out."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.launch import QuietConsole, TerminalConsole
from braid.launch.process.interrupt_filter import Line
from braid.launch.process.output import LAST_LINES, LineBudget, LineSplitter, RankOutput

S = 1_000_000_000


def split(*chunks: bytes) -> list[Line]:
    splitter = LineSplitter()
    return [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.flush()


def test_lines_are_whole_however_they_arrive():
    assert split(b"one\ntw", b"o\n", b"three") == [
        Line(b"one", b"\n"),
        Line(b"two", b"\n"),
        Line(b"three", b""),
    ]


def test_a_carriage_return_ends_a_state_of_a_progress_bar():
    assert split(b"\r10%\r20%", b"\r30%\n") == [
        Line(b"", b"\r"),
        Line(b"10%", b"\r"),
        Line(b"20%", b"\r"),
        Line(b"30%", b"\n"),
    ]


def test_windows_line_ends_are_one_end_even_when_cut():
    assert split(b"a\r", b"\nb\r\n") == [Line(b"a", b"\r\n"), Line(b"b", b"\r\n")]


def test_a_line_without_end_is_passed_on_in_pieces():
    assert [len(line.text) for line in split(b"x" * 70_000, b"x" * 70_000)] == [70_000, 70_000]


INTERRUPT = b"""Traceback (most recent call last):
  File "train.py", line 1, in <module>
    import torch
KeyboardInterrupt
"""
CHAINED = b"""[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 9, in step
[rank1]: KeyboardInterrupt: told to stop
Exception ignored in: <function Pool.__del__ at 0x7f>
Traceback (most recent call last):
  File "pool.py", line 3, in __del__
KeyboardInterrupt:
"""
FAULT = b"""Traceback (most recent call last):
  File "train.py", line 7, in save

ValueError: no room
"""


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"saving\n" + INTERRUPT + CHAINED + b"saved\n", b"saving\nsaved\n"),
        (FAULT + INTERRUPT + FAULT, FAULT + FAULT),
        (b"KeyboardInterrupt caught\n" + FAULT[:60], b"KeyboardInterrupt caught\n" + FAULT[:60]),
    ],
    ids=["interrupts", "faults", "cut"],
)
def test_tracebacks_of_an_interrupt_are_logged_and_not_shown(tmp_path, console, written, shown):
    output = RankOutput(0, tmp_path / "log", console, None)
    output.hide_interrupts()
    output.feed(2, written, 1)
    output.close(2)
    assert [text for _, _, text in console.lines] == shown.splitlines()
    assert (tmp_path / "log").read_bytes() == written


def test_without_a_forwarded_interrupt_its_traceback_is_shown(tmp_path, console):
    output = RankOutput(0, tmp_path / "log", console, None)
    output.feed(2, INTERRUPT, 1)
    output.close(2)
    assert [text for _, _, text in console.lines] == INTERRUPT.splitlines()


@given(st.lists(st.binary(max_size=20), max_size=20))
def test_no_byte_is_lost(chunks):
    assert b"".join(text + end for text, end in split(*chunks)) == b"".join(chunks)


def test_a_budget_allows_a_burst_and_then_so_many_a_second():
    budget = LineBudget(per_s=2, burst=3)
    first = [budget.allow(S) for _ in range(5)]
    later = [budget.allow(2 * S) for _ in range(4)]
    assert (first, later) == ([True] * 3 + [False] * 2, [True, True, False, False])


@pytest.fixture
def console() -> QuietConsole:
    return QuietConsole()


def test_what_is_not_shown_is_counted_and_logged(tmp_path: Path):
    console = QuietConsole(limited=True)
    output = RankOutput(1, tmp_path / "rank1.log", console, LineBudget(per_s=1, burst=2))
    output.feed(1, b"a\nb\nc\nd\n", S)
    output.feed(1, b"e\n", 3 * S)
    output.close(3 * S)
    note = f"... 2 lines not shown, see {tmp_path}/rank1.log".encode()
    shown = [(1, 1, b"a"), (1, 1, b"b"), (1, 2, note), (1, 1, b"e")]
    assert (console.lines, (tmp_path / "rank1.log").read_bytes()) == (shown, b"a\nb\nc\nd\ne\n")
    assert output.num_omitted == 2


def test_the_last_lines_of_a_rank_are_shown_whatever_the_rate(tmp_path: Path):
    console = QuietConsole(limited=True)
    output = RankOutput(1, tmp_path / "rank1.log", console, LineBudget(per_s=1, burst=2))
    output.feed(1, b"".join(b"%d\n" % number for number in range(100)), S)
    output.close(S)
    note = f"... {98 - LAST_LINES} lines not shown, see {tmp_path}/rank1.log".encode()
    last = [b"%d" % number for number in range(100 - LAST_LINES, 100)]
    assert [text for _, _, text in console.lines] == [b"0", b"1", note, *last]


def test_a_file_gets_every_line(tmp_path: Path):
    with (
        (tmp_path / "out").open("w") as out,
        TerminalConsole(out, io.StringIO(), prefixed=True) as console,
    ):
        output = RankOutput(1, tmp_path / "log", console, LineBudget(per_s=1, burst=2))
        output.feed(1, b"".join(b"%d\n" % number for number in range(30_000)), S)
        output.close(S)
    assert (tmp_path / "out").read_text().count("[rank 1] ") == 30_000
    assert output.num_omitted == 0


def test_progress_bars_of_several_ranks_show_two_states_a_second(tmp_path: Path, console):
    output = RankOutput(0, tmp_path / "log", console, LineBudget())
    for tenth in range(11):
        output.feed(2, b"\r%d%%" % (tenth * 10), S + tenth * S // 10)
    output.feed(2, b"\n", 3 * S)
    output.close(3 * S)
    assert [text for _, _, text in console.lines] == [b"0%", b"50%", b"100%"]
    assert (tmp_path / "log").read_bytes().count(b"%") == 11


def test_the_progress_bar_of_a_rank_alone_moves(tmp_path: Path):
    out, err = io.StringIO(), io.StringIO()
    with TerminalConsole(out, err, prefixed=False) as terminal:
        output = RankOutput(0, tmp_path / "log", terminal, None)
        output.feed(2, b"\r0%", S)
        output.feed(2, b"\r50%", S)
        output.feed(2, b"\r100%\n", S)
        output.feed(1, b"no end", S)
        output.close(S)
    assert (out.getvalue(), err.getvalue()) == ("no end", "\r0%\r50%\r100%\n")


def test_the_tail_of_stderr_holds_no_stdout(tmp_path: Path, console):
    output = RankOutput(0, tmp_path / "log", console, None)
    output.feed(2, b"Traceback\n", 1)
    output.feed(1, b"noise\n", 2)
    output.feed(2, b"ValueError\n", 3)
    output.close(4)
    assert output.stderr_tail == "Traceback\nValueError\n"


@pytest.mark.procs
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_once_and_stops_nothing(console):
    output = RankOutput(0, Path("/dev/full"), console, None)
    output.feed(1, b"a\n", 1)
    output.feed(1, b"b\n", 2)
    output.close(3)
    assert console.notices == ["/dev/full ends early: No space left on device"]
    assert [text for _, _, text in console.lines] == [b"a", b"b"]


def test_a_rank_starts_without_a_log_if_the_disk_has_no_space_for_another_file(
    console, tmp_path, monkeypatch
):
    path, opened = tmp_path / "rank3.log", Path.open

    def refusing(self, *args, **kwargs):
        if self == path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refusing)
    output = RankOutput(3, path, console, None)
    output.feed(1, b"a\n", 1)
    output.close(2)
    assert console.notices == [f"{path} ends early: No space left on device"]
    assert [text for _, _, text in console.lines] == [b"a"]


def test_the_terminal_shows_the_rank_before_each_line():
    out, err = io.StringIO(), io.StringIO()
    with TerminalConsole(out, err, prefixed=True) as terminal:
        terminal.line(1, 1, b"loss 2.3")
        terminal.line(0, 2, "é\udcff".encode(errors="surrogateescape"))
        terminal.notice("rank 1 was stopped")
    assert out.getvalue() == "[rank 1] loss 2.3\n"
    assert err.getvalue() == "[rank 0] é\ufffd\nbraid: rank 1 was stopped\n"


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("no_color", "colored"), [("", True), ("1", False)])
def test_colour_is_for_terminals_and_no_color_is_honoured(monkeypatch, no_color, colored):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", no_color)
    out = Tty()
    with TerminalConsole(out, io.StringIO(), prefixed=True) as terminal:
        terminal.line(0, 1, b"x")
    assert ("\x1b[" in out.getvalue()) is colored


def test_a_closed_pipe_does_not_end_the_console():
    out, err = io.StringIO(), io.StringIO()
    out.close()
    with TerminalConsole(out, err, prefixed=False) as terminal:
        terminal.line(0, 1, b"x")
        terminal.line(0, 2, b"y")
    assert err.getvalue() == "y\n"


def test_a_terminal_that_stands_still_holds_up_neither_a_file_nor_the_ranks(tmp_path: Path):
    reader, writer = os.openpty()
    err = os.fdopen(writer, "w")  # nobody reads this terminal
    with (tmp_path / "out").open("w") as out:
        console = TerminalConsole(out, err, prefixed=True)
        for number in range(60_000):
            console.line(0, 2, b"a line on the terminal, which is some sixty characters long")
            console.line(0, 1, b"%d" % number)
        console._writers[1].close()
        assert (tmp_path / "out").read_text().count("\n") == 60_000
        assert console._writers[2].num_lost > 0
        os.close(reader)  # the end of the terminal
        console.close()
    with contextlib.suppress(OSError):
        err.close()


def test_characters_that_the_stream_cannot_encode_are_escaped(tmp_path: Path):
    with (
        (tmp_path / "out").open("w", encoding="ascii") as out,
        TerminalConsole(out, io.StringIO(), prefixed=True) as console,
    ):
        console.line(0, 1, "h\u00e9llo".encode())
    assert (tmp_path / "out").read_text() == "[rank 0] h\\xe9llo\n"


def test_lines_of_both_streams_keep_their_order_on_one_place(tmp_path: Path):
    path = tmp_path / "both"
    with (
        path.open("a") as out,
        path.open("a") as err,
        TerminalConsole(out, err, prefixed=True) as console,
    ):
        for number in range(100):
            console.line(0, 1 + number // 3 % 2, b"%d" % number)
    assert path.read_text().split("\n")[:-1] == [f"[rank 0] {number}" for number in range(100)]
