"""The secret of a parameter server's connections."""

from __future__ import annotations

from pathlib import Path

import pytest

from braid.comm import Group
from braid.ps import rendezvous
from braid.runtime.wire import Secret
from support.worlds import run_threads

DRAWN = bytes(range(32))


def _proof(group: Group) -> bytes:
    return rendezvous.connection_secret(group, "run").sign(b"proof")


@pytest.fixture
def _draws(monkeypatch):
    monkeypatch.setattr(rendezvous.os, "urandom", lambda _: DRAWN)


@pytest.fixture
def _has_secret(monkeypatch, tmp_path):
    path = Path(tmp_path / "job.secret")
    path.touch(mode=0o600)
    path.write_bytes(b"s" * 32)
    monkeypatch.setenv("BRAID_SECRET_FILE", str(path))


@pytest.mark.usefixtures("_draws", "_has_secret")
def test_who_reads_the_frames_of_the_group_lacks_the_secret():
    first, second = run_threads(2, _proof)
    assert first == second
    assert first != Secret(DRAWN).sign(b"proof")


@pytest.mark.usefixtures("_draws")
def test_without_a_secret_of_the_job_the_group_carries_it():
    assert run_threads(2, _proof) == [Secret(DRAWN).sign(b"proof")] * 2
