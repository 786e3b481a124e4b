"""Leads a training: starts the actors, learns until it is over, and goes on without those that die.

    rpc.init_rpc()
    if rpc.own_role().name == "learner":
        lead(learner, rpc.names_of("actor"), play, is_over=lambda now: now.mean_return >= 475)
    rpc.shutdown()

Each actor runs `play` as one long call of the learner's process. The end of that call is the
learner's news of it: a value when training is over, an exception of `play`, or the loss of the
process.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from braid.errors import CommError, ConfigError, PeerLostError, RendezvousError
from braid.rpc import RRef, register, rpc_async, rpc_sync
from braid.rpc.rl.learner import Learner, Statistics
from braid.rpc.roles import num_restarts

__all__ = ["lead"]

LOG = logging.getLogger(__name__)
END_S = 30.0  # for actors to end their last unrolls
AGAIN_S = 2.0  # between two calls of lost actors
START_S = 300.0  # for a new process to come, without a limit for experience


def lead(
    learner: Learner,
    actors: Sequence[str],
    play: Callable[..., None],
    args: Sequence[Any] = (),
    *,
    is_over: Callable[[Statistics], bool],
    timeout_s: float | None = 300.0,
) -> Statistics:
    """Start actors, and train on their experience until `is_over`; runs in the learner's process.

    Args:
        learner: The learner.
        actors: Names of the nodes that play.
        play: Function that runs in each of them, with a reference to the learner and the actor's
            number before `args`; it ends when the learner returns None instead of weights.
        args: Further arguments of `play`.
        is_over: Whether training is over; called after each update of the weights.
        timeout_s: Seconds to wait for experience; unlimited when None. If all actors are lost,
            also the seconds to wait for a new process; 300 s when None.

    On failure: training continues without a lost actor, which is logged. If a new
    process takes its role (`braid run --restarts`), it plays instead. If all actors are lost, the
    learner waits for a new process. Actors that have not ended 30 s after the training has are
    logged.

    Raises:
        ConfigError: `actors` is empty.
        CommTimeout: No experience came in time.
        PeerLostError: All actors are lost, and no process replaces them in time.
        Exception: Raised by `play` in an actor.
    """
    if not actors:
        msg = "the program has no actors: start the program with --role actor:2"
        raise ConfigError(msg)
    shared = RRef(learner)

    def start(name: str) -> None:
        call = rpc_async(name, play, (shared, actors.index(name), *args), timeout=0)
        learner.join(name)
        call.add_done_callback(partial(_ended, learner, name))

    try:
        for name in actors:
            start(name)
        again_s = 0.0  # when lost actors are called again
        while not learner.is_over and not is_over(learner.statistics):
            try:
                learner.step(timeout_s)
            except PeerLostError:  # no actor is left
                if not 0 < len(learner.statistics.lost) <= num_restarts():
                    raise
                if not _wait_for_process(learner, start, timeout_s):
                    raise
            if time.monotonic() >= again_s and learner.missing:
                _call_missing(learner, start)
                again_s = time.monotonic() + AGAIN_S
    finally:
        learner.stop()
        if late := learner.wait_for_actors(END_S):
            LOG.warning("%s did not end within %g s", ", ".join(late), END_S)
    return learner.statistics


def _wait_for_process(
    learner: Learner, start: Callable[[str], None], timeout_s: float | None
) -> bool:
    """Wait until a new process plays as a lost actor; return whether one came in time."""
    until_s = time.monotonic() + (START_S if timeout_s is None else timeout_s)
    while not _call_missing(learner, start):
        if time.monotonic() >= until_s:
            return False
        time.sleep(AGAIN_S)
    return True


def _call_missing(learner: Learner, start: Callable[[str], None]) -> bool:
    """Start actors that were lost and have a new process; return whether there was one."""
    missing = learner.missing
    for name in missing:
        with contextlib.suppress(CommError, RendezvousError):  # no new process so far
            rpc_sync(name, _answer, timeout=AGAIN_S)
            start(name)
            LOG.warning("a new process plays as %s", name)
    return len(learner.missing) < len(missing)


@register
def _answer() -> None:
    """Return, which shows that this node can be called."""


def _ended(learner: Learner, name: str, call: torch.futures.Future[None]) -> None:
    """Note that an actor has ended."""
    try:
        call.value()
    except PeerLostError as exc:
        LOG.warning("training goes on without %s: %s", name, exc)
        learner.leave(name, exc)
    except Exception as exc:  # noqa: BLE001 - raised by the learner's next step
        learner.leave(name, exc)
    else:
        learner.leave(name)
