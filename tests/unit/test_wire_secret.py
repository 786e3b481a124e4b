"""A secret comes from where only its job can read, and never shows."""

from __future__ import annotations

import os
import pickle
import socket

import pytest

from braid.errors import ConfigError, RendezvousError
from braid.runtime.wire import Identity, Listener, Secret, connect, local_address

KEY = bytes(range(32))


def test_children_read_the_same_secret_from_one_descriptor():
    fd = Secret(KEY).to_fd()
    copies = [os.dup(fd), os.dup(fd)]
    signatures = {Secret.from_fd(copy).sign(b"x") for copy in copies}
    os.close(fd)
    assert signatures == {Secret(KEY).sign(b"x")}


def test_a_pipe_serves_as_well():
    reader, writer = os.pipe()
    os.write(writer, KEY[:10])
    os.write(writer, KEY[10:])
    os.close(writer)
    assert Secret.from_fd(reader).verify(Secret(KEY).sign(b"x"), b"x")


def test_from_fd_closes_the_descriptor():
    fd = Secret(KEY).to_fd()
    Secret.from_fd(fd)
    with pytest.raises(ConfigError, match=f"descriptor {fd}: Bad file descriptor"):
        Secret.from_fd(fd)


@pytest.mark.parametrize("content", [b"", KEY[:31], KEY + b"x"])
def test_only_32_bytes_are_a_secret(tmp_path, content):
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=f"a secret must have 32 bytes, got {len(content)}"):
        Secret.from_file(path)


def test_a_file_of_mode_0600_is_read(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(KEY)
    path.chmod(0o600)
    assert Secret.from_file(path).sign(b"x") == Secret(KEY).sign(b"x")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o400, 0o700])
def test_a_file_of_another_mode_is_refused(tmp_path, mode):
    path = tmp_path / "secret"
    path.write_bytes(KEY)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"got mode {mode:04o}"):
        Secret.from_file(path)


def test_a_link_and_a_missing_file_are_refused(tmp_path):
    (tmp_path / "real").write_bytes(KEY)
    (tmp_path / "link").symlink_to("real")
    for name in ("link", "missing"):
        with pytest.raises(ConfigError, match=f"in the file .*{name}: "):
            Secret.from_file(tmp_path / name)


def test_parts_are_signed_with_their_lengths():
    secret = Secret(KEY)
    assert secret.sign(b"ab", b"c") != secret.sign(b"a", b"bc")
    assert not secret.verify(secret.sign(b"ab", b"c"), b"abc")


def test_a_secret_never_shows_and_is_never_pickled():
    secret = Secret.generate()
    assert repr(secret) == str(secret) == "Secret(...)"
    with pytest.raises(TypeError, match="never pickled"):
        pickle.dumps(secret)


def test_generated_secrets_differ():
    assert Secret.generate().sign(b"") != Secret.generate().sign(b"")


def test_a_key_that_others_may_know_is_for_sockets_that_name_their_user():
    secret = Secret(bytes(32), for_one_user=True)
    who = Identity("run", "rpc", 0)
    with pytest.raises(ConfigError, match=r"no secret of its own.*BRAID_SECRET_FILE"):
        Listener("tcp://127.0.0.1:0", secret, who)
    with Listener("tcp://127.0.0.1:0", Secret(bytes(32)), who) as stranger:
        with pytest.raises(RendezvousError, match="no secret of its own"):
            connect(stranger.address, secret, who, timeout_s=5.0)
        assert stranger.accept_ready() == []


@pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="the system does not name users")
def test_a_key_that_others_may_know_lets_no_other_user_in(monkeypatch):
    secret = Secret(bytes(32), for_one_user=True)
    address = local_address("test")
    with Listener(address, secret, Identity("run", "rpc", 0)):
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        with pytest.raises(RendezvousError, match="this one of user 4711"):
            connect(address, secret, Identity("run", "rpc", 1), timeout_s=5.0)
