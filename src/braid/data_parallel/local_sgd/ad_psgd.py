"""AD-PSGD: pairs of ranks average their models whenever they meet; no rank keeps step with others.

Problem: one slow rank makes all others slow, even if each waits for its neighbours only.

Idea: after a step of its own a rank picks another at random, and both take the mean of their two
models. If two ranks pick each other, or three in a circle, each would wait for the next: so ranks
are divided in two, and only the *active* ones, those of even rank, pick, out of the *passive* ones.
An active rank waits for one passive one. A passive one waits for nobody and answers whoever has
asked when its own step is done.

    active    step   ask 3, wait   step   ask 1, wait   finish
    passive   step   answer requests   step   step   finish: answer until all active ranks are done

Both get the same bits, and nothing happens to the models of the two in between, so the mean over
all ranks does not move.

An active rank waits at most until the passive one's step ends. In the paper a passive rank has a
second thread that answers at once, in the middle of a step. Its gradient is then added to other
parameters than those at which it was computed.

Source: Lian, Zhang, Zhang, Liu, "Asynchronous Decentralized Parallel Stochastic Gradient Descent",
ICML 2018, algorithm 1 and section 4 (bipartite graphs).
"""

from __future__ import annotations

import random
from types import TracebackType
from typing import Any

import torch

from braid.comm import StepsBy
from braid.comm.engines.work import Works
from braid.data_parallel.flat_params import Params
from braid.data_parallel.local_sgd.decentralized import Decentralized
from braid.errors import StaleError

__all__ = ["ADPSGD"]

ASK, GIVE, ANSWER = range(0x61647073, 0x61647076)  # "adps": tags of its messages
MEETS, FINISHES = range(2)


class ADPSGD(Decentralized):
    """Asynchronous averaging of pairs; a context manager that ends with `finish`.

        with ADPSGD(model.parameters(), group) as method:
            for x, y in batches:
                ...
                optimizer.step()
                method.mix()

    Ranks may take different numbers of steps. `consensus_distance` is a collective: call it after
    the block.

    Args:
        params: Parameters, as for `Decentralized`.
        process_group: Group, as for `Decentralized`.
        seed: Seed for the choice of partners.

    Attributes:
        active: Whether this rank asks; otherwise it answers.
        num_asking: Number of active ranks that have not finished, as far as this passive rank
            knows; it may train as long as there are any.

    Cost: 2 l bytes a step of an active rank; memory for two copies of the parameters.

    On failure: a lost rank raises PeerLostError on those that wait for it, and on passive ones.
    """

    def __init__(self, params: Params, process_group: Any = None, *, seed: int = 0) -> None:
        super().__init__(params, process_group)
        size, rank = self.group.size, self.group.rank
        self.active = rank % 2 == 0
        self._passive = range(1, size, 2)
        self.num_asking = (size + 1) // 2
        self._random = random.Random(f"{seed} {rank}")
        self._theirs = [torch.empty_like(flat) for flat in self._flat.flats]
        self._head = torch.zeros(2, dtype=torch.int64)
        self._asked: Works | None = None
        self._finished = False
        if not self.active:
            self._listen()

    def mix(self) -> None:
        """Average with a passive rank, or answer active ones; call after every optimizer step.

        Raises:
            StaleError: `finish` has been called.
        """
        if self._finished:
            msg = (
                f"mix() was called after finish(): rank {self.group.rank} has told its peers "
                "that it takes no more steps"
            )
            raise StaleError(msg)
        self._refuse_others()
        if self.active and self._passive:
            self._meet(self._random.choice(self._passive))
        if not self.active:
            self._answer_all()
        self.num_mixed += 1

    def finish(self) -> None:
        """End this rank's steps; return when all ranks that may still ask it have finished, too."""
        if self._finished:
            return
        self._finished = True
        if self.active:
            head = torch.tensor([self.group.rank, FINISHES])
            with self.group.coalesce(steps_by=StepsBy.WAITER) as batch:
                for passive in self._passive:
                    batch.send(head, passive, tag=ASK)
            batch.work.wait()
        while self._asked is not None:
            self._answer()

    def _meet(self, passive: int) -> None:
        flats = self._flat.read()
        head = torch.tensor([self.group.rank, MEETS])
        with self.group.coalesce(steps_by=StepsBy.WAITER) as batch:
            batch.send(head, passive, tag=ASK)
            for flat in flats:
                batch.send(flat, passive, tag=GIVE)
            for theirs in self._theirs:
                batch.recv(theirs, passive, tag=ANSWER)
        batch.work.wait()
        for flat, theirs in zip(flats, self._theirs, strict=True):
            flat.copy_(theirs)
        self._flat.write()

    def _answer_all(self) -> None:
        """Answer each rank that has asked, once.

        A quick rank must not keep this one from its own steps.
        """
        health = self.group.context.health
        health.collect()  # polling for a message does not show that its sender is dead
        health.check(self.group.ranks, -1)
        for _ in range(self.num_asking):
            if self._asked is not None and self._asked.done():
                self._answer()

    def _listen(self) -> None:
        """Start to receive the next request, as long as active ranks remain."""
        self._asked = None
        if self.num_asking:
            with self.group.coalesce(steps_by=StepsBy.WAITER) as batch:
                batch.recv(self._head, None, tag=ASK)
            self._asked = batch.work

    @torch.no_grad()
    def _answer(self) -> None:
        assert self._asked is not None
        self._asked.wait()
        rank, wants = self._head.tolist()
        if wants == FINISHES:
            self.num_asking -= 1
        else:
            with self.group.coalesce(steps_by=StepsBy.WAITER) as batch:
                for theirs in self._theirs:
                    batch.recv(theirs, rank, tag=GIVE)
            batch.work.wait()
            flats = self._flat.read()
            for flat, theirs in zip(flats, self._theirs, strict=True):
                flat.add_(theirs).mul_(0.5)
            with self.group.coalesce(steps_by=StepsBy.WAITER) as batch:
                for flat in flats:
                    batch.send(flat, rank, tag=ANSWER)
            batch.work.wait()
            self._flat.write()
        self._listen()

    def __enter__(self) -> ADPSGD:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.finish()
