"""Claims of braid.runtime.rendezvous.environment and control."""

from __future__ import annotations

import contextlib
import os
import re
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import CommError, ConfigError
from braid.runtime.rendezvous import (
    ControlClient,
    JobEnvironment,
    Left,
    RankFailed,
    RankLost,
    Saved,
    Stop,
)
from braid.runtime.rendezvous.control import decode_from_rank, encode
from braid.runtime.wire import Connection, Identity

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job7",
}


def test_no_variables_make_a_world_of_one():
    assert JobEnvironment.parse({"HOME": "/root"}) == JobEnvironment()


def test_torchruns_variables_are_read():
    assert JobEnvironment.parse(TORCHRUN) == JobEnvironment(
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        node_rank=1,
        run_id="job7",
        master_addr="10.0.0.1",
        master_port=29500,
        launched_by="torchrun",
    )


BRAID = JobEnvironment(
    rank=1,
    world_size=2,
    local_rank=1,
    local_world_size=2,
    run_id="a3f",
    master_addr="127.0.0.1",
    master_port=4711,
    store_address="unix:@braid-a3f",
    secret_fd=5,
    events_fd=6,
    stacks_fd=7,
    log_dir="./runs/a3f",
    resume="auto",
    launched_by="braid",
    portable=True,
    listen="10.0.0.2",
    secret_file="/etc/job.secret",
)


def test_what_braid_tells_is_read_back():
    assert JobEnvironment.parse(BRAID.to_environ()) == BRAID


def test_torchs_contract_is_told_in_full():
    environ = BRAID.to_environ()
    assert {name for name in environ if not name.startswith("BRAID_")} == {
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
        "NODE_RANK", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
        "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
    }  # fmt: skip


@pytest.mark.parametrize("variables", [{}, TORCHRUN], ids=["alone", "torchrun"])
def test_the_portable_mode_is_asked_for_by_one_and_nothing_else(variables):
    def portable(value):
        return JobEnvironment.parse({**variables, "BRAID_PORTABLE": value}).portable

    assert [portable(""), portable("0"), portable("1")] == [False, False, True]
    with pytest.raises(ConfigError, match="BRAID_PORTABLE must be 0 or 1, got 'yes'"):
        portable("yes")


@pytest.mark.parametrize(("name", "value"), [("RANK", "0"), ("WORLD_SIZE", "9")])
def test_a_place_that_was_changed_after_the_launcher_told_it_is_refused(name, value):
    told = BRAID.to_environ()
    text = f"is invalid: {name} must be {told[name]}, as `braid run` set it, got {value}"
    with pytest.raises(ConfigError, match=text):
        JobEnvironment.parse({**told, name: value})


def test_all_problems_stand_in_one_message():
    with pytest.raises(ConfigError) as caught:
        JobEnvironment.parse({"WORLD_SIZE": "abc", "LOCAL_RANK": "-1", "MASTER_ADDR": "x"})
    text = str(caught.value)
    assert [p for p in ("RANK is not set", "WORLD_SIZE must be an integer >= 0, got 'abc'", "LOCAL_RANK must be an integer >= 0, got '-1'", "MASTER_PORT is not set") if p not in text] == []  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": "4"}, "RANK must be 0 <= RANK < 4 (WORLD_SIZE), got 4"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK must be 0 <= LOCAL_RANK < 2 (LOCAL_WORLD_SIZE), got 2"),
        (
            {"LOCAL_WORLD_SIZE": "8"},
            "LOCAL_WORLD_SIZE must be 1 <= LOCAL_WORLD_SIZE < 5 (WORLD_SIZE + 1), got 8",
        ),
        (
            {"MASTER_PORT": "70000"},
            "MASTER_PORT must be 0 <= MASTER_PORT < 65536 (ports have 16 bits), got 70000",
        ),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is not set"),
        (
            {"BRAID_LISTEN": "node-a"},
            "BRAID_LISTEN must be an IP address of this host, got 'node-a'",
        ),
        (
            {"BRAID_LISTEN": "0.0.0.0"},
            "BRAID_LISTEN must be the address of one network interface, got 0.0.0.0",
        ),
        ({"BRAID_INSECURE_NETWORK": "yes"}, "BRAID_INSECURE_NETWORK must be 0 or 1, got 'yes'"),
        (
            {"BRAID_INSECURE_NETWORK": "1", "BRAID_SECRET_FILE": "/s"},
            "BRAID_SECRET_FILE and BRAID_INSECURE_NETWORK exclude each other: unset one of them",
        ),
        ({"RANK": "\u0663"}, "RANK must be an integer >= 0, got '\u0663'"),
    ],
)
def test_a_wrong_value_is_refused_by_name(change, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        JobEnvironment.parse({**TORCHRUN, **change})


@given(st.dictionaries(st.sampled_from([*TORCHRUN, "BRAID_STORE", "BRAID_SECRET_FD"]), st.text()))
def test_any_environment_is_read_or_refused(environ):
    with contextlib.suppress(ConfigError):
        assert JobEnvironment.parse(environ).world_size >= 1


def test_several_hosts_under_torchrun_are_told_how_to_trust_each_other():
    told = {"BRAID_LISTEN": "10.0.0.2", "BRAID_INSECURE_NETWORK": "1"}
    environment = JobEnvironment.parse({**TORCHRUN, **told})
    found = (environment.listen, environment.secret_file, environment.insecure_network)
    assert found == ("10.0.0.2", "", True)


def test_from_os_reads_this_process(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert JobEnvironment.from_os() == JobEnvironment.parse(os.environ)


@pytest.mark.parametrize(
    "message",
    [RankFailed("ValueError", "x", "train.py:1"), Saved(3, "ckpt/3", sha256_ok=True), Left()],
)
def test_messages_of_ranks_survive_the_wire(message):
    assert decode_from_rank(encode(message)) == message


def test_a_long_traceback_fits_into_a_frame_and_keeps_its_end():
    meta = encode(RankFailed("ValueError", "\u0000" * 100_000, "x", "\u1234" * 100_000 + "the end"))
    assert (len(meta) < 64 << 10, decode_from_rank(meta).traceback[-7:]) == (True, "the end")


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_refused(meta):
    with contextlib.suppress(CommError):
        decode_from_rank(meta)


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    identity = Identity("run", "control", 0, 0)
    with (
        Connection(ours, identity) as launcher,
        ControlClient(Connection(theirs, identity)) as client,
    ):
        yield launcher, client


def test_news_arrive_in_order_and_without_waiting(pair):
    launcher, client = pair
    before = client.poll()
    launcher.send(encode(RankLost(2, "exited with code 3")))
    launcher.send(encode(Stop("SIGTERM")))
    assert (before, client.poll()) == ([], [RankLost(2, "exited with code 3"), Stop("SIGTERM")])


def test_losing_the_launcher_is_no_error(pair):
    launcher, client = pair
    launcher.send(encode(Stop("bye")))
    launcher.close()
    assert client.poll() == [Stop("bye")]
    assert (client.send(Left()), client.connected, client.fileno()) == (False, False, -1)


def test_what_the_launcher_said_last_is_news_after_a_report_that_it_did_not_take(pair):
    launcher, client = pair
    launcher.send(encode(Stop("bye")))
    launcher.close()
    assert client.send(Left()) is False
    assert client.poll() == [Stop("bye")]
    assert (client.connected, client.fileno()) == (False, -1)


def test_a_message_that_is_none_ends_the_connection(pair):
    launcher, client = pair
    launcher.send(b"hello")
    assert (client.poll(), client.connected) == ([], False)
