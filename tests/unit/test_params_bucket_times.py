"""Who is behind, by bucket."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from braid.parallel.gradients.bucket_times import BucketTimes


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


def drawn(times: BucketTimes) -> tuple[list[str], list[tuple[int, int, int, bool]]]:
    """Texts, and bars as (lane, begin, end, marked) in percent of the time."""
    root = ET.fromstring(times.svg())
    space = "{http://www.w3.org/2000/svg}"
    bars = [
        (
            round((float(bar.get("y")) - 34) / 26),
            round((float(bar.get("x")) - 70) / 6.9),
            round((float(bar.get("x")) - 70 + float(bar.get("width"))) / 6.9),
            bar.get("stroke") != "white",
        )
        for bar in root.iter(f"{space}rect")
        if bar.get("height") == "18"
    ]
    return [text.text or "" for text in root.iter(f"{space}text")], bars


def test_the_picture_has_a_bar_per_bucket_and_rank_on_one_axis_and_marks_the_critical_one():
    times = BucketTimes.of(7, (4, 5), [["<a>"], ["b"]], [[0.010, 0.025], [0.020, 0.040]])
    texts, bars = drawn(times)
    assert texts[0] == "averaging 7: bucket 1 (b) is critical, rank 5 was behind by 15 ms"
    assert texts[1:6] == ["0", "10 ms", "20 ms", "30 ms", "40 ms"]
    assert texts[6:] == ["rank 4", "rank 5", "0", "1", "0", "1"]
    assert bars == [(0, 0, 25, False), (0, 25, 62, True), (1, 0, 50, False), (1, 50, 100, True)]
    assert times.svg().count("waits") == 1
    assert "rank 4 waits 15 ms" in times.svg()


def test_buckets_that_have_not_left_are_not_drawn():
    assert drawn(BucketTimes.of(1, (0,), [["a"], ["b"]], [[0.0, 0.001]]))[1] == [(0, 0, 100, True)]
    texts, bars = drawn(BucketTimes.of(1, (0, 1), [], [[], []]))
    assert (texts[0], bars) == ("averaging 1: no bucket", [])
