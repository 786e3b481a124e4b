"""A loop that goes on when ranks die or come, with the bits of an undisturbed run.

    with braid.elastic(model, optimizer) as training:
        for epoch in training.epochs(3):
            for x, y in training.batches(loader):
                with training.step():
                    loss_of(model(x), y).backward()

The number of micro-batches of a step is the number of ranks at first (`shards`); each has the batch
size of the loader. Ranks take them in turn (`rounds`) and add up gradients in their order
(`gradient_sums`), so weights do not depend on the number of ranks. (With `batch_per_rank` a step
has one for each rank; see `learning_rate`.) When a rank is lost, its peers leave the step that it
has broken. The launcher chooses who goes on (`launch.supervise.membership_state`), members that
lack the newest state get it (`state_transfer`), and the step is done again with other shares of the
micro-batches. Processes that come are taken in after a step.

    step      | forward  backward | sum of gradients | update | pause?
    a loss    any wait in it raises PeerLostError  ->  next epoch, state, the same step again

SIGTERM, with which schedulers announce that a host goes away, lets a rank leave after its step: its
program ends by SystemExit inside of `step()`, with code 0, and the others go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from braid.elasticity.evaluation import Evaluation
from braid.elasticity.gradient_sums import warn_of_idle_ranks
from braid.elasticity.learning_rate import RateRule, rate_factor
from braid.elasticity.members import Members, leave_if_asked, notices, on_trial, require_change
from braid.elasticity.micro_batches import DataPosition, MicroBatches, require_same_data, seed_all
from braid.elasticity.replica import Replica
from braid.elasticity.rounds import StepRounds
from braid.elasticity.saving import TrainingCheckpoints
from braid.elasticity.state_transfer import Stateful, fingerprint, refuse_changes
from braid.elasticity.suspects import CheckedSteps, StepTimes, leave_if_wrong
from braid.elasticity.update_guard import UpdateGuard
from braid.errors import CommError, ConfigError
from braid.parallel.gradients import ParamRecord

__all__ = ["ElasticTraining"]

T = TypeVar("T")

MOST_SHARDS = 1 << 20  # micro-batches of a step, for random numbers by step and micro-batch


class ElasticTraining(AbstractContextManager["ElasticTraining"]):
    """A training with ranks that may change; made by `braid.elastic`.

    Args:
        members: The ranks.
        replica: Model of this member.
        num_shards: Number of micro-batches of a step; the number of first members when None.
        seed: Seed of the order of samples, and of random numbers.
        update: Called when `.grad` contains the mean; the optimizer's step when None.
        batch_per_rank: Rule of the learning rate, if each rank keeps its number of samples.
        verify: Number of steps between two checks of gradients; 0 for none.
        replace_slow: Factor by which a rank must be slower to be replaced; 0 for never.
        checkpoints: Checkpoints that the training saves, and may go back to.
        evaluation: Evaluation between steps.
        flip_bits: Called with the parameters after each backward, to test `verify`.

    Attributes:
        num_shards: Number of micro-batches of a step; the last one of a pass may have fewer.
        num_at_first: Number of replicas at the beginning of the training.
        num_samples: Number of samples of the last step.
        num_steps: Number of steps so far.
        at: Position in the data of the next step: pass, and samples before the step.
        loss: Mean loss of the last step, on all ranks, from the losses of `add_loss`; NaN without.
        grad_norm: Norm of the last gradient before `clip` of `braid.elastic_mesh`; NaN without.
        num_changes: Number of changes of the members since this process joined.
    """

    def __init__(
        self,
        members: Members,
        replica: Replica,
        *,
        num_shards: int | None,
        seed: int,
        update: Callable[[], object] | None,
        batch_per_rank: RateRule | None = None,
        verify: int = 0,
        replace_slow: float = 0.0,
        checkpoints: TrainingCheckpoints | None = None,
        evaluation: Evaluation | None = None,
        flip_bits: Callable[[Sequence[ParamRecord]], object] | None = None,
    ) -> None:
        self._members = members
        self._verify = verify
        self._checkpoints = checkpoints or TrainingCheckpoints()
        self._saved = (-1, -1)  # steps and version
        self._evaluation = evaluation or Evaluation()
        self.num_shards = num_shards or 0
        self.num_samples = self.num_steps = self.num_at_first = 0
        self.at = DataPosition()
        self._replica = replica
        self._seed = seed
        self._update = update
        self._samples: MicroBatches | None = None
        self._newcomers: frozenset[int] = frozenset()  # until they have compared their data
        self._unchecked: set[int] = set()  # members, by the launcher's number, before a check
        self._before_update: set[int] = set()  # members before their first update
        self._met = (-1, -1)  # version and epoch of the data that members have compared
        self.loss = self.grad_norm = math.nan
        self.num_changes = -1
        self._version = 0  # batches are dealt again when the version changes
        self._compares = bool(verify or replace_slow)
        self._times = StepTimes(replace_slow, replica)
        self._wants_change = False  # members change before the next step
        self._pass: int | None = None  # the pass over the data that `epochs` has yielded
        self._fingerprint: dict[str, str] = {}
        self._is_exiting = False
        self._is_over = False  # other members have left the block, and do not train any more
        self._data: dict[str, Any] = {}  # facts of the samples of this pass
        self._is_prepared = False  # this member could update, and others may have done so
        self._notices = notices(members)
        self._guard = UpdateGuard()
        self._rule = batch_per_rank
        self._flip_bits = flip_bits or (lambda _: None)

    def __enter__(self) -> ElasticTraining:
        if self._members.is_newcomer:
            on_trial(self._members, partial(self._join_next_epoch, -1))
        else:
            self._enter_epoch([-1] * self._members.group.size)
        self._notices.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._guard.close()
        self._notices.__exit__(None, None, None)
        self._is_exiting = kind is None
        while kind is None:
            if self._met[0] != self._version and not self._meets():
                continue
            if self._evaluation.is_due(self.num_steps) and not self._survives(self._evaluate):
                continue
            needs_save = self._saved != (self.num_steps, self._version)
            if self._checkpoints and needs_save and not self._survives(self._save):
                continue
            if self._survives(self._members.group.barrier):  # others may lack the last step
                break

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the remaining passes over the data, out of `count` passes."""
        while self.at.epoch < count and not self._is_over:
            epoch = self._pass = self.at.epoch
            yield epoch
            if self.at.epoch == epoch and not self._is_over:
                msg = f"epoch {epoch} has not been trained: loop over training.batches(loader)"
                raise ConfigError(msg)

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield the micro-batches of this rank for the rest of the epoch, one for each `step()`.

        Args:
            loader: Loader with the same data set on all ranks. It determines how samples are read,
                the batch size, and whether samples are shuffled; ranks get different samples.

        Raises:
            ConfigError: The loader's order cannot be kept, or the loop has skipped a `step()`.
        """
        data = self._micro_batches(loader)
        epoch = self.at.epoch
        if self._pass not in {None, epoch}:
            msg = (
                f"batches() was called again in pass {self._pass} of epochs(), after its data was "
                "trained: use one loader in each pass"
            )
            raise ConfigError(msg)
        while True:
            if self._met[0] != self._version and not self._meets():
                continue
            if self.at.epoch != epoch or self._is_over:
                break
            if self._met[1] != epoch and not self._meets():
                continue
            version, group = self._version, self._replica.group
            self._times.go_on()
            for batch in data.after(
                *(self.at, group.rank, group.size, self.num_shards, self.num_steps),
                checks=self._rounds.checks,
                fills=self._replica.needs_all,
            ):
                before = self.num_steps, self._rounds.position
                shard = self._rounds.shard(self.num_steps, len(self._sizes))
                number = self.num_steps * MOST_SHARDS + shard
                if not self._survives(partial(self._replica.begin, number)):
                    break
                yield batch
                if self._version == version:  # else `_meets` evaluates, also on new members
                    self._end_turn()
                if self._version != version or self.at.epoch != epoch:
                    break
                if before == (self.num_steps, self._rounds.position):
                    msg = "a batch was not used: put `with training.step():` around its backward"
                    raise ConfigError(msg)

    @property
    def model(self) -> Any:
        """The current model, replaced when members change: a `HybridParallel` on a mesh."""
        return getattr(self._replica, "model", self._replica.state.model)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The current optimizer; on a mesh it is replaced when members change."""
        return self._replica.state.optimizer

    @property
    def others(self) -> Mapping[str, Stateful]:
        """Further objects of the training, by name."""
        return self._replica.state.others

    @property
    def ends_epoch(self) -> bool:
        """Whether the current step is the last step of its pass over the data, for `update`."""
        assert self._samples is not None
        return self._samples.next(self.at, self.num_shards).epoch != self.at.epoch

    @property
    def _sizes(self) -> list[int]:
        """Numbers of samples of the micro-batches of this step."""
        assert self._samples is not None
        return self._samples.sizes(self.at, self.num_shards)

    def _meets(self) -> bool:
        """Compare with all members what comes next, and repeat a broken evaluation; a collective.

        Returns whether the members have stayed the same.
        """
        if self._wants_change:
            self._change_members()
            return False
        group, samples = self._members.group, self._samples
        facts: dict[str, object] = {"training": self._members.number, **self.at._asdict()}
        facts |= {"is done": self._is_exiting} if self._is_exiting else {}
        if samples is not None and samples.epoch == self.at.epoch and not self._is_exiting:
            self._data = self._try(partial(samples.facts, self.at, self.num_shards, self._data))
            facts |= self._data
        is_due = self._evaluation.is_due(self.num_steps)
        try:
            answers = group.objects.all_gather((facts, is_due))
        except CommError as error:
            self._recover(error)
            return False
        self._is_over = any(theirs.pop("is done", False) for theirs, _ in answers)
        self._try(
            partial(require_same_data, group, [theirs for theirs, _ in answers], self._newcomers)
        )
        self._newcomers = frozenset()
        self._met = self._version, self.at.epoch
        return not any(due for _, due in answers) or self._survives(self._evaluate)

    def _try(self, call: Callable[[], T]) -> T:
        """Call `call`; if it fails on a new member, only this member ends."""
        is_new = self._members.group.rank in self._newcomers
        return on_trial(self._members, call) if is_new else call()

    def _evaluate(self) -> None:
        buffers = self._rounds.buffers
        buffers.begin(is_first=True)  # which an evaluation leaves as they are
        self._evaluation.run(self.num_steps)
        buffers.restore()

    def _end_turn(self) -> None:
        """Evaluate if it is due, and go on with other members if one of them wants that."""
        is_due = self._evaluation.is_due(self.num_steps)
        if (not is_due or self._survives(self._evaluate)) and self._wants_change:
            self._change_members()

    def _change_members(self) -> None:
        """Go on with the members of the next epoch, or leave."""
        self._wants_change = False
        members = self._members
        leaves = members.leaves or members.is_last_epoch  # once: a signal may change it
        if self._checkpoints and not self._survives(lambda: self._save(is_wanted=leaves)):
            return
        facts = members, self._replica.part_names, self.num_steps
        if self._survives(partial(leave_if_asked, *facts, leaves=leaves)):
            self._join_next_epoch(self.num_steps)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context for the backward of one micro-batch; the last one of a step updates weights.

        Then `.grad` is the mean over all micro-batches, and the optimizer (or `update`) is called.
        If a rank is lost meanwhile, the context raises no error, and the step is repeated.
        """
        try:
            refuse_changes(self._replica.state, self._fingerprint, self._replica.records)
            place = self.num_steps, len(self._sizes)
            seed_all(self._seed, self.num_steps, self._rounds.shard(*place))
            self._rounds.begin(*place)
            yield
            self._flip_bits(self._replica.records)
            self._end_micro_batch()
        except CommError as error:
            self._recover(error)

    def _survives(self, collective: Callable[[], object]) -> bool:
        """Call a collective; returns whether the members have stayed the same."""
        try:
            collective()
        except CommError as error:
            self._recover(error)
            return False
        return True

    def _recover(self, error: CommError) -> None:
        """Go on with the members of the next epoch after a loss, with this step again."""
        require_change(self._members, error)
        if not self._is_prepared:
            self._restart_step()
        self._join_next_epoch(self.num_steps)

    def _end_micro_batch(self) -> None:
        """Add the micro-batch to the step, and end the step after the last round."""
        members = self._members
        self._times.wait()
        if self._rounds.end_check():
            return
        wrong = self._rounds.find_wrong(self.num_steps + 1, can_lose=members.can_lose)
        if wrong is not None:
            self._leave_out(wrong)
            return
        pauses = self._rounds.add_up(self._sizes, lambda: members.pauses or members.leaves)
        self._times.go_on()
        if pauses is None:
            return
        self._wants_change = self._end_step(pauses)
        slow, reason = self._times.find_slow(members, self.num_steps)
        if slow == members.group.rank:
            members.offer_to_leave(self.num_steps, reason)
        self._wants_change |= slow is not None
        if self._checkpoints.is_due(self.num_steps):
            self._save()

    def _leave_out(self, wrong: Sequence[int]) -> None:
        """Do the step again, without the ranks that compute wrongly, if they are known."""
        self._restart_step()
        members = self._members
        if members.group.rank in wrong:
            reason = f"has computed other gradients than its peers in step {self.num_steps + 1}"
            leave = members.offer_to_leave if members.can_lose else members.leave  # a newcomer
            leave(self.num_steps, reason)
        self._wants_change |= bool(wrong)

    def add_loss(self, loss: torch.Tensor | float) -> None:
        """Add `loss` to this micro-batch's loss, inside of `step()`; see the attribute `loss`."""
        self._rounds.add_loss(loss.item() if isinstance(loss, torch.Tensor) else loss)

    def _restart_step(self) -> None:
        """Begin the step again, and deal its micro-batches again."""
        self._rounds.restart()
        self._version += 1

    def _end_step(self, pauses: bool) -> bool:
        """Update the weights; returns whether any member wants a pause."""
        self.loss = self._rounds.set_gradients()
        self.grad_norm = self._replica.prepare()
        self._is_prepared = True
        pauses = self._replica.agree(flag=pauses)
        new = self._before_update
        self._take_step()
        self._replica.share()
        if new:
            pauses |= leave_if_wrong(self._members, self._replica, new, self.num_steps)
        return pauses

    def _take_step(self) -> None:
        """Update the weights; not a collective."""
        self._is_prepared = False
        self._rounds.buffers.keep()
        seed_all(self._seed, self.num_steps, self.num_shards)
        with self._guard.update():
            (self._update or self.optimizer.step)()
        self._replica.updated()
        self._rounds.end()
        if not self._rounds.checks.newcomers:
            self._unchecked.clear()
        self._before_update = set()  # with the step, so that all members have the same
        self._fingerprint = fingerprint(self._replica.state)
        assert self._samples is not None
        self.num_samples = sum(self._sizes)
        self.at = self._samples.next(self.at, self.num_shards)
        self.num_steps += 1
        self._members.finished_step(self.num_steps, None if self._rule else self._replica.weights)

    def _join_next_epoch(self, num_steps: int) -> None:
        """Go on with the members of the next epoch, from the state that has seen most steps."""
        self._enter_epoch(self._members.next_epoch(num_steps, self._checkpoints.directory))

    def _enter_epoch(self, num_steps: list[int]) -> None:
        """Begin an epoch; if a member dies meanwhile, begin the next one."""
        while True:
            try:
                self._begin_epoch(num_steps)
            except CommError as error:
                require_change(self._members, error)
                seen = self.num_steps if self.num_changes >= 0 else -1
                num_steps = self._members.next_epoch(seen, self._checkpoints.directory)
            else:
                return

    def _begin_epoch(self, num_steps: list[int]) -> None:
        """Take over the newest state, and get ready to train with these members; a collective."""
        members = self._members.group
        if self._is_prepared:  # update if a member has done so, since all agreed before
            newest = max(num_steps)
            if newest > self.num_steps:
                self._take_step()
            else:
                self._is_prepared = False
                self._restart_step()
            num_steps = [newest if seen >= 0 else seen for seen in num_steps]
        progress = self._progress
        try:
            self._replica.enter(members, num_steps, progress, self._checkpoints)
        finally:  # the state of the replica and these numbers belong together
            self.num_steps, self.at = progress["num_steps"], DataPosition(*progress["at"])
            self.num_shards, self.loss = progress["num_shards"], progress["loss"]
            self._data, self.num_at_first = progress["data"], progress["num_at_first"]
        if max(num_steps) < 0:
            self._checkpoints.check_loaded(self.num_steps, self._members)
        group, state = self._replica.group, self._replica.state
        self.num_at_first = self.num_at_first or group.size
        self.num_shards = group.size if self._rule else self.num_shards or members.size
        if self.num_changes < 0:
            self._evaluation.skip(self.num_steps)
        warn_of_idle_ranks(group, self.num_shards, compares=self._compares)
        self._guard.watch(state.optimizer, rate_factor(self._rule, group.size, self.num_at_first))
        new = [rank for rank, seen in enumerate(num_steps) if seen < 0 <= max(num_steps)]
        self._newcomers = frozenset(new)
        numbers = [members.context.health.number(rank) for rank in members.ranks]
        unchecked = {*progress.get("unchecked", ()), *(numbers[rank] for rank in new)}
        self._unchecked = unchecked.intersection(numbers)
        before_update = {*progress.get("before_update", ()), *(numbers[rank] for rank in new)}
        self._before_update = before_update.intersection(numbers)
        checks = CheckedSteps(self._verify, frozenset(map(numbers.index, self._unchecked)))
        self._rounds = StepRounds(self._replica, members, checks)
        self._times.clear()
        self._wants_change = self._members.is_last_epoch
        self._fingerprint = fingerprint(state)
        self.num_changes += 1
        self._version += 1

    @property
    def _progress(self) -> dict[str, Any]:
        return {
            "training": self._members.number,
            "num_steps": self.num_steps,
            "at": list(self.at),
            "num_shards": self.num_shards,
            "num_at_first": self.num_at_first,
            "loss": self.loss,
            "data": self._data,
            "unchecked": sorted(self._unchecked),
            "before_update": sorted(self._before_update),
        }

    def _save(self, *, is_wanted: bool = True) -> None:
        """Save a checkpoint if members want it; see `TrainingCheckpoints.vote`."""
        members, is_only = self._members, not self._replica.part_names
        if self._checkpoints.vote(members, self.num_steps, is_wanted=is_wanted, is_only=is_only):
            self._checkpoints.save(members, self.model, self._replica.state, self._progress)
            self._saved = self.num_steps, self._version

    def _micro_batches(self, loader: DataLoader[Any]) -> MicroBatches:
        if self._rounds.position != (0, None):
            msg = "batches() was left within a step: break only after num_steps has increased"
            raise ConfigError(msg)
        samples = self._samples
        if samples is None or samples.loader is not loader:
            make = partial(MicroBatches, loader, self._seed, per_rank=self._rule is not None)
            samples = self._samples = self._try(make)
        samples.epoch = self.at.epoch
        return samples
