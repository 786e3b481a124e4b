"""Operations that change values in place, such as `relu_`, or `copy_` into a slice.

The changed value is not moved; the other inputs are moved to its layout. Other users of the value
would not see a change of a moved copy. If a move of the changed value is needed, the operation
raises an error.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from torch import fx

from braid.parallel.tensor_parallel.insertion.calls import OperatorCall, module_of, source_of
from braid.parallel.tensor_parallel.insertion.records import Conflict

if TYPE_CHECKING:
    from braid.parallel.tensor_parallel.insertion.insert import Insertion

__all__ = ["note_write", "written_by"]


def written_by(call: OperatorCall) -> fx.Node | None:
    """Return the tensor that an operation changes in place, if any."""
    schema = getattr(call.node.target, "_schema", None)
    for argument in schema.arguments if schema is not None else ():
        value = call.arguments[argument.name]
        if argument.alias_info is not None and argument.alias_info.is_write:
            return value if isinstance(value, fx.Node) else None
    return None


def aliases_of(node: fx.Node) -> list[fx.Node]:
    """Return a value, then the values of which it is a view; the owner of the memory comes last."""
    aliases = [node]
    while (source := _viewed(aliases[-1])) is not None:
        aliases.append(source)
    return aliases


def _viewed(node: fx.Node) -> fx.Node | None:
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        return node.all_input_nodes[0]
    call = OperatorCall(node)
    schema = getattr(node.target, "_schema", None)
    if schema is None or all(result.alias_info is None for result in schema.returns):
        return None
    shared = (call[a.name] for a in schema.arguments if a.alias_info is not None)
    return next((value for value in shared if isinstance(value, fx.Node)), None)


def note_write(insertion: Insertion, call: OperatorCall) -> None:
    """Record in `insertion` that an operation has changed memory, for all values in this memory."""
    written = written_by(call)
    assert written is not None, "the operation writes"
    aliases = aliases_of(written)
    if copy := next((x for x in aliases if x in insertion.copies), None):
        reason = (
            f"{module_of(call.node) or 'the model'} changes a value in place by {call.name} "
            f"({source_of(call.node)}), which would be lost, because the value is gathered or "
            "split before: compute a new value, or do not shard the layers before it"
        )
        origins = insertion.origins.get(copy, frozenset())
        insertion.conflicts.append(Conflict(call.node, origins, reason, refused=True))
    memory = aliases[-1]
    insertion.change({x for x in insertion.layouts if aliases_of(x)[-1] is memory}, call.node)
