"""What is said of processes that come late to an elastic run, or with other versions."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from braid._version import __version__
from braid.errors import ConfigError
from braid.launch import JobSpec
from braid.launch.process.job import ElasticLimits
from braid.launch.supervise.member_driver import JOIN_NOTICE_NS, MemberDriver
from braid.runtime.clock import VirtualClock
from braid.runtime.rendezvous import Ready
from braid.runtime.rendezvous.membership import _refuse_other_versions
from braid.runtime.store import HashStore


class Run:
    """A run whose ranks do nothing."""

    is_running = True

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.ranks: dict[int, Any] = {
            rank: SimpleNamespace(
                rank=rank, name=f"rank {rank}", last_events=lambda: "", send=lambda _: None
            )
            for rank in range(2)
        }

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def note(self, kind: str, **values: object) -> None:
        """Keep nothing."""


def test_a_spare_that_does_not_come_is_named_once():
    clock, run = VirtualClock(), Run()
    limits = ElasticLimits(min_ranks=1, spares=1)
    driver = MemberDriver(JobSpec(command=("x",)), limits, run, clock, None)  # type: ignore[arg-type]
    driver.started(0)
    driver.started(1)
    driver.ready(run.ranks[0], Ready(-1, -1))
    assert driver.deadline_ns == JOIN_NOTICE_NS
    clock.advance(JOIN_NOTICE_NS)
    driver.poll()
    driver.poll()
    (text,) = run.notices
    assert text.startswith("rank 1 is not ready to train 60 s after its start")
    assert driver.deadline_ns is None


def test_a_process_with_another_torch_is_refused(monkeypatch):
    store = HashStore()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="1.0"))
    _refuse_other_versions(store, 2)
    _refuse_other_versions(store, 0)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="1.1"))
    expected = f"rank 3 has braid {__version__} and torch 1.1, but rank 2 has braid"
    with pytest.raises(ConfigError, match=expected):
        _refuse_other_versions(store, 3)
