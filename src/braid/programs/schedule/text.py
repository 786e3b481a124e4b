"""Programs as text that people write and compare, and a strict parser.

    program collective ring all_reduce units 2 indices 2
    rank 0
      send0.0>1 reduce1.0<1
      send1.1>1 recv0.1<1
    rank 1
      send1.0>0 reduce0.0<0
      send0.1>0 recv1.1<0

A token is kind, unit, `.`, index, then `>` or `<` and the peer of a send or receive, `/` and the
edge, `~` and the version where the kind has them. The vocabulary defines whether the actions of one
line are posted together or in sequence; the printer begins a line where the index changes. `#`
begins a comment. Errors of the parser name line, column, and the expected and the actual token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import groupby
from typing import NamedTuple

from braid.errors import ConfigError
from braid.programs.schedule.program import LOCAL, SEND, Action, Header, Program, Vocabulary

__all__ = ["from_text", "to_text"]

MOST_RANKS = 4096  # the text may come from anywhere
MOST_DIGITS = 9

_TOKEN = re.compile(
    rf"(?P<kind>[A-Za-z_]+)(?P<unit>\d{{1,{MOST_DIGITS}}})\.(?P<index>\d{{1,{MOST_DIGITS}}})"
    rf"(?:(?P<way>[<>])(?P<peer>\d{{1,{MOST_DIGITS}}}))?"
    rf"(?:/(?P<edge>\d{{1,{MOST_DIGITS}}}))?(?:~(?P<version>\d{{1,{MOST_DIGITS}}}))?",
    re.ASCII,
)
_WORD = re.compile(r"\S+")


def to_text(program: Program) -> str:
    """Convert a program to text; `from_text` converts it back."""
    header = program.header
    root = f" root {header.root}" if header.root >= 0 else ""
    first = f"program {program.vocabulary.name} {header.name} {header.operation}"
    lines = [f"{first} units {header.num_units} indices {header.num_indices}{root}"]
    for rank, actions in enumerate(program.ranks):
        lines.append(f"rank {rank}")
        for _, together in groupby(actions, key=lambda action: action.index):
            tokens = (_token(program.vocabulary, action) for action in together)
            lines.append(f"  {' '.join(tokens)}")
    return "\n".join(lines) + "\n"


def _token(vocabulary: Vocabulary, action: Action) -> str:
    kind = vocabulary.kinds[action.kind]
    way = "" if kind.role == LOCAL else f"{'>' if kind.role == SEND else '<'}{action.peer}"
    edge = f"/{action.edge}" if kind.has_edge else ""
    version = f"~{action.version}" if kind.has_version else ""
    return f"{action.kind}{action.unit}.{action.index}{way}{edge}{version}"


class _Word(NamedTuple):
    text: str
    line: int
    column: int

    def wrong(self, expected: str) -> ConfigError:
        got = repr(self.text) if self.text else "the end of the line"
        return ConfigError(
            f"line {self.line}, column {self.column}: expected {expected}, got {got}"
        )


def from_text(text: str, vocabularies: Mapping[str, Vocabulary]) -> Program:
    """Parse a program from text.

    Args:
        text: Text in the format of `to_text`; white space and comments are free.
        vocabularies: Vocabularies that the text may use, by name.

    Raises:
        ConfigError: The text is not a program; the message names line and column.
    """
    lines = [
        line for number, row in enumerate(text.split("\n"), 1) if (line := _words(row, number))
    ]
    if not lines:
        msg = (
            "line 1, column 1: expected a program, got no text: begin with `program "
            "VOCABULARY NAME OPERATION units N indices N`"
        )
        raise ConfigError(msg)
    vocabulary, header = _header(lines[0], vocabularies)
    ranks: list[list[Action]] = []
    for line in lines[1:]:
        if line[0].text == "rank":
            ranks.append(_rank(line, len(ranks)))
        elif not ranks:
            raise line[0].wrong("`rank 0`")
        else:
            ranks[-1] += (_action(word, vocabulary) for word in line)
    if not ranks:
        raise lines[0][-1].wrong("`rank 0` on a line below")
    _check_peers(lines, len(ranks))
    return Program(vocabulary, header, tuple(map(tuple, ranks)))


def _words(row: str, number: int) -> list[_Word]:
    code = row.partition("#")[0]
    return [_Word(m.group(), number, m.start() + 1) for m in _WORD.finditer(code)]


def _header(line: list[_Word], vocabularies: Mapping[str, Vocabulary]) -> tuple[Vocabulary, Header]:
    words = iter([*line, _Word("", line[-1].line, line[-1].column + len(line[-1].text))])
    last = line[-1]

    def following(expected: str) -> _Word:
        word = next(words, last)
        if not word.text or (expected.startswith("`") and word.text != expected.strip("`")):
            raise word.wrong(expected)
        return word

    following("`program`")
    name = following(f"a vocabulary out of {', '.join(vocabularies)}")
    if name.text not in vocabularies:
        raise name.wrong(f"a vocabulary out of {', '.join(vocabularies)}")
    algorithm, operation = following("a name"), following("an operation")
    following("`units`")
    num_units = _number(following("a number of units"), least=1)
    following("`indices`")
    num_indices = _number(following("a number of indices"))
    root, more = -1, next(words)
    if more.text == "root":
        root = _number(following("a rank"))
        more = next(words)
    if more.text:
        raise more.wrong("`root` or the end of the line")
    header = Header(algorithm.text, operation.text, num_units, num_indices, root)
    return vocabularies[name.text], header


def _number(word: _Word, least: int = 0) -> int:
    digits = word.text.isascii() and word.text.isdigit() and len(word.text) <= MOST_DIGITS
    if not digits or int(word.text) < least:
        raise word.wrong(f"a number from {least} with at most {MOST_DIGITS} digits")
    return int(word.text)


def _rank(line: list[_Word], expected: int) -> list[Action]:
    if expected >= MOST_RANKS:
        raise line[0].wrong(f"at most {MOST_RANKS} ranks")
    if len(line) != 2 or line[1].text != str(expected):
        raise line[min(1, len(line) - 1)].wrong(f"`rank {expected}`, alone in its line")
    return []


def _action(word: _Word, vocabulary: Vocabulary) -> Action:
    match = _TOKEN.fullmatch(word.text)
    if match is None:
        raise word.wrong("an action such as send0.0>1 (kind, unit, index, peer)")
    kind = vocabulary.kinds.get(match["kind"])
    if kind is None:
        raise word.wrong(f"a kind out of {', '.join(vocabulary.kinds)}")
    way = {"send": ">", "receive": "<"}.get(kind.role)
    parts = (
        (match["way"], way),
        (match["edge"], kind.has_edge),
        (match["version"], kind.has_version),
    )
    if match["way"] != way or any(bool(part) != bool(wanted) for part, wanted in parts):
        raise word.wrong(
            f"{match['kind']} with {_form(kind.role, kind.has_edge, kind.has_version)}"
        )
    numbers = (int(match[name] or -1) for name in ("unit", "index", "peer", "edge", "version"))
    return Action(match["kind"], *numbers)


def _form(role: str, has_edge: bool, has_version: bool) -> str:
    peer = {"send": ">peer", "receive": "<peer"}.get(role, "")
    return f"unit.index{peer}{'/edge' if has_edge else ''}{'~version' if has_version else ''}"


def _check_peers(lines: list[list[_Word]], num_ranks: int) -> None:
    for word in (word for line in lines[1:] for word in line):
        match = _TOKEN.fullmatch(word.text)
        if match and match["peer"] and int(match["peer"]) >= num_ranks:
            raise word.wrong(f"a peer below {num_ranks}, the number of ranks here")
