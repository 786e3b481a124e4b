"""Private names of torch that braid uses, with the versions of torch that were seen to have them.

Problem: braid records, replays, divides and replaces operations of autograd, modules and process
groups. torch exposes a part of this only under names that begin with `_`, which any release may
change.

Idea: other modules import these names from here; a test finds private names elsewhere. Attributes
of objects become functions of the object. If a newer torch lacks a name, its first use raises an
error with the name, the version of torch, and the versions that have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from importlib import import_module
from operator import attrgetter, methodcaller
from types import CodeType, GeneratorType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import Node

from braid._version import TORCH_VERSIONS
from braid.errors import InternalError

try:
    from torch._compile import _disable_dynamo as disable_dynamo
    from torch._ops import OpOverload, OpOverloadPacket
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
    from torch.nn.modules.batchnorm import _LazyNormBase as LazyNorm
    from torch.nn.modules.batchnorm import _NormBase as NormBase
    from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as without_modes
except ImportError as exc:
    _text = f"torch {torch.__version__} lacks a private name that braid uses: {exc}"
    raise InternalError(f"{_text}. Install torch {TORCH_VERSIONS[-1]}, or a newer braid") from exc

__all__ = [  # beside the names that are defined below
    "BatchNorm",
    "InstanceNorm",
    "LazyNorm",
    "NormBase",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "disable_dynamo",
    "pytree",
    "without_modes",
]

# name -> versions of torch that were seen to have it; names that are imported above come first
NAMES: dict[str, tuple[str, ...]] = dict.fromkeys(
    (
        "torch._compile._disable_dynamo",
        "torch._ops.OpOverload",
        "torch._ops.OpOverloadPacket",
        "torch.nn.modules.batchnorm._BatchNorm",
        "torch.nn.modules.batchnorm._LazyNormBase",
        "torch.nn.modules.batchnorm._NormBase",
        "torch.nn.modules.instancenorm._InstanceNorm",
        "torch.utils._pytree",
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch.utils._python_dispatch._disable_current_modes",
    ),
    TORCH_VERSIONS,
)
_SAMPLES: Mapping[str, Callable[[], Any]] = {"torch.nn.Module": nn.Module}  # set in __init__


def missing() -> list[str]:
    """Return the private names of torch that braid uses and that the installed torch lacks."""
    return [name for name in NAMES if not _has(name)]


def _look_up(name: str) -> Any:
    """Return the object with a dotted name."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            owner: Any = import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for place, part in enumerate(parts[count:], count):
            sample = _SAMPLES.get(".".join(parts[:place]))
            owner = getattr(owner if sample is None else sample(), part)
        return owner
    raise AttributeError(name)


def _has(name: str) -> bool:
    try:
        _look_up(name)
    except AttributeError:
        return False
    return True


def _refuse(name: str, cause: Exception) -> NoReturn:
    msg = (
        f"torch {torch.__version__} has no {name}, which braid uses; seen in torch "
        f"{', '.join(NAMES[name])}: install one of these, or a newer braid"
    )
    raise InternalError(msg) from cause


class _Missing:
    """Placeholder of a name that torch lacks; every use raises InternalError."""

    def __init__(self, name: str, cause: Exception) -> None:
        self._why = name, cause

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        _refuse(*self._why)

    def __getattr__(self, _name: str) -> NoReturn:
        _refuse(*self._why)

    def __instancecheck__(self, _instance: Any) -> NoReturn:
        _refuse(*self._why)


def _value(name: str, seen: tuple[str, ...] = TORCH_VERSIONS) -> Any:
    """Return a function or class of torch."""
    NAMES[name] = seen
    try:
        return _look_up(name)
    except AttributeError as cause:
        return _Missing(name, cause)


def _of_object(name: str, get: Callable[[Any], Any], seen: tuple[str, ...]) -> Callable[..., Any]:
    NAMES[name] = seen

    def checked(owner: Any) -> Any:
        try:
            return get(owner)
        except AttributeError as cause:
            if _has(name):  # the object lacks it, not torch
                raise
            _refuse(name, cause)

    return checked


def _attribute(name: str, seen: tuple[str, ...] = TORCH_VERSIONS) -> Callable[..., Any]:
    """Return a function that returns an attribute of its argument."""
    return _of_object(name, attrgetter(name.rpartition(".")[2]), seen)


def _method(name: str, seen: tuple[str, ...] = TORCH_VERSIONS) -> Callable[..., Any]:
    """Return a function that calls a method of its argument without arguments."""
    return _of_object(name, methodcaller(name.rpartition(".")[2]), seen)


# Modules. Registering rejects names that a module already has; named_*() omit repeated objects.

