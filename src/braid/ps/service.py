"""The end of a node's part in a run: when it comes, and with which error.

    all workers have left, or the server is drained          no error
    the run has failed                                       PeerLostError
    a server is alone, and the scheduler has ended           no error
    a server is alone for `ALONE_S`                          PeerLostError; a warning with copies
    a worker is alone, and all other nodes have ended        StaleError of its waits

A server that is cut off cannot ask whether the run is over. It joins again when its network is
back, so it waits longer than other nodes wait for it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial

from braid.errors import PeerLostError
from braid.ps.postoffice import Postoffice
from braid.ps.scheduler import Scheduler
from braid.ps.server import Server

__all__ = ["end_if_left_behind", "is_over", "schedule", "serve"]

LOG = logging.getLogger(__name__)
ALONE_S = 300.0  # as long as the default deadline of waits: no node waits for the server then


def schedule(office: Postoffice, scheduler: Scheduler) -> None:
    """Run the scheduler until all workers have left; raise PeerLostError if the run fails."""
    with office.events.span("schedule"):
        office.wait_until(lambda: scheduler.is_over, math.inf)  # no deadline for work to come
    if scheduler.failure:
        raise PeerLostError(scheduler.failure)


def serve(
    office: Postoffice,
    server: Server,
    has_ended: Callable[[], bool],
    *,
    is_late: bool,
    has_copies: bool,
) -> None:
    """Answer requests until all workers have left, or the server is drained or alone.

    Args:
        office: Post office of the node.
        server: The server.
        has_ended: Returns whether the scheduler's process has ended without an error.
        is_late: Whether the run may be over before this server joins.
        has_copies: Whether other servers have copies of its shards.

    Raises:
        PeerLostError: The run has failed, or the server is alone and has the only copies.
    """
    if not office.join_unless(lambda: is_late and has_ended()):
        return
    with office.events.span("serve"):
        office.wait_until(partial(is_over, office, server, has_ended), math.inf)
    if office.failure:
        raise PeerLostError("; ".join([office.failure, *server.waiting()]))
    if server.alone_s < ALONE_S:
        return
    msg = server.alone_text(ALONE_S)
    if not has_copies:
        raise PeerLostError(msg)
    LOG.warning("braid: %s; the others go on with its copies", msg)  # an error would end them


def is_over(office: Postoffice, server: Server, has_ended: Callable[[], bool]) -> bool:
    """Return whether a server's service has ended; see `serve`."""
    directory = office.directory
    if directory is None or not directory.workers or office.failure or server.is_drained:
        return True
    alone_s = server.alone_s
    return alone_s >= ALONE_S or (alone_s > 0 and has_ended())


def end_if_left_behind(office: Postoffice) -> None:
    """End a worker's waits if all other nodes have ended, for example while it was stopped."""
    if office.links.is_left_behind and not office.failure:
        office.remove(
            f"{office.node} is left behind: it was stopped or cut off, and the scheduler and the "
            "servers have ended meanwhile"
        )
