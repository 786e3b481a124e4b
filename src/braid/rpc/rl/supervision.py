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

__all__ = ["lead"]

LOG = logging.getLogger(__name__)
END_S = 30.0  # for actors to end their last unrolls
AGAIN_S = 2.0  # between two calls of lost actors


def lead(
    learner: Learner,
    actors: Sequence[str],
    play: Callable[..., None],
    args: Sequence[Any] = (),
    *,
    is_over: Callable[[Statistics], bool],
    timeout_s: float | None = 300.0,
) -> Statistics:
    """Let actors play, and learn from them, until training is over; runs in the learner's process.

    Args:
        learner: The learner.
        actors: Names of the nodes that play.
        play: Function that runs in each of them, with a reference to the learner and the actor's
            number before `args`; it ends when the learner has no weights for it any more.
        args: More arguments of it.
        is_over: Whether training is over; called after each update of the weights.
        timeout_s: Seconds to wait for experience; for ever when None.

    On failure: a lost actor is left out and logged; its unfinished unroll is lost with it. If a new
    process takes its role (`braid run --restarts`), it plays instead. Actors that have not ended
    30 s after the training has are logged.

    Raises:
        ConfigError: There is no actor.
        CommTimeout: No experience came in time.
        PeerLostError: All actors are lost.
        Exception: Raised by `play` in an actor.
    """
    if not actors:
        msg = "a training needs an actor: start the program with --role actor:2"
        raise ConfigError(msg)
    shared = RRef(learner)

    def start(number: int, name: str) -> None:
        call = rpc_async(name, play, (shared, number, *args), timeout=0)
        learner.join(name)
        call.add_done_callback(partial(_ended, learner, name))

    try:
        for number, name in enumerate(actors):
            start(number, name)
        again_s = 0.0  # when lost actors are called again
        while not is_over(learner.statistics):
            learner.step(timeout_s)
            missing = learner.missing if time.monotonic() >= again_s else ()
            for name in missing:
                again_s = time.monotonic() + AGAIN_S
                with contextlib.suppress(CommError, RendezvousError):  # no new process so far
                    rpc_sync(name, _answer, timeout=AGAIN_S)
                    start(actors.index(name), name)
                    LOG.warning("a new process plays as %s", name)
    finally:
        learner.stop()
        if late := learner.wait_for_actors(END_S):
            LOG.warning("%s did not end within %g s", ", ".join(late), END_S)
    return learner.statistics


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
