"""Claims of braid.runtime.diagnose.tracebacks, on texts that real processes wrote."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.runtime.diagnose.tracebacks import (
    BRAID_ROOT,
    ParsedError,
    Stack,
    final_error,
    parse_error,
    parse_stack,
    printable,
    short_site,
)

PLAIN = """\
epoch 3 begins
Traceback (most recent call last):
  File "/home/me/train.py", line 90, in <module>
    main()
  File "/home/me/train.py", line 57, in load_shard
    raise ValueError("dataset file shard-7 is missing")
ValueError: dataset file shard-7 is missing
"""


def test_plain_traceback_gives_type_message_and_line():
    assert parse_error(PLAIN) == ParsedError(
        type="ValueError",
        message="dataset file shard-7 is missing",
        where="train.py:57 in load_shard",
    )


def test_frames_of_packages_and_the_standard_library_are_passed_over():
    text = """\
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/home/me/train.py", line 12, in step
    loss = model(x)
  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1700, in __call__
    return self.forward(x)
  File "/usr/lib/python3.11/json/decoder.py", line 355, in raw_decode
    raise JSONDecodeError
json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)
"""
    assert parse_error(text) == ParsedError(
        type="JSONDecodeError",
        message="Expecting value: line 1 column 1 (char 0)",
        where="train.py:12 in step",
        raised_by="torch",
        module="json.decoder",
    )


def test_chain_is_kept_oldest_first():
    text = """\
