"""Keeps the compiler of torch out of the methods of a process group.

Problem: torch's DistributedDataParallel calls the group from C++ in the middle of a compiled
forward. Dynamo then takes each method for the program's code and begins to trace it, and fails on
the group itself, which torch 2.13 regards as opaque.

Idea: mark their code, as `torch._dynamo.disable` does, but without importing the compiler, which
takes a second, and without a wrapper around each call. What they call is skipped, too.
"""

from __future__ import annotations

from types import FunctionType

from braid.torch_internals import compile_nothing

__all__ = ["skip_in_dynamo"]


def skip_in_dynamo(*classes: type) -> None:
    """Mark the functions of these classes, and what they call, as nothing to compile."""
    for own in classes:
        for member in vars(own).values():
            function = member.fget if isinstance(member, property) else member
            if isinstance(function, FunctionType):
                compile_nothing(function.__code__)