own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]]
own_parameters = _attribute("torch.nn.Module._parameters")
own_buffers: Callable[[nn.Module], dict[str, torch.Tensor | None]]
own_buffers = _attribute("torch.nn.Module._buffers")
own_modules: Callable[[nn.Module], dict[str, nn.Module | None]]
own_modules = _attribute("torch.nn.Module._modules")
transient_buffers: Callable[[nn.Module], set[str]]
transient_buffers = _attribute("torch.nn.Module._non_persistent_buffers_set")
forward_pre_hooks: Callable[[nn.Module], dict[int, Callable[..., Any]]]
forward_pre_hooks = _attribute("torch.nn.Module._forward_pre_hooks")
forward_hooks: Callable[[nn.Module], dict[int, Callable[..., Any]]]
forward_hooks = _attribute("torch.nn.Module._forward_hooks")
reset_flat_weights: Callable[[nn.RNNBase], None]
reset_flat_weights = _method("torch.nn.RNNBase._init_flat_weights")
replica_of: Callable[[nn.Module], nn.Module]
replica_of = _method("torch.nn.Module._replicate_for_data_parallel")
call_with_hooks: Callable[[nn.Module], Callable[..., Any]]
call_with_hooks = _attribute("torch.nn.Module._call_impl")
_backward_hooks = _attribute("torch.nn.Module._backward_hooks")
_backward_pre_hooks = _attribute("torch.nn.Module._backward_pre_hooks")


def backward_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks on the backward of a module."""
    return [*_backward_hooks(module).values(), *_backward_pre_hooks(module).values()]


@contextmanager
def call_replaced(module: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Make calls of `module` run `call` inside the context, even if the module is compiled."""
    attributes = vars(module)  # they take precedence over the method that `__call__` calls
    compiled = attributes.get("_compiled_call_impl")
    attributes |= {"_call_impl": call, "_compiled_call_impl": None}
    try:
        yield
    finally:
        del attributes["_call_impl"], attributes["_compiled_call_impl"]
        if compiled is not None:
            attributes["_compiled_call_impl"] = compiled


# Tensors.

_version = _attribute("torch.Tensor._version")
accumulate_hooks: Callable[[torch.Tensor], dict[int, Callable[[torch.Tensor], None]] | None]
accumulate_hooks = _attribute("torch.Tensor._post_accumulate_grad_hooks")
gradient_hooks: Callable[[torch.Tensor], dict[int, Callable[[torch.Tensor], Any]] | None]
gradient_hooks = _attribute("torch.Tensor._backward_hooks")


def share_gradient_hooks(param: torch.Tensor, leaf: torch.Tensor) -> None:
    """Make `leaf` call the gradient hooks of `param`, also those that are registered later."""
    hooks = gradient_hooks(param)
    if gradient_hooks(leaf) is not hooks:
        leaf._backward_hooks = hooks  # noqa: SLF001


# of sparse tensors, without coalescing them
sparse_values: Callable[[torch.Tensor], torch.Tensor] = _method("torch.Tensor._values")
sparse_indices: Callable[[torch.Tensor], torch.Tensor] = _method("torch.Tensor._indices")
storage_id: Callable[[torch.UntypedStorage], int] = _attribute("torch.UntypedStorage._cdata")
share_descriptor: Callable[[torch.UntypedStorage], tuple[int, int]]
share_descriptor = _method("torch.UntypedStorage._share_fd_cpu_")
shared_storage: Callable[[int, int], torch.UntypedStorage]  # (descriptor, bytes); a duplicate
shared_storage = _value("torch.UntypedStorage._new_shared_fd_cpu")
is_in_bad_fork: Callable[[], bool]  # whether a parent of this process has used CUDA
is_in_bad_fork = _value("torch.cuda._is_in_bad_fork")
foreach_copy_: Callable[[Any, Any], None] = _value("torch._foreach_copy_")
has_internal_overlap: Callable[[torch.Tensor], int] = _value("torch._debug_has_internal_overlap")


def version_of(x: torch.Tensor) -> int:
    """Return the number of writes to a tensor; torch does not count writes to inference tensors."""
    return 0 if x.is_inference() else int(_version(x))


# Autograd.

_MEAN, _SUM = 1, 2  # reductions of losses

