"""Parses errors and stack dumps from the stderr of a process.

Problem: the stderr of a dying rank ends with a traceback of forty frames, mostly of torch and
braid, and then warnings of the interpreter's shutdown. The relevant line is in between. The
`traceback` module prints such texts but cannot parse them. Log scrapers take the last line and miss
chained exceptions, notes, exception groups and `SyntaxError`, which has no header.

Idea: find the blocks (`Traceback (most recent call last):`, the `File` line of a syntax error,
`Fatal Python error`, C++'s `terminate called`). Ignore blocks of threads and finalizers unless
there are no others. Show the deepest frame of user code: outside installed packages, Python and
braid.

Source: the formats written by CPython 3.10 to 3.14 (`Lib/traceback.py`, `Python/traceback.c`),
libstdc++'s verbose terminate handler, rich's boxes (`rich/traceback.py`), and torch's `[rankN]: `
prefix (`_distributed_excepthook` in `torch/distributed/distributed_c10d.py`).
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import PurePath
from signal import SIGABRT
from typing import NamedTuple

__all__ = [
    "ParsedError",
    "Stack",
    "StackFrame",
    "final_error",
    "parse_error",
    "parse_stack",
    "printable",
    "short_site",
    "thread_frames",
]

SIGNAL_RECEIVER = "_receive_signals"  # in a thread of braid; see rendezvous/stack_thread.py
BRAID_ROOT = str(PurePath(__file__).parents[2])
MAX_DETAIL_LINES = 40  # includes a message with a table of ranks, but no later output

STYLE = re.compile(r"\x1b\[[0-9;]*m")
TERMINAL_CODE = re.compile(  # of ECMA-48: control sequences, strings, and single escapes
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_].*?(?:\x07|\x1b\\)|[ -/]*[0-Z\\^-~])", re.DOTALL
)
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
GROUP_PREFIX = re.compile(r"^\s*[|+] (?=\s*\S)")
HEADER = re.compile(r"^(Exception Group )?Traceback \(most recent call last\):\s*$")
FRAME = re.compile(r'^\s+File "(?P<file>[^"]*)", line (?P<line>\d+)(?:,? in (?P<name>.+))?$')
FIRST_FRAME = re.compile(r'^\s+File "[^"]*", line \d+$')
SYNTAX_ERROR = re.compile(r"^(SyntaxError|IndentationError|TabError)(?::|$)")
ERROR = re.compile(r"^(?P<type>[A-Za-z_][\w.<>]*)(?::(?: (?P<message>.*))?)?$")
EXPLAINED = re.compile(r"braid\.errors\.(?!InternalError)")
CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
FOREIGN = re.compile(  # begin of unrelated output after a traceback
    r"^(?:Exception ignored |Exception in thread |Fatal Python error: |terminate called |"
    r"\[[WEIF]\d{3,}|[WEIF]\d{4} |sys:\d+: |\S+\.py:\d+: \w*Warning: |\+-[-+])"
)
TERMINATE = re.compile(r"^terminate called after throwing an instance of '(?P<type>[^']+)'")
WHAT = re.compile(r"^\s*what\(\):\s*(?P<message>.*)$")
FATAL = re.compile(r"^Fatal Python error: (?P<message>.*)$")
BOX_HEADER = re.compile(r"^╭─+ Traceback \(most recent call last\) ─+╮")
BOX_FRAME = re.compile(r"^│ (?P<file>\S[^│]*?):(?P<line>\d+) in (?P<name>\S+) *│")
STACK_HEADER = re.compile(r"^(?P<current>Current )?[Tt]hread .*\(most recent call first\):\s*$")
SITE_PACKAGE = re.compile(r"[/\\](?:site|dist)-packages[/\\](?P<name>\w+)")
INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python3[^/\\]*[/\\]")
LIBRARIES = re.compile(r".*[/\\](?:site-packages|dist-packages|lib[/\\]python3[^/\\]*)[/\\]")
CLASSES = {"torch.utils.data.dataloader": "DataLoader"}  # a dump names functions, not classes


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedError:
    """The error that ended a process, as printed.

    Attributes:
        type: Name of the exception without its module, such as `ValueError`.
        module: Module of the exception, such as `torch.distributed`; empty for a builtin, and if
            the text does not contain it.
        message: First line of the message.
        where: Deepest frame of user code, such as `train.py:57 in load_shard`. Empty for an error
            of braid without a frame of user code, as in `braid train`.
        details: Further lines of the message, and the notes.
        chain: Errors that led to this one, oldest first, each as `Type: message`.
        raised_by: Top-level package of the deepest frame outside the standard library, such as
            `torch`; empty for the user's code.
    """

    type: str
    message: str = ""
    where: str = ""
    details: tuple[str, ...] = ()
    chain: tuple[str, ...] = ()
    raised_by: str = ""
    module: str = ""

    def __str__(self) -> str:
        """Return type and message, such as `ValueError: dataset file shard-7 is missing`."""
        return f"{self.type}: {self.message}" if self.message else self.type


class Stack(NamedTuple):
    """One thread of a stack dump.

    Attributes:
        current: Whether the thread has received the signal, or is the main thread if a thread of
            braid has received it.
        where: Deepest frame of user code, such as `train.py:57 in load_shard`.
    """

    current: bool
    where: str


class StackFrame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """File, line and function, such as `train.py:38 in load`."""
        place = f"{PurePath(self.file).name}:{self.line}"
        return f"{place} in {self.function}" if self.function else place

    @property
    def call(self) -> str:
        """Function with its module, such as `queue.get`; for frames of libraries."""
        root = LIBRARIES.match(self.file)
        below = self.file[root.end() :] if root else self.file.removeprefix(BRAID_ROOT)
        module = ".".join(PurePath(below).with_suffix("").parts).strip("/\\.")
        if self.file.startswith(BRAID_ROOT):
            module = f"braid.{module.rpartition('braid.')[2]}"
        module = module.removesuffix(".__init__")
        return f"{CLASSES.get(module, module)}.{self.function}"

    @property
    def package(self) -> str:
        """Top-level package of an installed file; empty for the user's files."""
        if self.file.startswith(BRAID_ROOT):
            return "braid"
        match = SITE_PACKAGE.search(self.file)
        return match["name"] if match is not None else ""

    @property
    def is_stdlib(self) -> bool:
        """Whether the frame belongs to Python itself."""
        generated = self.file.startswith("<")
        return generated or (INSTALLED.search(self.file) is not None and not self.package)

    @property
    def is_users(self) -> bool:
        """Whether the frame belongs to user code: not braid, an installed package or Python."""
        generated = self.file.startswith("<")
        ours = self.file.startswith(BRAID_ROOT)
        return not (generated or ours or INSTALLED.search(self.file))


