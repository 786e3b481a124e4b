"""Program that an engine starts on each of its nodes: an agent that joins the launcher.

python -m braid.launch.engines.joined_agent    with an `Invitation` on stdin
"""

from __future__ import annotations

import os
import socket
import sys

from braid.errors import ConfigError
from braid.launch.cluster.agent import LOST_EXIT_CODE, JoinRequest, serve
from braid.launch.cluster.join import dial
from braid.launch.engines.invitation import Invitation, forget_engine
from braid.runtime.rendezvous.interfaces import machine
from braid.runtime.wire import Address

__all__ = ["main"]

CANNOT_JOIN = 2


def main() -> int:
    """Join the launcher and serve until the run ends; return the exit code."""
    try:
        invitation = Invitation.from_line(sys.stdin.buffer.readline())
        node = invitation.number(os.environ)
        forget_engine()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        addresses = invitation.addresses
        if invitation.machine != machine():  # loopback leads to this machine
            addresses = tuple(a for a in addresses if not Address.parse(a).is_loopback)
        secret = invitation.key
        link = dial(addresses, secret, node, invitation.limit_s, _print)
        request = JoinRequest(node, len(invitation.nodes), 0, (), secret, is_on_engine=True)
        bye = serve(link, join_request=request)
    except ConfigError as exc:
        _print(str(exc))
        return CANNOT_JOIN
    if bye.exit_code == LOST_EXIT_CODE and bye.text:
        _print(bye.text)
        return LOST_EXIT_CODE
    return 0  # the launcher reports how the run has ended


def _print(text: str) -> None:
    print(f"braid: {text} ({socket.gethostname()})", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
