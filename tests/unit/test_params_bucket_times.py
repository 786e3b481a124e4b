"""Who is behind, by bucket."""

from __future__ import annotations

from braid.params.bucket_times import BucketTimes


def test_the_slow_rank_and_the_critical_bucket_are_told():
    times = BucketTimes.of(
        7,
        (4, 5),
        [["head"], ["a", "b", "c", "d"]],
        [[0.012, 0.025], [0.011, 0.041]],
    )
    assert (times.critical, times.rows[1].slowest) == (1, 1)
    assert str(times).splitlines() == [
        "buckets of averaging 7, ready after",
        "bucket  rank 4   rank 5   behind             parameters",
        "0       12.0 ms  11.0 ms  rank 4 by 1.0 ms   head",
        "1       25.0 ms  41.0 ms  rank 5 by 16.0 ms  a, b, c and 1 more  < critical: complete last",
    ]