Traceback (most recent call last):
  File "a.py", line 2, in f
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 4, in g
OSError: [Errno 5] gone

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "a.py", line 6, in h
RuntimeError: cannot go on
"""
    assert parse_error(text) == ParsedError(
        type="RuntimeError",
        message="cannot go on",
        where="a.py:6 in h",
        chain=("KeyError: 'x'", "OSError: [Errno 5] gone"),
    )


@pytest.mark.parametrize(
    ("exit_code", "signal", "after", "is_final"),
    [
        (1, None, "", True),
        (1, None, "Exception ignored in: <function f>\n" + 50 * "noise\n", True),
        (1, None, 50 * "INFO step\n", False),
        (3, None, "", False),
        (None, 9, "", False),
        (None, 6, "", True),
    ],
)
def test_a_printed_traceback_counts_if_the_process_can_have_ended_by_it(
    exit_code, signal, after, is_final
):
    error = final_error(PLAIN + after, exit_code=exit_code, signal=signal)
    assert (error is not None) == is_final


def test_an_earlier_traceback_that_was_logged_is_no_cause():
    assert parse_error(PLAIN.replace("ValueError", "KeyError") + PLAIN) == parse_error(PLAIN)


def test_notes_and_further_lines_of_the_message_are_details():
    text = PLAIN + "note: seen by rank 3\n  rank 0  float32[4]\n\n"
    error = parse_error(text)
    assert error is not None
    assert error.details == ("note: seen by rank 3", "  rank 0  float32[4]")


def test_torchs_rank_prefix_is_taken_off():
    prefixed = "".join(f"[rank1]: {line}\n" for line in PLAIN.splitlines())
    assert parse_error(prefixed) == parse_error(PLAIN)


def test_tracebacks_of_finalizers_and_threads_do_not_hide_the_error():
    thread = "Exception in thread loader (run):\n" + PLAIN.split("\n", 1)[1].replace("Value", "Key")
    finalizer = "Exception ignored in: <function X.__del__ at 0x7f>\n" + thread.split("\n", 1)[1]
    assert parse_error(PLAIN + thread + finalizer) == parse_error(PLAIN)


def test_a_threads_traceback_counts_when_there_is_no_other():
    error = parse_error("Exception in thread loader (run):\n" + PLAIN.split("\n", 1)[1])
    assert error == parse_error(PLAIN)


def test_syntax_error_without_header():
    text = (
        '  File "/home/me/train.py", line 3\n    x = = 3\n        ^\nSyntaxError: invalid syntax\n'
    )
    assert parse_error(text) == ParsedError(
        type="SyntaxError", message="invalid syntax", where="train.py:3"
    )


def test_exception_group_shows_the_last_member():
    text = """\
  + Exception Group Traceback (most recent call last):
  |   File "/home/me/train.py", line 9, in <module>
  |     raise ExceptionGroup("two", [ValueError("a"), KeyError("b")])
  | ExceptionGroup: two (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/home/me/train.py", line 4, in load
    | ValueError: a
    +---------------- 2 ----------------
    | Traceback (most recent call last):
    |   File "/home/me/train.py", line 5, in store
    | KeyError: 'b'
    +------------------------------------
"""
    error = parse_error(text)
    assert error is not None
    assert (error.type, error.where) == ("KeyError", "train.py:5 in store")


def test_cpp_exception_is_read():
    text = (
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
        "  what():  [enforce fail at pair.cc:460] op.preamble.length <= op.nbytes. 64 vs 32\n"
    )
    assert parse_error(text) == ParsedError(
        type="gloo::EnforceNotMet",
        message="[enforce fail at pair.cc:460] op.preamble.length <= op.nbytes. 64 vs 32",
    )


RICH = """\
╭─────────────────────────────── Traceback (most recent call last) ────────────────────────────────╮
│ /home/me/train.py:90 in <module>                                                                 │
│                                                                                                  │
│   89                                                                                             │
│ ❱ 90 main()                                                                                      │
│                                                                                                  │
│ /home/me/train.py:57 in load_shard                                                               │
│                                                                                                  │
│ ❱ 57     raise ValueError("dataset file shard-7 is missing")                                     │
╰──────────────────────────────────────────────────────────────────────────────────────────────────╯
ValueError: dataset file shard-7 is missing
"""


def test_a_traceback_drawn_by_rich_is_read():
    assert parse_error(RICH) == parse_error(PLAIN)


def test_colours_are_taken_off():
    assert parse_error(PLAIN.replace("ValueError", "\x1b[1;31mValueError\x1b[0m")) == parse_error(
        PLAIN
    )


def test_an_abort_shows_the_exception_that_led_to_it_and_the_users_frame():
    thrown = "terminate called after throwing an instance of 'std::runtime_error'\n  what():  Connection reset by peer\n"
    assert parse_error(thrown + FAULT.replace("Segmentation fault", "Aborted")) == ParsedError(
        type="std::runtime_error", message="Connection reset by peer", where="train.py:31 in step"
    )


FAULT = """\
Fatal Python error: Segmentation fault

Thread 0x00007f00 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/home/me/loader.py", line 8 in pump

Current thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/home/me/train.py", line 31 in step
"""


def test_fatal_error_shows_the_users_frame():
    assert parse_error(FAULT) == ParsedError(
        type="Fatal Python error", message="Segmentation fault", where="train.py:31 in step"
    )


def test_stack_dump_gives_each_threads_place():
    assert parse_stack(FAULT) == [
        Stack(current=False, where="loader.py:8 in pump"),
        Stack(current=True, where="train.py:31 in step"),
    ]


@pytest.mark.parametrize("cut", range(0, len(PLAIN), 7))
def test_a_text_cut_anywhere_gives_the_error_or_nothing(cut):
    error = parse_error(PLAIN[cut:])
    assert error is None or error.type == "ValueError"


@given(st.text(max_size=300))
def test_any_text_is_read_without_an_error(text):
    parse_error(text)
    parse_stack(text)


FRAGMENTS = st.sampled_from(
    [
        *((PLAIN + FAULT + RICH).splitlines()),
        "",
        "  | ",
        "KeyError",
        "é: x",
        "Error: ",
        "SyntaxError: x",
        '  File "", line 1',
        "terminate called",
        "terminate called after throwing an instance of 'x'",
        "Exception Group Traceback (most recent call last):",
        "During handling of the above exception, another exception occurred:",
    ]
)


@given(st.lists(FRAGMENTS, max_size=12))
def test_any_order_of_lines_is_read_without_an_error(lines):
    error = parse_error("\n".join(lines))
    assert error is None or error.type


@pytest.mark.parametrize(
    ("kind", "where"),
    [("braid.errors.CheckpointError", ""), ("braid.errors.InternalError", "loading.py:3 in load")],
)
def test_an_error_of_braid_that_no_line_of_the_users_led_to_has_no_place(kind, where):
    frame = f'  File "{BRAID_ROOT}/checkpoint/loading.py", line 3, in load'
    text = f"Traceback (most recent call last):\n{frame}\n{kind}: bad"
    assert parse_error(text) == ParsedError(
        type=kind.rpartition(".")[2],
        message="bad",
        where=where,
        raised_by="braid",
        module="braid.errors",
    )


def test_an_error_of_braid_is_shown_at_the_line_of_the_users_that_led_to_it():
    frame = f'  File "{BRAID_ROOT}/checkpoint/loading.py", line 3, in load'
    own = '  File "/home/me/train.py", line 9, in main'
    text = f"Traceback (most recent call last):\n{own}\n{frame}\nbraid.errors.CheckpointError: bad"
    error = parse_error(text)
    assert error is not None
    assert error.where == "train.py:9 in main"


def test_short_site_drops_the_directories():
    assert short_site("/home/me/train.py:41 in step") == "train.py:41 in step"


@pytest.mark.procs
def test_this_interpreter_prints_what_is_parsed(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("def load():\n    raise OSError(5, 'gone')\nload()\n")
    run = subprocess.run(
        [sys.executable, "-I", "-S", script], check=False, capture_output=True, text=True
    )
    assert parse_error(run.stderr) == ParsedError(
        type="OSError", message="[Errno 5] gone", where="train.py:2 in load"
    )


@pytest.mark.parametrize(
    ("printed", "module"),
    [
        ("ValueError", ""),
        ("PeerLostError", "__main__"),
        ("jobs.PeerLostError", "jobs"),
        ("braid.errors.PeerLostError", "braid.errors"),
    ],
)
def test_the_module_of_an_error_is_read(printed, module):
    text = f'Traceback (most recent call last):\n  File "/home/me/train.py", line 3, in load\n{printed}: x'
    assert parse_error(text).module == module


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text\x1b]8;;http://x\x1b\\", "text"),
        ("a\rb\x08\x9b2J\x1bc", "a\\rb\\x08\\x9b2J"),
        (
            "caf\u00e9 \u65e5\u672c \udce9\nnext\tcolumn",
            "caf\u00e9 \u65e5\u672c \\udce9\nnext column",
        ),
    ],
)
def test_no_text_moves_the_cursor_of_a_terminal(text, shown):
    assert printable(text) == shown


@given(st.text())
def test_any_text_becomes_printable_once(text):
    shown = printable(text)
    assert shown.replace("\n", "").isprintable()
    assert printable(shown) == shown