def parse_error(text: str) -> ParsedError | None:
    """Parse the error that ended a process from the end of its stderr.

    The result is the last traceback. Tracebacks of threads are used if there are no others;
    tracebacks of finalizers are never used.

    Args:
        text: End of the process's stderr, cut anywhere.

    Returns:
        The error; None if the text contains none.
    """
    lines = _plain_lines(text)
    return (
        _last_traceback(lines, threads=False)
        or _boxed_traceback(lines)
        or _syntax_error(lines)
        or _aborted(lines)
        or _last_traceback(lines, threads=True)
    )


def final_error(text: str, *, exit_code: int | None, signal: int | None) -> ParsedError | None:
    """Parse the error that ended a process, if the process's end is consistent with its output.

    A program may print the traceback of an exception that it handles, and end much later for
    another reason. An uncaught exception ends a process with exit code 1, or with an abort during
    shutdown, and its traceback is the last output except for messages of the shutdown.

    Args:
        text: End of the process's stderr, cut anywhere.
        exit_code: Exit code of the process; None if a signal ended it.
        signal: Number of the signal that ended the process; None if it exited.

    Returns:
        The error; None if there is none, or if the process ended for another reason.
    """
    lines = _plain_lines(text)
    if signal is not None and (fatal := _aborted(lines)) is not None:
        return fatal
    if exit_code != 1 and signal != SIGABRT:
        return None
    *_, (_, _, end) = [(0, None, len(lines)), *_tracebacks(lines)]
    details = list(takewhile(lambda line: not FOREIGN.match(line), lines[end:]))
    return parse_error(text) if len(details) <= MAX_DETAIL_LINES else None


