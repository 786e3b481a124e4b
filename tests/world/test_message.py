"""Vans over sockets and inside a process: the promises of all vans, and what the network can do to them."""

from __future__ import annotations

import contextlib
import itertools
import os

import pytest

from braid.message import LocalNetwork, SocketVan
from braid.testing.message_conformance import (
    CONFORMANCE_CONFIG,
    CONFORMANCE_SCHEMA,
    VAN_CLAIMS,
    check_van,
)
from braid.wire import Secret

SECRET = Secret.generate()
_names = itertools.count()


def socket_address(kind):
    if kind == "tcp":
        return "tcp://127.0.0.1:0"
    return f"unix:@braid-message-{os.getpid()}-{next(_names)}"


def open_van(node, config=None, *, kind="unix", listen=True, **kwargs):
    kwargs = {"secret": SECRET, "run_id": "run", **kwargs}
    address = socket_address(kind) if listen else ""
    return SocketVan(node, CONFORMANCE_SCHEMA, listen=address, config=config, **kwargs)


def socket_vans(kind):
    @contextlib.contextmanager
    def make(config):
        with contextlib.ExitStack() as stack:
            vans = [
                stack.enter_context(open_van(f"worker:{n}", config, kind=kind)) for n in range(3)
            ]
            for van in vans[1:]:
                vans[0].connect(van.node, van.address, timeout_s=10)
            yield vans
            for van in vans:
                van.close(0)

    return make


@contextlib.contextmanager
def local_vans(config):
    network = LocalNetwork(CONFORMANCE_SCHEMA, config=config)
    with contextlib.ExitStack() as stack:
        vans = [network.join(f"worker:{n}") for n in range(3)]
        for van in vans[1:]:
            vans[0].connect(van.node)
        yield vans
        for van in vans:
            stack.callback(van.close, 0)


@pytest.mark.parametrize("claim", VAN_CLAIMS, ids=lambda claim: claim.__name__)
@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_socket_van_keeps_its_promises(kind, claim):
    with socket_vans(kind)(CONFORMANCE_CONFIG) as vans:
        claim(vans)


def test_local_van_conforms():
    check_van(local_vans)
