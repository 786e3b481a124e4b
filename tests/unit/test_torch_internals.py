"""Private names of torch stand in one module, and this torch has them all."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import braid
from braid.errors import InternalError
from braid.runtime import torch_internals

SOURCE = Path(braid.__file__).parent
# private names of the standard library and of namedtuples, and of braid in a file that cannot import it
OTHERS = {
    *("_asdict", "_fields", "_make", "_replace"),
    *("_ArgumentGroup", "_current_frames", "_getframe"),
    *("_forkserver", "_forkserver_pid", "_resource_tracker", "_pid"),
    "_private",  # `ray._private`
}
# names of torch that braid's own classes have, too
SHARED = {
    *("_buffers", "_modules", "_parameters", "_non_persistent_buffers_set", "_version"),
    *("_values", "_indices", "_get_backend", "_start_coalescing", "_end_coalescing"),
}


def _names_of_braid(node: ast.AST) -> Iterator[str]:
    """Yield names that a statement gives to something."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr
    elif isinstance(node, ast.AnnAssign | ast.Assign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def _is_own(owner: ast.expr) -> bool:
    """Whether an attribute's owner is an object of braid."""
    while isinstance(owner, ast.Attribute):
        owner = owner.value
    return isinstance(owner, ast.Name) and owner.id in {"self", "cls", "owner"}


def test_no_other_module_uses_a_private_name_of_torch():
    known, found, private = set(OTHERS), [], []
    for path in SOURCE.rglob("*.py"):
        if path.name == "torch_internals.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            known.update(_names_of_braid(node))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                parts = [*(node.module or "").split("."), *(name.name for name in node.names)]
                found += [f"{path}:{node.lineno} {part}" for part in parts if part.startswith("_")]
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                private.append((path, node))
    known.discard("_C")
    for path, node in private:
        is_private = node.attr not in known and not node.attr.startswith("__")
        if is_private or (node.attr in SHARED and not _is_own(node.value)):
            found.append(f"{path}:{node.lineno} {ast.unparse(node)}")
    assert found == []


def test_this_torch_has_all_names():
    assert torch_internals.missing() == []


def test_names_that_torch_lacks_are_named_at_their_first_use():
    value = torch_internals._value("torch._C._gone", ("2.10.0",))
    attribute = torch_internals._attribute("torch.nn.Module._gone", ("2.10.0", "2.13.0"))
    try:
        for use in (value, lambda: value.part, lambda: isinstance(1, value)):
            with pytest.raises(
                InternalError,
                match=r"has no torch\._C\._gone, which braid uses; seen in torch 2\.10\.0",
            ):
                use()
        with pytest.raises(
            InternalError, match=r"torch\.nn\.Module\._gone.* seen in torch 2\.10\.0, 2\.13\.0"
        ):
            attribute(nn.Module())
        assert torch_internals.missing() == ["torch._C._gone", "torch.nn.Module._gone"]
    finally:
        del torch_internals.NAMES["torch._C._gone"], torch_internals.NAMES["torch.nn.Module._gone"]


def test_an_object_that_lacks_an_attribute_itself_keeps_its_own_error():
    with pytest.raises(AttributeError, match="'int' object has no attribute '_buffers'"):
        torch_internals.own_buffers(1)  # type: ignore[arg-type]


def test_writes_to_inference_tensors_are_not_counted():
    with torch.inference_mode():
        x = torch.zeros(2)
        x.add_(1)
    assert torch_internals.version_of(x) == 0
    assert torch_internals.version_of(torch.zeros(2).add_(1)) == 1
