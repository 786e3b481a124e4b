"""Who cannot reach whom, as users read it."""

from __future__ import annotations

import errno

import pytest

from braid.runtime.diagnose.reach_table import reach_table, why_unreachable


def test_the_table_says_who_cannot_reach_whom():
    found = reach_table(["a 10.0.0.1", "b 10.0.0.2"], {(1, 0): "timed out"})
    assert found.splitlines() == [
        "  from \\ to   a 10.0.0.1  b 10.0.0.2",
        "  a 10.0.0.1  -           ok",
        "  b 10.0.0.2  timed out   -",
    ]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ECONNREFUSED, "refused"),
        (errno.ENETDOWN, "no route"),
        (errno.ECONNRESET, "connection reset by peer"),
    ],
)
def test_what_the_system_says_is_a_word_or_two(code, words):
    assert why_unreachable(code) == words
