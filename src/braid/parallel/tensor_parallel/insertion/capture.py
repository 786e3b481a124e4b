"""Capture of the graph of a model's forward, with unsharded parameters.

torch.export returns a graph of torch's operations that is bitwise equal to the model. Lengths of
inputs stay variable if the model allows it. A sharded model is captured with its whole sizes: its
parameters are temporarily replaced by ones without memory.

Source: torch.export's documentation, "training IR".
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from braid.errors import ConfigError
from braid.parallel.graph.autograd_functions import FunctionMode, functions_seen
from braid.parallel.tensor_parallel.insertion.calls import OperatorCall, shape_of, tensor_of
from braid.parallel.tensor_parallel.insertion.labels import equal
from braid.runtime.torch_internals import own_buffers, own_parameters, pytree

__all__ = ["ONE_AT_A_TIME", "Captured", "capture", "flat_inputs"]

ONE_AT_A_TIME = threading.RLock()  # torch.export has global state, and ranks may be threads


class Captured(NamedTuple):
    """Captured graph of a model.

    Attributes:
        module: Graph with parameters and buffers; it takes and returns flat lists.
        out_spec: Structure of the outputs.
    """

    module: fx.GraphModule
    out_spec: pytree.TreeSpec


def flat_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """Return the inputs as a flat list, and their structure."""
    return pytree.tree_flatten((args, dict(sorted(kwargs.items()))))


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
) -> Captured:
    """Return the graph of a model's forward; the caller must hold the lock `ONE_AT_A_TIME`.

    Args:
        model: Model; its mode, train or eval, is part of the graph.
        args: Inputs by position.
        kwargs: Inputs by name.
        shapes: Whole shapes of sharded parameters, by name.

    Raises:
        ConfigError: torch.export cannot capture the model, for example because it branches on data.
    """
    args, kwargs = pytree.tree_map_only(  # an input that occurs twice becomes two inputs
        torch.Tensor,
        lambda x: x.detach().clone().requires_grad_(x.requires_grad),
        (args, dict(sorted(kwargs.items()))),
    )
    dynamic = pytree.tree_map(
        lambda x: _variable(x) if isinstance(x, torch.Tensor) else None,
        (args, kwargs),
    )
    try:
        # the form of torch.export: by arguments of forward
        named = inspect.signature(model.forward).bind(*dynamic[0], **dynamic[1]).arguments
    except TypeError as exc:
        names = ", ".join(inspect.signature(model.forward).parameters)
        msg = (
            f"the inputs do not match {type(model).__name__}.forward({names}): {exc}; pass a "
            "tensor, a tuple by position, or a mapping by name"
        )
        raise ConfigError(msg) from exc
    named_tensors = {**dict(model.named_buffers(remove_duplicate=False))}
    named_tensors.update(model.named_parameters(remove_duplicate=False))
    own_hooks = torch.autograd.graph.saved_tensors_hooks(_same, _same)  # not a recomputation's
    with _whole(model, shapes), torch.enable_grad(), own_hooks, functions_seen, _NoFunctions():
        try:
            exported = torch.export.export(
                model,
                args,
                kwargs,
                dynamic_shapes=named,
                strict=False,
            )
        except Exception as exc:
            cache = "; pass use_cache=False among the inputs" if "Cache" in str(exc) else ""
            msg = (
                f"torch.export cannot capture {type(model).__name__}: {_first_line(exc)}{cache}; "
                "change the forward, or leave inputs out and pass a plan of its modules"
            )
            raise ConfigError(msg) from exc
        module = exported.module()
        assert isinstance(module, fx.GraphModule), "an exported program is a graph"
        _set_values(module, named_tensors)
    module.graph.set_codegen(fx.graph.CodeGen())
    module = fx.GraphModule(module, module.graph)  # without the exported one's checks of inputs
    for node in module.graph.nodes:
        if node.op == "get_attr" and str(node.target) in named_tensors:
            _set_attribute(module, str(node.target), named_tensors[str(node.target)])
        if node.target is torch.ops.aten.view.default:  # parts may be laid out differently
            node.target = torch.ops.aten.reshape.default
    _name_dtypes(module.graph)
    _fold_linear(module.graph)
    return Captured(module, exported.call_spec.out_spec)


class _NoFunctions(FunctionMode):
    """Mode that raises for autograd.Functions, as torch.export would lose their backward."""

    def call_function(self, kind: type[torch.autograd.Function], args: Any, kwargs: Any) -> Any:  # noqa: ARG002 - refused
        caller = sys._getframe(2)  # noqa: SLF001 - caller of the replaced `apply`
        place = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        msg = (
            f"the backward of the autograd.Function {kind.__name__}, called at {place}, would be "
            "lost: use torch's own operations there"
        )
        raise ConfigError(msg)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _variable(x: torch.Tensor) -> dict[int, Any]:
    """Return the dims with variable lengths; torch.export fixes lengths of 0 and 1."""
    from torch.export import Dim  # noqa: PLC0415 - slow

    return {dim: Dim.AUTO for dim, size in enumerate(x.shape) if size > 1}


@contextmanager
def _whole(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[None]:
    """Return a context in which sharded parameters have whole shapes, without memory."""
    params = dict(model.named_parameters(remove_duplicate=False))
    saved = {name: (params[name].data, params[name].grad) for name in shapes}
    try:
        for name, shape in shapes.items():
            params[name].grad = None
            params[name].data = saved[name][0].new_zeros(()).expand(shape)
        yield
    finally:
        for name, (part, _) in saved.items():
            params[name].data = part
        for name, (_, grad) in saved.items():
            params[name].grad = grad


def _set_values(module: fx.GraphModule, values: Mapping[str, torch.Tensor]) -> None:
    """Record the whole value of each parameter and buffer, without data."""
    for node in module.graph.nodes:
        if node.op == "get_attr" and tensor_of(node) is None:
            tensor = values.get(str(node.target))
            if tensor is None:
                path, _, attribute = str(node.target).rpartition(".")
                tensor = getattr(module.get_submodule(path), attribute, None)
            if isinstance(tensor, torch.Tensor):
                node.meta["val"] = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
                ).requires_grad_(tensor.requires_grad)


def _set_attribute(module: nn.Module, name: str, value: torch.Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    owner = module.get_submodule(path)
    if attribute in own_parameters(owner) or attribute in own_buffers(owner):
        delattr(owner, attribute)
    if isinstance(value, nn.Parameter):
        owner.register_parameter(attribute, value)
    else:
        owner.register_buffer(attribute, value)


def _name_dtypes(graph: fx.Graph) -> None:
    """Convert to dtypes instead of another value's dtype; that value may be split differently."""
    for node in graph.nodes:
        if node.target in {torch.ops.aten.type_as.default, torch.ops.aten.to.other}:
            dtype = node.meta["val"].dtype
            node.target = torch.ops.aten.to.dtype
            node.args, node.kwargs = (node.args[0], dtype), {}