current_graph_task: Callable[[], int] = _value("torch._C._current_graph_task_id")  # -1 outside
current_node: Callable[[], Node | None] = _value("torch._C._current_autograd_node")
can_set_data: Callable[[torch.Tensor, torch.Tensor], bool]
can_set_data = _value("torch._has_compatible_shallow_copy_type")
tracing_context: Callable[[], object] = _value("torch._guards.TracingContext.try_get")
is_profiling: Callable[[], bool] = _value("torch._C._autograd._profiler_enabled")
end_with_future: Callable[[Any, Any], object]
end_with_future = _value("torch.autograd.profiler.record_function._call_end_callbacks_on_future")
will_execute: Callable[[Node], bool] = _value("torch._C._will_engine_execute_node")
backward_class: Callable[[Any], Any] = _attribute("torch.autograd.Function._backward_cls")
_input_metadata = _attribute("torch._C._FunctionBase._input_metadata")
_engine = _value("torch.autograd.Variable._execution_engine")
push_saved_tensors_hooks = _value("torch._C._autograd._push_saved_tensors_default_hooks")
pop_saved_tensors_hooks = _value("torch._C._autograd._pop_saved_tensors_default_hooks")
saved_tensors_hooks = _value("torch._C._autograd._top_saved_tensors_default_hooks")
function_modes: Callable[[], list[Any]]
function_modes = _value("torch.overrides._get_current_function_mode_stack")


def queue_callback(call: Callable[[], object]) -> None:
    """Call `call` when the backward that runs in this thread has ended."""
    _engine.queue_callback(call)


def num_results(node: Node) -> int:
    """Return the number of values that a node's operation returned."""
    return len(_input_metadata(node))


def is_sum(loss: torch.Tensor) -> bool:
    """Return whether one of torch's losses was reduced by a sum, as far as its node shows it."""
    return getattr(loss.grad_fn, "_saved_reduction", None) == _SUM


def num_terms(loss: torch.Tensor) -> float | None:
    """Return the sum of the weights of a cross entropy's targets; None if its node has no mean."""
    total = getattr(loss.grad_fn, "_saved_total_weight", None)
    is_mean = getattr(loss.grad_fn, "_saved_reduction", None) == _MEAN
    return float(total) if is_mean and total is not None else None


active_ddp: Callable[[], nn.parallel.DistributedDataParallel | None]  # during its forward
active_ddp = _value("torch.nn.parallel.DistributedDataParallel._get_active_ddp_module")


# Gradients.


def before_clipping(check: Callable[[Sequence[torch.Tensor], Any], None]) -> None:
    """Call `check` before torch clips gradients or computes their norm, from now on.

    The functions are changed inside, since programs may have imported them before.

    Args:
        check: Gets the parameters, and the function's name: clip_grad_norm_ or clip_grad_value_;
            or gradients and get_total_norm.
    """
    for name in ("clip_grad_norm_", "clip_grad_value_", "get_total_norm"):
        decorated: Any = getattr(nn.utils, name)
        clip = getattr(decorated, "__wrapped__", decorated)
        checked = _checked_clip(name, clip, check)
        cells = [cell for cell in decorated.__closure__ or () if cell.cell_contents is clip]
        for cell in cells:
            cell.cell_contents = checked
        if not cells:  # a torch that decorates it in another way
            setattr(nn.utils, name, checked)


