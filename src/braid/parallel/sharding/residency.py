"""Gathering and freeing of units: parameters are gathered before use and freed after it.

    forward    |--- unit 0 ---|--- unit 1 ---|--- unit 2 ---|
    gather      0  1           .  2           .
    free                       0              1                    (all but the root)

    backward   |--- unit 2 ---|--- unit 1 ---|--- unit 0 ---|
    gather      2  1           .  0
    free                       2              1              0

While a unit computes, the next unit is being gathered, if its slot is free. The next unit is
guessed from the order of the last forward, which need not hold. Parameters that backward needs but
that are not gathered, for example because their unit was freed too early, are gathered on demand.

All ranks gather in the same order. If the loss of a rank does not depend on a unit, the other ranks
would wait for its part. So a rank gathers all units that backward passes, in the order of
`unit_calls`, and starts the sums of units that get no further gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from braid.comm.autograd.nested import map_tensors, tensors_in
from braid.errors import ConfigError
from braid.parallel.gradients.autograd_grad import is_in_backward
from braid.parallel.gradients.optimizer_in_place import refuse_copy
from braid.parallel.sharding.flat_shard import FlatShard
from braid.parallel.sharding.saved_params import SavedParams
from braid.parallel.sharding.unit_calls import ForwardCalls, UnitCall

__all__ = ["CALL", "Residency", "Unit"]

CALL = "braid_unit_call"  # attribute of a unit's module: runs a function as the unit's forward

NO_GRAPH = (
    "a backward with create_graph=True keeps parameters for a second one, but at stage 3 their "
    "memory is then used for other parameters: shard at stage 2 for second derivatives"
)


class Unit:
    """Module with parameters that are gathered together.

    Args:
        name: Name of the module.
        module: The module.
        flats: Parameters of the module, one flat vector per dtype.
        frees_after_forward: Whether the parameters are freed between forward and backward.

    Attributes:
        name, module, flats, frees_after_forward: Arguments.
        input_dtype: Dtype to which floating inputs of a forward are converted, if any.
        output_dtype: Dtype to which floating outputs are converted, if any.
        num_forwards: Number of running forward passes.
        num_pushed: Number of running forwards with active hooks on saved tensors.
        in_backward: Whether a backward has reached the unit's outputs.
        reached_at: Key of the call that backward reached last: numbers of its forward and call.
        is_complete: Whether the unit gets no further gradients in this backward.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        flats: Sequence[FlatShard],
        *,
        frees_after_forward: bool,
    ) -> None:
        self.name = name
        self.module = module
        self.flats = list(flats)
        self.frees_after_forward = frees_after_forward
        self.input_dtype: torch.dtype | None = None
        self.output_dtype: torch.dtype | None = None
        self.num_forwards = 0
        self.num_pushed = 0
        self.in_backward = False
        self.reached_at = (-1, -1)
        self.is_complete = False

    @property
    def is_whole(self) -> bool:
        """Whether all parameters are gathered."""
        return all(flat.is_whole for flat in self.flats)

    @property
    def is_in_use(self) -> bool:
        """Whether the unit is running a forward."""
        return self.num_forwards > 0

    def __repr__(self) -> str:
        state = "whole" if self.is_whole else "in parts"
        return f"Unit({self.name or 'root'!r}, {len(self.flats)} vectors, {state})"


