"""Find the cause of four made-up failures on two hosts, and show the error block of each.

braid run -n 1 examples/52_verdict.py
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from braid.runtime.diagnose.block import StopReport, error_block, render_block
from braid.runtime.diagnose.tracebacks import ParsedError
from braid.runtime.diagnose.verdict import RankEnd, judge

MS = 1_000_000
DOING = "waiting in all_reduce(float32[4], sum)#408 called at train.py:41 in step"


def lost(rank: int, of: int, why: str, at_ms: float) -> RankEnd:
    """Return the end of a rank that raised PeerLostError."""
    error = ParsedError(type="PeerLostError", message=f"rank {of} {why}", where="train.py:41")
    return end(rank, at_ms, exit_code=1, error=error, last_events=DOING)


def end(rank: int, at_ms: float, **what: object) -> RankEnd:
    """Return the end of a rank; ranks 0 and 1 are on host a, 2 and 3 on host b."""
    return RankEnd(
        rank=rank, pid=800 + rank, host="ab"[rank // 2], ended_ns=round(at_ms * MS), **what
    )


KILLED = [
    end(3, 0.0, signal=9, last_events="in backward, bucket 1 of 2, at step 213"),
    *(lost(rank, 3, "was killed by signal 9 (SIGKILL)", 2.0 + rank) for rank in range(3)),
]
GONE = ParsedError(
    type="HostLost",
    message="host b is gone: its agent (pid 790) was ended by Slurm: Killed",
)
HOST = [
    *(end(rank, 0.0, exit_code=1, error=GONE) for rank in (2, 3)),
    *(lost(rank, 2, f"raised {GONE}", 1.0 + rank) for rank in (0, 1)),
]
RAISED = [  # rank 2 ends last, since it prints a traceback
    *(lost(rank, 2, "raised ValueError: shard-7 is missing", 1.0 + rank) for rank in (0, 1, 3)),
    end(2, 40.0, exit_code=1, error=ParsedError(
        type="ValueError", message="shard-7 is missing", where="train.py:57 in load"
    )),
]  # fmt: skip
TWO = [  # two causes; the clock of host b, with ranks 2 and 3, is 1 s ahead
    end(2, 1010.0, signal=11),
    end(1, 12.0, exit_code=3),
    lost(3, 2, "was killed by signal 11 (SIGSEGV)", 1013.0),
    lost(0, 2, "was killed by signal 11 (SIGSEGV)", 13.0),
]
PINGS = [(0.0, 1000.9, 1.4), (5.0, 1005.2, 5.4), (9.0, 1012.0, 9.9)]  # ms: sent, answered, back


def offset_ms() -> float:
    """Return the launcher's clock minus host b's, by the ping with the shortest round trip."""
    sent, answered, back = min(PINGS, key=lambda ping: ping[2] - ping[0])
    return (sent + back) / 2 - answered


def on_one_clock(one: RankEnd) -> RankEnd:
    """Return the end with its time on the launcher's clock."""
    shift_ms = offset_ms() if one.host == "b" else 0.0
    return replace(one, ended_ns=one.ended_ns + round(shift_ms * MS))


assert [one.rank for one in judge(TWO).cause] == [1]  # with clocks that differ
cases = {"a killed rank": KILLED, "a lost host": HOST, "an exception": RAISED}
cases["two causes, on one clock"] = [on_one_clock(one) for one in TWO]
for title, ends in cases.items():
    print(f"{title}: {', '.join(f'{e.rank} {e.ending.value}' for e in ends)}")
    verdict = judge(ends)
    print(render_block(error_block(StopReport(verdict=verdict, exit_code=1, elapsed_s=41.0))))
    assert all(judge(order) == verdict for order in itertools.permutations(ends))
print("in every order of news the verdict is the same, bit by bit")