def parse_stack(text: str) -> list[Stack]:
    """Parse the threads of a stack dump of `faulthandler`; accepts any text, cut anywhere."""
    threads = thread_frames(text)
    stacks = [Stack(current, _shown_frame(frames[::-1])) for current, frames in threads]
    if stacks and not any(stack.current for stack in stacks):
        stacks[-1] = stacks[-1]._replace(current=True)
    return stacks


def thread_frames(text: str) -> Iterator[tuple[bool, tuple[StackFrame, ...]]]:
    """Yield (whether it received the signal, frames) for each thread of a stack dump.

    The innermost frame is first. Braid's thread that only receives the signal is omitted.
    """
    frames: list[StackFrame] = []
    current: bool | None = None
    for line in [*text.splitlines(), "Thread end (most recent call first):"]:
        header, frame = STACK_HEADER.match(line), FRAME.match(line)
        if header is not None:
            receives = any(frame.function == SIGNAL_RECEIVER for frame in frames)
            if current is not None and frames and not receives:
                yield current, tuple(frames)
            current, frames = header["current"] is not None, []
        elif frame is not None and current is not None:
            frames.append(_to_frame(frame))


def short_site(site: str) -> str:
    """Drop the directory from a call site: `/home/me/train.py:41 in f` is `train.py:41 in f`."""
    path, _, rest = site.partition(":")
    return f"{PurePath(path).name}:{rest}" if rest else site


def printable(text: str) -> str:
    """Return a text without the codes that move or colour a terminal's cursor.

    Other control characters become escapes, except line ends.
    """
    shown = TERMINAL_CODE.sub("", text).replace("\t", " ")
    return "".join(
        char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in shown
    )


def _plain_lines(text: str) -> list[str]:
    """Return the lines of a text without colours and without prefixes of torch and of groups."""
    lines = [RANK_PREFIX.sub("", STYLE.sub("", line)) for line in text.splitlines()]
    if any("Exception Group Traceback" in line for line in lines):
        lines = [GROUP_PREFIX.sub("", line) for line in lines]
    return lines


def _tracebacks(
    lines: list[str], *, threads: bool = False
) -> Iterator[tuple[int, ParsedError, int]]:
    """Yield each error with the number of its first line and of the first line after it."""
    for start in (i for i, line in enumerate(lines) if HEADER.match(line)):
        before = lines[start - 1] if start else ""
        if before.startswith("Exception ignored "):
            continue
        if before.startswith("Exception in thread ") and not threads:
            continue
        parsed = _error_at(lines, start + 1)
        if parsed is not None:
            yield start, *parsed


def _last_traceback(lines: list[str], *, threads: bool) -> ParsedError | None:
    errors: list[str] = []
    last: ParsedError | None = None
    for start, error, _ in _tracebacks(lines, threads=threads):
        linked = any(line in CHAINED for line in lines[max(0, start - 3) : start])
        in_group = "Group" in (last.type if last else "")
        errors = [*errors, str(last)] if last and (linked or in_group) else []
        last = replace(error, chain=tuple(errors))
    return last


def _error_at(lines: list[str], start: int) -> tuple[ParsedError, int] | None:
    """Parse the error with frames from line `start` on; None if its last line is missing.

    Also returns the number of the line after the error's message, where details begin.
    """
    frames: list[StackFrame] = []
    for index in range(start, len(lines)):
        line = lines[index]
        frame = FRAME.match(line)
        if frame is not None:
            frames.append(_to_frame(frame))
        elif line and not line[0].isspace():
            match = ERROR.match(line)
            if match is None or not frames:
                return None
            return _to_error(match, frames, lines[index + 1 :]), index + 1
    return None


