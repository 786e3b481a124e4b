"""Buckets for every recurring pattern of frozen and unfrozen parameters.

Problem: programs freeze and unfreeze parameters. Some do so once, for fine-tuning; others in every
step, for example with adversarial pairs. New buffers in shared memory and a new order to agree on
would then cost more than the step itself. But buckets that are kept occupy memory.

Idea: the pattern of parameters that require a gradient is the key. When it changes, the old buckets
are retired, unless their key has occurred before: such a program alternates, so the buckets of its
last few patterns are kept. Retired buckets release their memory and channels.

Buckets are retired only after all ranks have reported that they require the same gradients. Until
then a single rank may have changed its pattern, for example to run the model once with frozen
parameters, and may change it back. Other ranks do not see this, so its old buckets and channels
must still exist.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from operator import or_

import torch

from braid.comm import Group
from braid.parallel.gradients.bucket_layout import waiting_cost
from braid.parallel.gradients.buckets import Buckets
from braid.parallel.gradients.hook_schedule import StateHook
from braid.parallel.gradients.reducer_options import ReducerOptions
from braid.parallel.gradients.table import ParamRecord

__all__ = ["BucketLayoutCache"]

LOG = logging.getLogger(__name__)

REBUILD_GAIN = 0.9  # new buckets pay if the waiting cost falls to this fraction or less
MAX_KEPT = 4  # patterns of programs that alternate
MAX_SEEN = 64  # recent patterns; programs may choose at random in every step


class BucketLayoutCache:
    """Buckets in use, and former buckets for sets of trained parameters that may come back.

    Args:
        group: Ranks that reduce together.
        records: Parameters that are reduced.
        options: Sizes, wire format and delayed parameters.

    Attributes:
        current: Buckets of the parameters that require a gradient now.
    """

    def __init__(
        self, group: Group, records: Sequence[ParamRecord], options: ReducerOptions
    ) -> None:
        self._group = group
        self._records = records
        self._options = options
        self._hook: StateHook | None = None
        self._seen: deque[tuple[bool, ...]] = deque(maxlen=MAX_SEEN)
        self._kept: dict[tuple[bool, ...], Buckets] = {}  # in order of last use
        self.current = self._agreed = self._make(self._pattern())

    def use_hook(self, hook: StateHook) -> None:
        """Run a communication hook, instead of the all-reduce, in all current and later buckets."""
        self._hook = hook
        for buckets in {self.current, self._agreed, *self._kept.values()}:
            buckets.use_hook(hook)

    def refresh(self, *, accumulating: bool) -> bool:
        """Record which parameters require a gradient now; return whether `current` has changed.

        Args:
            accumulating: Whether there are accumulated gradients that are not averaged yet; their
                parameters stay in the buckets even if they are frozen now.
        """
        old = self.current
        pattern = self._pattern()
        if accumulating:
            pattern = tuple(map(or_, pattern, old.requires_grad))
        if pattern == old.requires_grad:
            return False
        residuals = old.residuals()
        old.add_residuals({})  # moved to the new buckets
        known = {buckets.requires_grad: buckets for buckets in (*self._kept.values(), self._agreed)}
        if old not in known.values():  # and other ranks do not use it
            old.retire()
        # new channels: messages of a rank that changes alone must not match old buckets
        self.current = known.get(pattern) or self._make(pattern)
        self.current.add_residuals(residuals)
        return True

    def agree(self) -> None:
        """Release the previous buckets, or keep them if their set of parameters has come back.

        Called when all ranks use `current`.
        """
        old, self._agreed = self._agreed, self.current
        if old is self.current:
            return
        self._kept.pop(self.current.requires_grad, None)
        if old.requires_grad in self._seen:
            self._kept[old.requires_grad] = old
        else:
            self._seen.append(old.requires_grad)
            old.retire()
        if len(self._kept) > MAX_KEPT:
            self._kept.pop(next(iter(self._kept))).retire()

    def improve(self, device: torch.device) -> None:
        """Rebuild buckets in the order of rank 0's gradients, if that is better; a collective.

        Args:
            device: Device on which the group sends small messages.
        """
        old = self.current
        positions = [*old.arrivals, *(p for p in old.of if p not in old.arrivals)]
        agreed = torch.tensor(positions, dtype=torch.int64, device=device)
        self._group.broadcast(agreed, 0)
        order: list[int] = agreed.tolist()
        cost = waiting_cost(old.layouts, old.specs, order)
        better = waiting_cost(old.plan(order), old.specs, order)
        pays = not old.has_delayed and better < REBUILD_GAIN * cost
        LOG.info(
            "buckets %s: in the order of gradients, ranks would wait %.0f %% as long",
            "are filled again" if pays else "stay",
            100 * better / cost if cost else 100.0,
        )
        if pays:
            residuals = old.residuals()
            self.current = self._agreed = self._make(old.requires_grad, order)
            self.current.add_residuals(residuals)
            old.retire()
        self.current.is_learnt = True

    def _make(self, pattern: tuple[bool, ...], order: Sequence[int] = ()) -> Buckets:
        buckets = Buckets(self._group, self._records, pattern, self._options, order)
        LOG.info("gradients are averaged in buckets of %s bytes", buckets.sizes_bytes)
        if self._hook is not None:
            buckets.use_hook(self._hook)
        return buckets

    def _pattern(self) -> tuple[bool, ...]:
        return tuple(record.param.requires_grad for record in self._records)

    def __repr__(self) -> str:
        return f"BucketLayoutCache({self.current!r}, {len(self._kept)} kept)"
