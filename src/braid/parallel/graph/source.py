"""Conversion of a part of a captured model to a readable Python module of straight-line code.

    class Stage1(nn.Module):
        def forward(self, values):
            x5, x17 = values
            x18 = self.model.transformer.h[2](x17, x5)  # modeling_gpt2.py:606
            x19 = x18 * self.model.scale  # modeling_gpt2.py:611
            return x19

It calls the user's own modules and parameters. Values have the numbers of the graph, and inputs of
the model the names of its arguments.

Source: the code generator of D. Narayanan et al., PipeDream, SOSP 2019, which writes new modules.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import nn

from braid.comm.autograd.nested import index_of, parts_of
from braid.errors import ConfigError
from braid.parallel.graph.captured import BatchDevice, CapturedGraph, GraphNode, Modes, Scaled
from braid.parallel.graph.spelling import Spelling, Unspelled, spell_path

__all__ = ["stage_source"]

INDENT = "    "
RESERVED = {
    "self",
    "values",
    "rows",
    "device",
    "torch",
    "nn",
    "functional",
    "checkpoint",
    "part_of",
    "braid",
}


def stage_source(
    model: nn.Module, graph: CapturedGraph, cuts: Sequence[int], index: int, about: str
) -> str:
    """Return a Python module with a class `Stage<index>` that runs the nodes between two cuts.

    Args:
        model: The model that was captured.
        graph: Its graph.
        cuts: Positions of the nodes at which stages begin.
        index: Number of the stage.
        about: Origin of the model, for the docstring.

    Raises:
        ConfigError: A call cannot be written as code; the message shows it with its line.
    """
    named = _input_names(model, graph)
    text, roots = _StageSource(model, graph, cuts, index, named).source(about)
    if roots & set(named.values()):  # an argument would hide a module
        text, _ = _StageSource(model, graph, cuts, index, {}).source(about)
    return text


class _StageSource:
    def __init__(
        self,
        model: nn.Module,
        graph: CapturedGraph,
        cuts: Sequence[int],
        index: int,
        named: Mapping[int, str],
    ) -> None:
        self._model, self._graph, self._cuts, self._index = model, graph, cuts, index
        self._named = named
        self._begin, self._end = [*cuts, len(graph.nodes)][index : index + 2]
        self._nodes = graph.nodes[self._begin : self._end]
        self._is_last = index == len(cuts) - 1
        self._leaves = () if self._is_last else graph.crossing(self._end)
        self._spelling = Spelling()
        self._used = {value for node in self._nodes for value in node.inputs} | {*self._leaves}
        if self._is_last:
            self._used |= set(graph.results)
        self._tensors = {v: self._name_of(v) for v in sorted(self._used & graph.tensors.keys())}

    def source(self, about: str) -> tuple[str, set[str]]:
        """Return the text of the stage's file, and the names of the packages that it imports."""
        body = [*self._enter(), *self._calls(), *self._leave()]
        modules = dict.fromkeys(str(n.target) for n in self._nodes if n.kind == "module")
        argument = self._argument()
        spelled = "\n".join(body)
        uses_torch = {"torch"} if re.search(r"\btorch\.", spelled) else set()
        imports = [f"import {name}" for name in sorted(uses_torch | self._spelling.imports)]
        imports += ["from torch import nn"]
        if re.search(r"\bfunctional\.", spelled):
            imports.append("from torch.nn import functional")
        if "checkpoint(" in spelled:
            imports.append("from torch.utils.checkpoint import checkpoint")
        lines = [
            f'"""Stage {self._index} of {len(self._cuts)} of {about}; `braid convert` wrote it."""',
            "",
            *imports,
            "",
            "from braid.parallel.graph import part_of",
            "",
            f"MODULES = {_tuple(modules)}",
            f"TENSORS = {_tuple(dict.fromkeys(self._tensors.values()))}",
            "",
            "",
            f"class Stage{self._index}(nn.Module):",
            f'{INDENT}"""Calls modules of the model, under their names there."""',
            "",
            f"{INDENT}def __init__(self, model):",
            f"{INDENT * 2}super().__init__()",
            f"{INDENT * 2}self.model = part_of(model, MODULES, TENSORS)",
            f"{INDENT * 2}self.training = model.training",
            "",
            f"{INDENT}def forward(self, {argument}):",
            *(f"{INDENT * 2}{line}" for line in body),
        ]
        roots = {name.split(".")[0] for name in self._spelling.imports}
        return "\n".join(lines) + "\n", roots

    def _name_of(self, value: int) -> str:
        """Return the name of a tensor of the model."""
        if value in self._graph.names:
            return self._graph.names[value]
        tensor = self._graph.tensors[value]
        for path, module in self._model.named_modules():
            for name, attribute in vars(module).items():
                if attribute is tensor:
                    return f"{path}.{name}" if path else name
        node = next(node for node in self._nodes if value in node.inputs)
        msg = (
            f"{node} at {node.where} cannot be written as code: it uses a tensor of shape "
            f"{list(tensor.shape)} that no module owns: register it with register_buffer"
        )
        raise ConfigError(msg)

    def _var(self, value: int) -> str:
        if value in self._tensors:
            return spell_path("self.model", self._tensors[value])
        return self._named.get(value, f"x{value}")

    def _given(self) -> list[str]:
        """Return the names of the stage's inputs."""
        if not self._index:
            return [self._var(value) for value in range(self._graph.num_inputs)]
        rows = ["rows"] if self._needs(Scaled, self._begin) else []
        return [*map(self._var, self._graph.crossing(self._begin)), *rows]

    def _argument(self) -> str:
        names = self._given()
        return names[0] if len(names) == 1 else "values"

    def _enter(self) -> Iterator[str]:
        names = self._given()
        if len(names) > 1:
            yield f"{', '.join(names)} = values"
        if not self._index and self._needs(Scaled, 0):
            yield f"rows = {self._var(self._graph.rows_of)}.shape[0]"
        if self._needs(BatchDevice, self._begin, self._end):
            yield f"device = {self._var(self._on_device())}.device"

    def _needs(self, kind: type, begin: int, end: int | None = None) -> bool:
        """Return whether calls between two positions depend on the rows or the device."""
        trees = [node.tree for node in self._graph.nodes[begin:end]]
        if end is None or self._is_last:
            trees.append(self._graph.result_tree)
        return any(_has(tree, kind) for tree in trees)

    def _on_device(self) -> int:
        """Return an input of the stage that is on the device of the batch."""
        if not self._index:
            return self._graph.rows_of
        crossing = self._graph.crossing(self._begin)
        modules = [node for node in self._graph.nodes[: self._begin] if node.kind == "module"]
        made = [value for node in modules for value in node.outputs if value in crossing]
        return made[-1] if made else crossing[0]

    def _leave(self) -> Iterator[str]:
        if self._is_last:
            results = [self._var(value) for value in self._graph.results]
            try:
                yield f"return {self._spelling.value(self._graph.result_tree, results)}"
            except Unspelled as exc:
                msg = f"the result of the model cannot be written as code: {exc}"
                raise ConfigError(msg) from None
            return
        rows = ["rows"] if self._needs(Scaled, self._end) else []
        yield f"return {', '.join([*map(self._var, self._leaves), *rows]) or '()'}"

    def _calls(self) -> Iterator[str]:
        for modes, nodes in groupby(self._nodes, lambda node: node.modes):
            around = _contexts(modes)
            if around:
                yield f"with {', '.join(around)}:"
            for node in nodes:
                for line in "\n".join(self._lines(node)).splitlines():
                    yield f"{INDENT if around else ''}{line}"

    def _lines(self, node: GraphNode) -> Iterator[str]:
        """Yield the lines of a call."""
        callee = spell_path("self.model", node.target) if isinstance(node.target, str) else ""
        try:
            call = self._spelling.call(node, [self._var(v) for v in node.inputs], callee)
        except Unspelled as exc:
            msg = f"{node} at {node.where} cannot be written as code: {exc}"
            raise ConfigError(msg) from None
        if node.is_checkpointed and callee:
            inside = call[len(callee) + 1 : -1].rstrip("\n,")
            call = f"checkpoint({callee}, {inside.lstrip()}, use_reentrant=False)"
        file, _, line = node.where.rpartition(":")
        comment = f"  # {Path(file).name}:{line}"
        targets = {v: self._var(v) for v in node.outputs if v in self._used}
        pattern = _pattern(node.result_tree, node.outputs, dict(targets))
        if not targets:
            yield f"{call}{comment}"
        elif pattern is not None:
            yield f"{pattern} = {call}{comment}"
        else:
            whole = f"result{min(targets)}"
            yield f"{whole} = {call}{comment}"
            for value, path in _paths(node.result_tree, node.outputs):
                if value in targets:
                    yield f"{targets.pop(value)} = {whole}{path}"
        for old, new in node.writes:
            if new in self._used and new not in node.outputs:
                yield f"{self._var(new)} = {self._var(old)}"