def _checked_clip(
    name: str, clip: Callable[..., Any], check: Callable[[Sequence[torch.Tensor], Any], None]
) -> Callable[..., Any]:
    @wraps(clip)
    def checked(
        parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        if torch.compiler.is_compiling():  # the check cannot be compiled
            return clip(parameters, *args, **kwargs)
        if isinstance(parameters, torch.Tensor):
            params: list[Any] = [parameters]
        else:
            params = list(parameters)
            if params or not isinstance(parameters, GeneratorType):  # torch warns of an empty one
                parameters = params
        check(params, name)
        return clip(parameters, *args, **kwargs)

    return checked


def before_unscaling(check: Callable[[Any, torch.optim.Optimizer], None]) -> None:
    """Call `check` with scaler and optimizer before torch unscales gradients, from now on."""
    kind: Any = torch.amp.GradScaler
    for name in ("step", "unscale_"):
        setattr(kind, name, _checked(getattr(kind, name), check))


PART_ENTRY = "braid_part"  # of state dicts of optimizers


def around_optimizer_states(
    part_of: Callable[[torch.optim.Optimizer], str],
    check: Callable[[torch.optim.Optimizer, Mapping[str, Any]], None],
) -> None:
    """Add `part_of(optimizer)` to its state dicts if it is not empty; `check` before loading."""
    kind: Any = torch.optim.Optimizer
    state_dict, load_state_dict = kind.state_dict, kind.load_state_dict

    @wraps(load_state_dict)
    def checked(self: Any, state_dict: dict[str, Any]) -> None:
        check(self, state_dict)
        load_state_dict(self, state_dict)

    @wraps(state_dict)
    def with_addition(self: Any) -> dict[str, Any]:
        state: dict[str, Any] = state_dict(self)
        if part := part_of(self):
            state[PART_ENTRY] = part
        return state

    kind.state_dict, kind.load_state_dict = with_addition, checked


def _checked(method: Callable[..., Any], check: Callable[[Any, Any], None]) -> Callable[..., Any]:
    @wraps(method)
    def checked(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        check(self, optimizer)
        return method(self, optimizer, *args, **kwargs)

    return checked


# Functions and operators.

Future: Any = _value("torch._C.Future")  # `then` makes it, not the subclass in torch.futures
schema_of: Callable[[OpOverload], Any] = _attribute("torch.ops.aten.mm.default._schema")


def changes_arguments(op: OpOverload) -> bool:
    """Return whether an operator changes an argument in place."""
    return bool(schema_of(op).is_mutable)


def draws_numbers(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of an operator draws random numbers (attention only for dropout)."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    known = schema_of(op).arguments
    values = {argument.name: argument.default_value for argument in known}
    values |= {argument.name: x for argument, x in zip(known, args, strict=False)} | dict(kwargs)
    return values.get("dropout_p") != 0.0


set_unwrap_function: Callable[[Any], Callable[[Callable[[Any], None]], None]]
set_unwrap_function = _attribute("torch.futures.Future._set_unwrap_func")
functions_of_nn: Any = _value("torch._C._nn")
qualified_name: Callable[[Any], str] = _attribute("torch.ops.aten.add._qualified_op_name")
_FRAMES = "torch._C._dynamo.eval_frame"  # without importing the compiler, which takes a second
_action = _value(f"{_FRAMES}._FrameAction")
_strategy = _value(f"{_FRAMES}._FrameExecStrategy")
_set_strategy = _value(f"{_FRAMES}.set_code_exec_strategy")
_FLASH = "torch.ops.aten._scaled_dot_product_flash_attention"
flash_attention = _value(_FLASH)
flash_attention_backward = _value(f"{_FLASH}_backward")
flash_attention_on_cpu = _value(f"{_FLASH}_for_cpu")
flash_attention_backward_on_cpu = _value(f"{_FLASH}_for_cpu_backward")


def compile_nothing(code: CodeType) -> None:
    """Exclude a function, and the functions that it calls, from torch's compiler."""
    _set_strategy(code, _strategy(_action.SKIP, _action.SKIP))


# Process groups.

_C10D = "torch.distributed.distributed_c10d"
_GROUP = f"{_C10D}.ProcessGroup"
backend_options: Any = _value(f"{_C10D}._DistributedBackendOptions")
default_store: Callable[[], Any] = _value(f"{_C10D}._get_default_store")
_world = _value(f"{_C10D}._world")
_plugins = _attribute(f"{_C10D}.Backend._plugins")
source_rank: Callable[[Any], int] = _method("torch._C._distributed_c10d.Work._source_rank")
_get_backend = _attribute(f"{_GROUP}._get_backend")
_start_coalescing = _attribute(f"{_GROUP}._start_coalescing")
_end_coalescing = _attribute(f"{_GROUP}._end_coalescing")
_set_default_backend = _attribute(f"{_GROUP}._set_default_backend")
_register_backend = _attribute(f"{_GROUP}._register_backend")
_set_group_name = _attribute(f"{_GROUP}._set_group_name")
_count_operations = _method("torch._C._distributed_c10d.Backend._set_sequence_number_for_group")
_set_timeout = _attribute("torch._C._distributed_c10d.ProcessGroupGloo._set_default_timeout")


def known_groups() -> Mapping[Any, Any]:
    """Return the process groups that have not been destroyed."""
    groups: Mapping[Any, Any] = _world.pg_map
    return groups


def plugins() -> Mapping[str, Any]:
    """Return the torch.distributed backends that packages have registered, by upper-case name."""
    registered: Mapping[str, Any] = _plugins(_look_up(f"{_C10D}.Backend"))
    return registered


def backend_for(group: Any, device: torch.device) -> Any:
    """Return the backend of a process group for a device."""
    return _get_backend(group)(device)


def start_coalescing(group: Any, device: torch.device) -> None:
    """Begin to collect operations of a process group."""
    _start_coalescing(group)(device)


def end_coalescing(group: Any, device: torch.device) -> Any:
    """Start the collected operations, and return their work."""
    return _end_coalescing(group)(device)


def register_backend(
    group: Any, device: torch.device, kind: Any, backend: Any, *, name: str, is_default: bool
) -> None:
    """Register a backend for a device with a process group, as torch does."""
    if is_default:
        _set_default_backend(group)(kind)
    _register_backend(group)(device, kind, backend)
    _set_group_name(group)(name)
    _count_operations(backend)


def set_default_timeout(backend: Any, timeout: timedelta) -> None:
    """Set the deadline of later operations of a backend."""
    _set_timeout(backend)(timeout)


def set_timeout_option(options: Any, timeout: timedelta) -> None:
    """Set the deadline in the options of a backend."""
    options._timeout = timeout  # noqa: SLF001 - its only name, in all versions seen