class Residency:
    """Manager that gathers units' parameters before use, and frees them afterwards.

    Args:
        units: All units; the first one is the root.
        on_backward: Called when a backward reaches the outputs of a unit.
        reset: Called when a forward of the root begins.
        on_complete: Called with a unit that gets no further gradients in this backward.
        keeps_last: Whether a forward's last unit stays gathered until backward.

    Attributes:
        units: Argument.
        order: Units in the order of the last forward of the root.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        on_backward: Callable[[], None],
        reset: Callable[[], None],
        on_complete: Callable[[Unit], None],
        *,
        keeps_last: bool = False,
    ) -> None:
        self._keeps_last = keeps_last
        self.units = list(units)
        self.order: list[Unit] = []
        self._earlier_order: list[Unit] = []
        self._reset = reset
        self._on_backward = on_backward
        self._on_complete = on_complete
        self._unit_of = {id(flat): unit for unit in units for flat in unit.flats}
        self._slots = list({id(f.slot): f.slot for u in units for f in u.flats if f.slot}.values())
        self._ranges = [
            (x.data_ptr(), x.data_ptr() + x.numel() * x.element_size(), slot)
            for slot in self._slots
            for x in [slot.tensor]
        ]
        self._calls: ForwardCalls[Unit] = ForwardCalls()
        self._reached: list[ForwardCalls[Unit]] = []  # forwards reached by this backward
        self._num_forwards = 0  # since the last backward
        self._saved = SavedParams(self._find, self._restore)
        self._aside: dict[int, torch.Tensor] = {}
        self._handles: list[RemovableHandle] = []
        self._num_pinned = 0
        self._is_by_parts = False  # an engine begins steps and runs units without the root
        for unit in self.units if self._slots else self.units[:1]:
            self._add_hooks(unit)

    def close(self) -> None:
        """Remove the hooks; parameters are not changed."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for unit in self.units:
            vars(unit.module).pop(CALL, None)

    def gather_all(self) -> None:
        """Gather all units until `free_all`; new memory replaces temporary memory (slots)."""
        for flat in (flat for unit in self.units for flat in unit.flats):
            flat.refresh()
        self._num_pinned += 1
        for unit in self.units:
            for flat in unit.flats:
                if flat.slot is not None and not flat.is_whole:
                    flat.release()
                    flat.use_aside()
                flat.enter()

    def free_all(self) -> None:
        """Free all units, also after an exception in a forward or backward."""
        self._num_pinned = 0
        for unit in self.units:
            unit.num_forwards = 0
            unit.in_backward = unit.is_complete = False
            unit.reached_at = (-1, -1)
            self.free(unit)
        self._aside.clear()
        for forward in self._reached if not self._is_by_parts else ():
            forward.reset()  # a retained graph may have another backward
        self._reached.clear()

    def free(self, unit: Unit) -> None:
        """Free the parameters of a unit."""
        if self._num_pinned:
            return
        for flat in unit.flats:
            flat.release()
            flat.leave()

    # Forward

    def _add_hooks(self, unit: Unit) -> None:
        module = unit.module
        before, after = partial(self._before_forward, unit), partial(self._after_forward, unit)
        self._handles += [
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            module.register_forward_hook(after, always_call=True),
        ]
        vars(module)[CALL] = partial(self._call, unit)
        for flat in unit.flats if self._slots else ():
            names = {module: r.name for r, sites in flat.named_sites() for module, _ in sites}
            for holder, name in names.items():  # after the hook above, if on this module
                refuse = partial(_refuse_pieces, flat, name)
                self._handles.append(holder.register_forward_pre_hook(refuse))

    def _call(
        self, unit: Unit, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a function as the forward of a unit."""
        output = None
        try:
            args, kwargs = self._before_forward(unit, unit.module, args, kwargs)
            output = function(*args, **kwargs)
        finally:
            output = self._after_forward(unit, unit.module, args, output)
        return output

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise, since a module with these hooks cannot be copied or pickled.

        Raises:
            ConfigError: Always.
        """
        refuse_copy("sharded model")

    def _before_forward(self, unit: Unit, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        again = is_in_backward()  # a checkpoint recomputes a forward
        is_root = unit is self.units[0]
        is_outside = not self._is_by_parts and not any(u.num_forwards for u in self.units)
        if not again and (not unit.num_forwards if is_root else is_outside):
            self._begin()
        unit.num_forwards += 1
        self._make_whole(unit)
        if not again:
            if not is_root:
                if self._is_by_parts and self._calls.of(unit):  # in the next micro-batch
                    self._calls = ForwardCalls(self._calls.number + 1)
                self._calls.begin(unit)
                self.order.append(unit)
            self._prefetch(self._next_in_forward(unit))
        if self._slots:
            self._saved.push()
            unit.num_pushed += 1
        return _in_dtype(args, unit.input_dtype), _in_dtype(kwargs, unit.input_dtype)

    def begin(self) -> None:
        """Begin a step for an engine that calls units without the root (such as a pipeline)."""
        self._is_by_parts = True
        self._begin()

    def _begin(self) -> None:
        self._reset()
        if not self._num_pinned:
            self.free_all()
        for unit in self.units if self._slots else ():
            for flat in unit.flats:
                flat.refresh()
        self._earlier_order, self.order = self.order, []
        self._calls = ForwardCalls(self._calls.number + 1)
        self._num_forwards += torch.is_grad_enabled()

    def _after_forward(self, unit: Unit, _module: nn.Module, _args: Any, output: Any) -> Any:
        if unit.num_pushed:
            unit.num_pushed -= 1
            self._saved.pop()
        self._free_after_forward(unit, output)
        return _in_dtype(output, unit.output_dtype)

    def _free_after_forward(self, unit: Unit, output: Any) -> None:
        if not unit.num_forwards:  # an exception was raised before the forward began
            return
        unit.num_forwards -= 1
        forward = self._calls
        call = None if is_in_backward() else forward.finish(unit)
        if unit.num_forwards or unit.in_backward:
            return
        outputs = [x for x in tensors_in(output) if x.requires_grad and not x.is_leaf]
        for x in outputs if torch.is_grad_enabled() else ():
            x.register_hook(lambda _grad: self._before_backward(unit, forward, call))  # type: ignore[no-untyped-call]
        has_graph = bool(outputs)
        if call is not None and torch.is_grad_enabled():
            # a rank may return its inputs, without a graph, while others compute
            has_graph = call.has_graph = has_graph or any(f.requires_grad for f in unit.flats)
        if not has_graph or (unit.frees_after_forward and not self._comes_last(unit)):
            self.free(unit)
        elif not self._num_pinned:
            for flat in unit.flats:
                flat.leave()
        if unit is self.units[0]:
            for other in self.units[1:]:  # prefetched but not used
                is_ahead = other.frees_after_forward and not self._comes_last(other)
                if not other.is_in_use and (is_ahead or not outputs):
                    self.free(other)

    def _comes_last(self, unit: Unit) -> bool:
        """Return whether backward begins with this unit, so that it stays gathered."""
        earlier = self._earlier_order
        is_last = len(self.order) == len(earlier) and earlier[-1:] == [unit]
        return self._keeps_last and is_last

    def _next_in_forward(self, unit: Unit) -> Unit | None:
        """Return the next unit by the order of the last forward, or at first of the list."""
        earlier = self._earlier_order or self.units[1:]
        index = len(self.order)
        return earlier[index] if index < len(earlier) and earlier[index] is not unit else None

    # Backward

    def _before_backward(
        self, unit: Unit, forward: ForwardCalls[Unit], call: UnitCall[Unit] | None
    ) -> None:
        """Gather a unit when backward reaches its outputs, after all units before it in backward.

        Args:
            unit: The unit.
            forward: Forward of the outputs.
            call: Call of the outputs; None for the root, or during recomputation.
        """
        self._on_backward()
        if (unit.in_backward and unit.is_whole) if call is None else call.is_reached:
            return
        if self._slots and torch.is_grad_enabled():
            raise ConfigError(NO_GRAPH)
        if call is None and (calls := forward.of(unit)):
            call = calls[-1]
        if forward not in self._reached:
            self._reached.append(forward)
        self._reach_all([later for later in self._reached if later.number > forward.number])
        if call is None:
            unit.in_backward = True
            self._make_whole(unit)
            self._prefetch(forward.calls[-1].unit if forward.calls else None)
            return
        for missing in forward.unreached(call):
            self._reach(forward, missing)
        self._reach(forward, call)

    def _reach_all(self, forwards: Sequence[ForwardCalls[Unit]]) -> None:
        """Gather the unreached units of forwards, the last forward first."""
        for forward in sorted(forwards, key=lambda forward: -forward.number):
            for missing in forward.unreached():
                self._reach(forward, missing)

    def _reach(self, forward: ForwardCalls[Unit], call: UnitCall[Unit]) -> None:
        """Gather a unit for backward, prefetch the next, and free the units before it."""
        unit = call.unit
        call.is_reached = unit.in_backward = True
        unit.reached_at = forward.number, call.begin
        self._free_passed((forward.number, call.end))
        self._make_whole(unit)
        before = forward.before(call)
        self._prefetch(None if before is None else before.unit)

    def _free_passed(self, place: tuple[int, int]) -> None:
        """Free the units that backward had passed before it reached a call.

        Autograd runs the nodes of later forwards first, so these units are finished.
        """
        for unit in self.units[1:]:
            if unit.in_backward and unit.reached_at >= place and not unit.is_in_use:
                self.free(unit)
                if not unit.is_complete and self._is_certain(unit):
                    unit.is_complete = True
                    self._on_complete(unit)

    def _is_certain(self, unit: Unit) -> bool:
        """Return whether backward is known to have passed all calls of a unit."""
        is_only = self._num_forwards == 1 and not self._is_by_parts
        return is_only and all(c.has_graph and c.is_reached for c in self._calls.of(unit))

    def reach_rest(self) -> None:
        """Take part in gathers for other ranks' backwards, after this rank's has ended early.

        No-op if an engine runs the forward in parts, since each part has a separate backward.
        """
        if self._is_by_parts:
            return
        is_only = self._num_forwards == 1
        forwards = self._reached or ([self._calls] if is_only else [])
        with torch.no_grad():
            self._reach_all(forwards)

    def end_backward(self) -> None:
        """Free all units after a backward."""
        self.free_all()
        self._num_forwards = 0

    def shadow_backward(self) -> Iterator[Unit]:
        """Take part in gathers for other ranks' backwards, after backward raised on this rank.

        Yields:
            Units in the order of backward, each while it is gathered.
        """
        forward, root = self._calls, self.units[0]
        with torch.no_grad():
            self._before_backward(root, forward, None)
        yield root
        for unit in dict.fromkeys(reversed(self.order)):
            if unit.in_backward:
                yield unit
        for call in forward.unreached():
            with torch.no_grad():
                self._reach(forward, call)
            yield call.unit
        self._num_forwards = 0

    def _find(self, address: int) -> FlatShard | None:
        """Return the flat vector at an address, if it is temporary memory."""
        for begin, end, slot in self._ranges:
            if begin <= address < end:
                holder = slot.holder
                return holder if holder is not None and holder.offset_of(address) >= 0 else None
        return None

    def _restore(self, flat: FlatShard) -> torch.Tensor:
        if not flat.is_whole:
            slot = flat.slot
            unit = self._unit_of[id(flat)]
            if slot is None or slot.holder in {None, flat}:
                flat.start_gather()
                flat.finish_gather()
                unit.in_backward = True
            else:
                if id(flat) not in self._aside:
                    self._aside[id(flat)] = flat.gather_aside()
                return self._aside[id(flat)]
        assert flat.full is not None
        return flat.full

    # Slots

    def _make_whole(self, unit: Unit) -> None:
        for flat in unit.flats:
            if not flat.is_whole:
                self._make_room(flat)
                if flat.full is None and flat.slot is not None and flat.slot.holder is not None:
                    flat.use_aside()
                    continue
                flat.start_gather()
        for flat in unit.flats:
            flat.finish_gather()
            flat.enter()

    def _make_room(self, flat: FlatShard) -> None:
        """Free the slot of a vector, unless its holder is running a forward."""
        holder = None if flat.slot is None else flat.slot.holder
        if holder is None or holder is flat:
            return
        unit = self._unit_of[id(holder)]
        if not unit.is_in_use:
            holder.release()
            holder.leave()

    def _prefetch(self, unit: Unit | None) -> None:
        for flat in () if unit is None else unit.flats:
            if flat.slot is not None and flat.slot.holder is None and flat.full is None:
                flat.start_gather()


def _in_dtype(value: Any, dtype: torch.dtype | None) -> Any:
    """Return a value with floating tensors converted to a dtype, if it is not None."""
    if dtype is None:
        return value
    return map_tensors(value, lambda x: x.to(dtype) if x.is_floating_point() else x)


def _refuse_pieces(flat: FlatShard, name: str, module: nn.Module, _args: Any) -> None:
    """Raise if a module's forward would use pieces of its parameters.

    Raises:
        ConfigError: The unit of the module's parameters is not in use.
    """
    if not flat.is_entered:
        msg = (
            f"{type(module).__name__} uses {name!r} outside of the forward of the sharded model, "
            "where this rank has only a shard of it. Register the method with "
            "register_fsdp_forward_method(model, name), or compute inside `with "
            "model.gathered():` without gradients"
        )
        raise ConfigError(msg)