def _input_names(model: nn.Module, graph: CapturedGraph) -> dict[int, str]:
    """Return the names of the arguments that are inputs, by value."""
    args, kwargs = graph.batch_tree
    try:
        arguments = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        arguments = kwargs
    names = {index_of(tree): name for name, tree in arguments.items() if index_of(tree) is not None}
    return {
        value: name
        for value, name in names.items()
        if value is not None and name not in RESERVED and not re.fullmatch(r"(x|result)\d+", name)
    }


def _has(tree: Any, kind: type) -> bool:
    if isinstance(tree, kind):
        return True
    if isinstance(tree, slice):
        return any(_has(x, kind) for x in (tree.start, tree.stop, tree.step))
    return any(_has(part, kind) for part in (parts_of(tree) or {}).values())


def _contexts(modes: Modes) -> list[str]:
    grad = {None: [], True: ["torch.enable_grad()"], False: ["torch.no_grad()"]}[modes.grad]
    return grad + [
        f"torch.autocast({kind!r}, {f'dtype={dtype}' if enabled else 'enabled=False'})"
        for kind, enabled, dtype in modes.autocast
    ]


def _pattern(tree: Any, outputs: Sequence[int], targets: dict[int, str]) -> str | None:
    """Return the left side of an assignment; None if the result has parts with names."""
    place = index_of(tree)
    if place is not None:
        return targets.pop(outputs[place], "_")
    parts = parts_of(tree)
    if parts is None:
        return "_"
    if not isinstance(tree, tuple | list):
        return None
    inside = [_pattern(part, outputs, targets) for part in parts.values()]
    if None in inside:
        return None
    text = ", ".join(f"({x})" if x and "," in x else str(x) for x in inside)
    return f"{text}," if len(inside) == 1 else text


def _paths(tree: Any, outputs: Sequence[int], path: str = "") -> Iterator[tuple[int, str]]:
    """Yield the values of a result with the expressions that select them."""
    place = index_of(tree)
    if place is not None:
        yield outputs[place], path
    for key, part in (parts_of(tree) or {}).items():
        is_field = not isinstance(tree, Mapping | list | tuple)
        yield from _paths(part, outputs, f"{path}.{key}" if is_field else f"{path}[{key!r}]")


def _tuple(names: Mapping[str, Any]) -> str:
    if not names:
        return "()"
    return "\n".join(["(", *(f"{INDENT}{name!r}," for name in names), ")"])