def _details(lines: list[str]) -> tuple[str, ...]:
    kept: list[str] = []
    for line in lines[:MAX_DETAIL_LINES]:
        if FOREIGN.match(line) or HEADER.match(line) or line in CHAINED:
            break
        kept.append(line.rstrip())
    while kept and not kept[-1]:
        kept.pop()
    return tuple(kept)


def _boxed_traceback(lines: list[str]) -> ParsedError | None:
    """Parse the last traceback that rich has drawn; the error is below its box."""
    starts = [index for index, line in enumerate(lines) if BOX_HEADER.match(line)]
    if not starts:
        return None
    box = lines[starts[-1] :]
    end = next((index for index, line in enumerate(box) if line.startswith("╰")), len(box))
    match = ERROR.match(box[end + 1].rstrip()) if end + 1 < len(box) else None
    frames = [_to_frame(frame) for frame in map(BOX_FRAME.match, box[:end]) if frame is not None]
    if match is None or not frames:
        return None
    return replace(_to_error(match, frames, box[end + 2 :]), module="")  # rich omits it


def _syntax_error(lines: list[str]) -> ParsedError | None:
    for index in range(len(lines) - 1, -1, -1):
        if SYNTAX_ERROR.match(lines[index]):
            for start in range(index - 1, max(-1, index - 5), -1):
                if FIRST_FRAME.match(lines[start]):
                    parsed = _error_at(lines, start)
                    return parsed[0] if parsed is not None else None
    return None


def _last_match(lines: list[str], pattern: re.Pattern[str]) -> tuple[int, re.Match[str]] | None:
    """Return the number of the last line that matches, and the match."""
    matches = ((index, pattern.match(lines[index])) for index in reversed(range(len(lines))))
    return next(((index, match) for index, match in matches if match is not None), None)


def _fatal_error(lines: list[str]) -> ParsedError | None:
    if (last := _last_match(lines, FATAL)) is None:
        return None
    index, match = last
    stacks = parse_stack("\n".join(lines[index:]))
    where = next((s.where for s in stacks if s.current), "")
    return ParsedError(type="Fatal Python error", message=match["message"], where=where)


def _aborted(lines: list[str]) -> ParsedError | None:
    """Parse a fatal error, or the C++ exception that led to it, with the fatal error's place."""
    fatal, thrown = _fatal_error(lines), _cpp_exception(lines)
    if fatal is None or thrown is None:
        return fatal or thrown
    return ParsedError(type=thrown.type, message=thrown.message, where=fatal.where)


def _cpp_exception(lines: list[str]) -> ParsedError | None:
    if (last := _last_match(lines, TERMINATE)) is None:
        return None
    index, match = last
    what = WHAT.match(lines[index + 1]) if index + 1 < len(lines) else None
    return ParsedError(type=match["type"], message=what["message"] if what else "")


def _to_error(match: re.Match[str], frames: list[StackFrame], rest: list[str]) -> ParsedError:
    explains_itself = EXPLAINED.match(match["type"]) is not None
    of_users = any(frame.is_users for frame in frames)
    module = "" if hasattr(builtins, match["type"]) else "__main__"
    return ParsedError(
        type=match["type"].rpartition(".")[2] or match["type"],
        module=match["type"].rpartition(".")[0] or module,
        message=(match["message"] or "").strip(),
        where=_shown_frame(frames) if of_users or not explains_itself else "",
        details=_details(rest),
        raised_by=next((frame.package for frame in reversed(frames) if not frame.is_stdlib), ""),
    )


def _to_frame(match: re.Match[str]) -> StackFrame:
    return StackFrame(match["file"], int(match["line"][:9]), match["name"] or "")


def _shown_frame(frames: Sequence[StackFrame]) -> str:
    """Return the deepest frame of user code; the deepest of all frames if there is none."""
    users = [frame for frame in frames if frame.is_users]
    return (users or frames)[-1].place
