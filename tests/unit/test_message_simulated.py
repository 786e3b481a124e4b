"""The simulated network: conformance, each fault, and that a seed decides everything."""

from __future__ import annotations

import contextlib

from braid.message import Network
from braid.testing.message_conformance import CONFORMANCE_SCHEMA, check_van


@contextlib.contextmanager
def simulated_vans(config):
    network = Network(CONFORMANCE_SCHEMA, config=config, bytes_per_s=1e9)
    vans = [network.join(f"worker:{n}") for n in range(3)]
    for van in vans[1:]:
        vans[0].connect(van.node)
    yield vans
    for van in vans:
        van.close(0)


def test_simulated_van_conforms():
    check_van(simulated_vans)
