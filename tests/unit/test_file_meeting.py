"""Claims of meeting through a file: everybody has a number, and whoever comes too often is told whom he met."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from braid.errors import ConfigError
from braid.runtime.rendezvous.file_meeting import FileMeeting


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "meeting")


def test_numbers_are_given_in_the_order_of_coming_and_addresses_found(path):
    with FileMeeting(path, 2, None) as first, FileMeeting(path, 2, None) as second:
        first.publish(["tcp://10.0.0.1:5"])
        assert (first.node_rank, second.node_rank) == (0, 1)
        assert second.find(1.0) == ["tcp://10.0.0.1:5"]
        first.remove()
    assert not Path(path).exists()


def test_a_file_of_an_earlier_run_is_refused_with_what_to_do(path):
    with FileMeeting(path, 1, None), pytest.raises(ConfigError) as caught:
        FileMeeting(path, 1, None)
    assert "1 of 1 nodes have joined at" in str(caught.value)


def test_a_number_that_is_taken_is_refused_with_both_names(path):
    with FileMeeting(path, 2, 1), pytest.raises(ConfigError) as caught:
        FileMeeting(path, 2, 1)
    assert str(caught.value).count(f"(pid {os.getpid()})") == 2


def test_a_node_0_that_does_not_come_is_named(path):
    with FileMeeting(path, 2, 1) as meeting, pytest.raises(ConfigError, match="node 0 has not published its addresses"):  # fmt: skip
        meeting.find(0.001)


def test_a_directory_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError):
        FileMeeting(str(tmp_path / "nowhere" / "meeting"), 2, 0)
