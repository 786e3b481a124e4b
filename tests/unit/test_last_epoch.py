"""Members without a launcher agree on one last epoch, also if some members come late or never."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from braid.errors import PeerLostError
from braid.runtime.clock import MonotonicClock
from braid.runtime.rendezvous import NewEpoch, last_epoch
from braid.runtime.store import FileStore

BEFORE = NewEpoch(4, (0, 3, 5, 6), (7, 7, 7, 7))


def _meet(path: Path, delays: dict[int, float], lost: set[int]) -> dict[int, NewEpoch | str]:
    """Return the epoch of each member that comes after its delay, or the error."""
    results: dict[int, NewEpoch | str] = {}

    def main(number: int) -> None:
        time.sleep(delays[number])
        with FileStore(path) as store:
            facts = number, 10 + number, lost, MonotonicClock()
            try:
                results[number] = last_epoch.agree_on_last_epoch(store, BEFORE, *facts)
            except PeerLostError as exc:
                results[number] = str(exc)

    threads = [threading.Thread(target=main, args=(number,)) for number in delays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_members_do_not_wait_for_one_that_is_lost(tmp_path):
    start_s = time.monotonic()
    epochs = _meet(tmp_path / "store", {0: 0.0, 5: 0.0, 6: 0.1}, {3})
    assert time.monotonic() - start_s < last_epoch.MEET_S
    assert list(epochs.values()) == [NewEpoch(5, (0, 5, 6), (10, 15, 16))] * 3


def test_a_member_that_comes_too_late_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(last_epoch, "MEET_S", 0.2)
    epochs = _meet(tmp_path / "store", {0: 0.0, 3: 0.0, 5: 1.0}, set())
    assert epochs[0] == epochs[3] == NewEpoch(5, (0, 3), (10, 13))
    assert epochs[5] == ("the launcher is gone, and ranks [0, 3] save without this rank")


@pytest.mark.parametrize("seed", range(5))
def test_all_members_have_the_same_epoch_whenever_they_come(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(last_epoch, "MEET_S", 0.1)
    rng = random.Random(seed)
    came = rng.sample(BEFORE.members, rng.randint(2, 4))
    results = _meet(tmp_path / "store", {m: rng.uniform(0.0, 0.2) for m in came}, set())
    epochs = {m: e for m, e in results.items() if not isinstance(e, str)}
    (epoch,) = set(epochs.values())
    assert set(epoch.members) == epochs.keys()
    assert epoch.num_steps == tuple(10 + member for member in epoch.members)
