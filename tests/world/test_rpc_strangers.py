"""Remote calls without braid's launcher: who can read the store cannot join."""

from __future__ import annotations

import pytest

from braid.errors import RendezvousError
from braid.rpc import RpcOptions
from braid.rpc.caller import OutgoingCall
from braid.rpc.membership import _secret, join, leave
from braid.rpc.workers import WorkerRecord
from braid.runtime.rendezvous.job_store import JobStore
from braid.runtime.store import HashStore
from braid.runtime.transport import Network
from braid.runtime.wire import Identity, Listener, Secret, connect, local_address


def test_a_stranger_who_knows_what_is_in_the_store_is_not_called(monkeypatch):
    store = HashStore()
    secret = _secret(store, JobStore(store, None, Network()), is_local=True)
    seen = Secret(bytes.fromhex(store.get("secret").decode()))
    agent = join(store, "w0", 0, None, RpcOptions(), secret=secret, address=local_address("rpc"))
    try:
        with Listener("tcp://127.0.0.1:0", seen, Identity("rpc", "worker", 7)) as stranger:
            agent.directory.add(WorkerRecord("stranger", 7, stranger.address, {}))
            with pytest.raises(RendezvousError, match="no secret of its own"):
                agent.caller.call_sync(OutgoingCall("stranger", max, (1, 2)))
            assert stranger.accept_ready() == []
        address = agent.directory.find("w0").address
        assert address.startswith("unix:@")
        monkeypatch.setattr("os.geteuid", lambda: 4711)
        with pytest.raises(RendezvousError, match="this one of user 4711"):
            connect(address, seen, Identity("rpc", "worker", 7), timeout_s=5.0)
    finally:
        monkeypatch.undo()
        leave(agent, timeout_s=20)
