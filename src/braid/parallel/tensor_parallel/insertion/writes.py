"""Operations that change values in place, such as `relu_`, or `copy_` into a slice.

What is changed stays where it is, and the other inputs are moved to it: a change of a copy that a
move has made would not be seen by others that use the value. Where that is not possible, the
operation is refused.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from torch import fx

from braid.parallel.tensor_parallel.insertion.calls import OperatorCall, module_of, source_of
from braid.parallel.tensor_parallel.insertion.records import Conflict

if TYPE_CHECKING:
    from braid.parallel.tensor_parallel.insertion.insert import Insertion

__all__ = ["aliases_of", "note_write", "written_by"]


def written_by(call: OperatorCall) -> fx.Node | None:
    """Return the tensor that an operation changes in place, if there is one."""
    schema = getattr(call.node.target, "_schema", None)
    for argument in schema.arguments if schema is not None else ():
        value = call.arguments[argument.name]
        if argument.alias_info is not None and argument.alias_info.is_write:
            return value if isinstance(value, fx.Node) else None
    return None


def aliases_of(node: fx.Node) -> list[fx.Node]:
    """Return a value and those that it is a view of, down to the one that has the memory."""
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
    """Let all values in the memory that an operation has changed be those of afterwards."""
    written = written_by(call)
    assert written is not None, "the operation writes"
    aliases = aliases_of(written)
    if copy := next((x for x in aliases if x in insertion.copies), None):
        reason = (
            f"{module_of(call.node) or 'the model'} changes a value in place by {call.name} "
            f"({source_of(call.node)}), which has to be gathered or divided in front of it, so "
            "that the change would be lost: compute a new value, or leave the layers in front whole"
        )
        origins = insertion.origins.get(copy, frozenset())
        insertion.conflicts.append(Conflict(call.node, origins, reason, refused=True))
    memory = aliases[-1]
    insertion.change({x for x in insertion.layouts if aliases_of(x)[-1] is memory}, call.node)