def _fold_linear(graph: fx.Graph) -> None:
    """Replace `view, addmm, view` by one linear operation, so that rows keep their dims."""
    for node in list(graph.nodes):
        call = OperatorCall(node) if node.op == "call_function" else None
        if call is None or call.name != "aten.addmm" or (call["beta"], call["alpha"]) != (1, 1):
            continue
        bias, x, weight = call["self"], call["mat1"], call["mat2"]
        if len(shape_of(bias)) != 1:
            continue
        before, after = _unfolded(x), _refolded(node)
        outer = after if before is not None and after is not None else node
        rows = before if before is not None and after is not None else x
        with graph.inserting_before(outer):
            transposed = graph.call_function(torch.ops.aten.t.default, (weight,))
            linear = graph.call_function(torch.ops.aten.linear.default, (rows, transposed, bias))
        transposed.meta = {**weight.meta, "val": weight.meta["val"].t()}
        linear.meta = {**node.meta, "val": outer.meta["val"]}
        outer.replace_all_uses_with(linear)
        for old in (outer, node, x):
            if not old.users and old.op == "call_function":
                graph.erase_node(old)


def _unfolded(x: fx.Node) -> fx.Node | None:
    """Return the tensor of which a matrix is a view with merged rows; None if it is not."""
    if x.op != "call_function" or OperatorCall(x).name not in {"aten.view", "aten.reshape"}:
        return None
    source = x.all_input_nodes[0]
    shape = shape_of(source)
    return source if len(shape) > 2 and equal(shape[-1], shape_of(x)[-1]) else None


def _refolded(node: fx.Node) -> fx.Node | None:
    """Return the only use of a matrix, if it splits the rows into dims again; else None."""
    (user, *others) = node.users or (None,)
    if user is None or others or user.op != "call_function":
        return None
    if OperatorCall(user).name not in {"aten.view", "aten.reshape"}:
        return None
    return user if equal(shape_of(user)[-1], shape_of(node)[-1]) else None


def _first_line(exc: Exception) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return f"{type(exc).__name__}: {lines[0] if lines else 'no message'}"
