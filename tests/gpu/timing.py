"""Milliseconds on the device: events on a GPU, the clock on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

__all__ = ["interleaved_ms", "milliseconds"]


def milliseconds(call: Callable[[], object], device: str) -> float:
    """Return how long `call` keeps the device's current stream busy."""
    if device == "cpu":
        begin = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begin)
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin_event.record()
    call()
    end_event.record()
    torch.cuda.synchronize()
    return begin_event.elapsed_time(end_event)


def interleaved_ms(
    calls: dict[str, Callable[[], object]], device: str, rounds: int
) -> dict[str, float]:
    """Return the median of each call, measured in turns after two rounds of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 2):
        for name, call in calls.items():
            taken = milliseconds(call, device)
            if number >= 2:
                times[name].append(taken)
    return {name: statistics.median(own) for name, own in times.items()}
