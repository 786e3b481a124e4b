"""Claims of braid.launch.process.traceback_filter: equal tracebacks once, lost peers in one line."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from braid.launch import QuietConsole
from braid.launch.process.output import LineBudget, RankOutput
from braid.launch.process.traceback_filter import SharedTracebacks

ERROR = """\
begins
Traceback (most recent call last):
  File "train.py", line 3, in f
    {}["x"]
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 5, in f
    raise ValueError("bad\\n  a table")
ValueError: bad
  a table
ends
"""
LOST = """\
Traceback (most recent call last):
  File "train.py", line 3, in f
    group.barrier()
braid.errors.PeerLostError: rank 1 raised ValueError: bad
"""


class Ranks:
    """The outputs of the ranks of one run."""

    def __init__(self, tmp_path: Path, num_ranks: int = 3) -> None:
        self.console = QuietConsole()
        self.shared = SharedTracebacks()
        self.logs = [tmp_path / f"rank{rank}.log" for rank in range(num_ranks)]
        self.outputs = [
            RankOutput(rank, log, self.console, LineBudget(), self.shared)
            for rank, log in enumerate(self.logs)
        ]

    def feed(self, rank: int, text: str) -> None:
        self.outputs[rank].feed(2, text.encode(), 0)

    def end(self) -> list[tuple[int, str]]:
        """The lines on the console."""
        for output in self.outputs:
            output.close(0)
        return [(rank, text.decode()) for rank, _, text in self.console.lines]


def test_a_traceback_of_several_ranks_is_shown_once_and_the_logs_have_all(tmp_path):
    ranks = Ranks(tmp_path)
    for rank in (1, 0, 2):
        ranks.feed(rank, ERROR)
    shown = [(1, line) for line in ERROR.splitlines()]
    assert ranks.end() == [*shown, (0, "begins"), (2, "begins")]
    assert ranks.shared.hidden() == {(1, (0, 2)): ["KeyError: 'x'", "ValueError: bad"]}
    assert [log.read_text() for log in ranks.logs] == [ERROR] * 3


def test_a_rank_that_repeats_its_traceback_or_goes_on_differently_is_shown(tmp_path):
    ranks = Ranks(tmp_path)
    block = ERROR[7 : ERROR.index("\nDuring")]
    for text in (block, block, "one\n"):
        ranks.feed(0, text)
    for text in (block, "two\n", block):
        ranks.feed(1, text)
    lines = block.splitlines()
    assert ranks.end() == [
        *[(0, line) for line in (*lines, *lines, "one")],
        *[(1, line) for line in ("two", *lines)],
    ]


def test_the_traceback_of_a_lost_peer_is_one_line(tmp_path):
    ranks = Ranks(tmp_path)
    ranks.feed(0, LOST)
    ranks.feed(2, "".join(f"[rank2]: {line}\n" for line in LOST.splitlines()))
    error = LOST.splitlines()[-1]
    assert ranks.end() == [
        (0, f"{error}  (traceback in {ranks.logs[0]})"),
        (2, f"[rank2]: {error}  (traceback in {ranks.logs[2]})"),
    ]


def test_a_traceback_that_never_ends_is_shown_at_the_end(tmp_path):
    ranks = Ranks(tmp_path)
    ranks.feed(0, LOST[: LOST.index("braid.errors")])
    assert [line for _, line in ranks.end()] == LOST.splitlines()[:-1]


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(ERROR.splitlines())), max_size=40))
def test_every_line_is_shown_unless_an_equal_one_is(tmp_path_factory, lines):
    ranks = Ranks(tmp_path_factory.mktemp("run"))
    for rank, line in lines:
        ranks.feed(rank, line + "\n")
    assert {line for _, line in ranks.end()} == {line for _, line in lines}
