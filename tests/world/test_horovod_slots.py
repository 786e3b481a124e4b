"""Slots of horovodrun's elastic runs: discovery scripts that work, fail, hang or lie."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from braid.compat.horovod.launcher.elastic_plan import ElasticPlan
from braid.compat.horovod.launcher.slots import HostSlots, discovered
from braid.errors import ConfigError
from braid.launch import Host
from braid.launch.process.job import ElasticLimits
from braid.runtime.clock import VirtualClock

pytestmark = pytest.mark.procs


def script(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "discover.sh"
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(0o755)
    return str(path)


def plan(**values) -> ElasticPlan:
    limits = ElasticLimits(min_ranks=2, max_ranks=4, restarts=0, gains_slots=True)
    return ElasticPlan(**{"num_ranks": 3, "limits": limits} | values)


def test_a_script_lists_hosts(tmp_path):
    path = script(tmp_path, "echo localhost", "echo other:$1")
    assert discovered(f"{path} 3", 2) == (Host("localhost", 2), Host("other", 3))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("echo no hosts today >&2; exit 3", "exited with code 3: no hosts today"),
        ("kill -9 $$", "code 137|signal 9"),
        ("sleep 60 & wait", "has not ended within 0.5 s"),
        ("echo localhost:two", "must print lines NAME:SLOTS"),
        ("echo localhost:-2", "must print lines NAME:SLOTS"),
        ("echo localhost:2; echo localhost:3", "each host once, got 'localhost:3'"),
        ("head -c 99 /dev/zero", "must print lines NAME:SLOTS"),
        ("yes localhost", "has printed more than 1 MiB"),
    ],
)
def test_a_script_that_does_not_work_is_an_error(tmp_path, line, message):
    with pytest.raises(ConfigError, match=message):
        discovered(script(tmp_path, line), 0, limit_s=0.5)


def test_a_script_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="exited with code 127"):
        discovered(str(tmp_path / "missing.sh"), 0)


def polled(slots: HostSlots) -> tuple[int | None, str]:
    """The number of slots of this host if it has changed, and the notice."""
    has_changed, notice = slots.poll()
    return (sum(slots.hosts.values()) if has_changed else None), notice


def until(slots: HostSlots, wanted: tuple[int | None, str]) -> None:
    """Poll until an answer comes, and no other one before."""
    limit_s = time.monotonic() + 30
    while (answer := polled(slots)) == (None, "") and time.monotonic() < limit_s:
        time.sleep(0.01)
    number, notice = answer
    assert (number, wanted[1] in notice) == (wanted[0], True), answer


def test_a_script_is_asked_again_and_its_mistakes_are_notices(tmp_path):
    names = tmp_path / "names"
    names.write_text("localhost:4\n")
    with HostSlots(plan(script=script(tmp_path, f"cat {names}"))) as slots:
        until(slots, (4, ""))
        names.write_text("localhost:4\nfar.invalid:2\n")
        until(slots, (None, "leave out far.invalid"))
        names.write_text("")  # somebody writes it anew
        until(slots, (None, "has listed no host"))
        names.write_text("localhost:1\n")
        until(slots, (1, "only 1 slots are available, fewer than --min-np 2"))
        names.unlink()
        until(slots, (None, "exited with code 1"))


def test_the_slot_of_a_dead_rank_rests_for_longer_each_time():
    clock = VirtualClock()
    with HostSlots(plan(cooldown_s=(10.0, 30.0)), clock) as slots:
        for rest_s in (10, 20, 30, 30):
            slots.lost("")
            assert polled(slots) == (2, "")
            clock.sleep(rest_s - 0.5)
            assert polled(slots) == (None, "")
            clock.sleep(1)
            assert polled(slots) == (3, "")


def test_without_a_range_the_slot_of_a_dead_rank_stays_out():
    clock = VirtualClock()
    with HostSlots(plan(), clock) as slots:
        slots.lost("")
        assert polled(slots) == (2, "")
        clock.sleep(1e6)
        assert polled(slots) == (None, "")


def test_the_host_of_a_dead_rank_is_blocked_for_longer_each_time():
    clock = VirtualClock()
    hosts = (Host("a", 2), Host("b", 2), Host("c", 1))
    with HostSlots(plan(hosts=hosts, cooldown_s=(10.0, 30.0)), clock) as slots:
        assert slots.hosts == {"a": 2, "b": 2}, "--max-np 4"
        slots.lost("b")
        slots.lost("b")  # its other rank
        assert slots.poll() == (True, "host b is blocked for 10 s")
        assert slots.hosts == {"a": 2, "c": 1}
        assert slots.poll() == (False, "")
        clock.sleep(11)
        assert slots.poll() == (True, "")
        assert slots.hosts == {"a": 2, "c": 1, "b": 1}, "c keeps its rank"
        slots.lost("b")
        assert slots.poll() == (True, "host b is blocked for 20 s")


def test_without_a_range_the_host_of_a_dead_rank_is_blocked_for_good():
    clock = VirtualClock()
    with HostSlots(plan(hosts=(Host("a", 1), Host("b", 2))), clock) as slots:
        slots.lost("b")
        notices = "host b is blocked for the rest of the run; only 1 slots are available, fewer"
        assert slots.poll() == (True, f"{notices} than --min-np 2: add hosts")
        clock.sleep(1e6)
        assert slots.poll() == (False, "")


def test_only_a_slot_of_the_only_host_is_blocked():
    with HostSlots(plan(hosts=(Host("a", 3),)), VirtualClock()) as slots:
        slots.lost("a")
        assert slots.poll() == (True, "")
        assert slots.hosts == {"a": 2}
        slots.lost("a", is_gone=True)
        assert slots.poll()[1].startswith("host a is blocked for the rest of the run; only 0 slots")
        assert slots.hosts == {}


def test_a_script_adds_and_removes_hosts(tmp_path):
    names = tmp_path / "names"
    names.write_text("a:2\nb:2\n")
    hosts = (Host("a", 2), Host("b", 2))
    with HostSlots(plan(script=script(tmp_path, f"cat {names}"), hosts=hosts)) as slots:
        names.write_text("c:3\nb:1\n")
        until(slots, (4, ""))
        assert slots.hosts == {"b": 1, "c": 3}
