"""A module that lives in another node and is used as if it lived here.

    layer = RemoteModule("worker1/cpu", torch.nn.Linear, args=(4, 2))
    y = layer(x)                                   runs there; gradients flow through contexts
    optimizer = DistributedOptimizer(torch.optim.SGD, layer.remote_parameters(), lr=0.1)

It holds a reference, so it can be an argument or a result of calls, and a part of a local module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from braid.errors import ConfigError
from braid.rpc.api import remote, rpc_sync
from braid.rpc.current import current_agent
from braid.rpc.names import register
from braid.rpc.references import RRef

__all__ = ["RemoteModule"]

_LOCAL_ONLY = (
    *("add_module", "apply", "bfloat16", "buffers", "children", "cpu", "cuda", "double", "half"),
    *("extra_repr", "float", "ipu", "load_state_dict", "modules", "named_buffers", "state_dict"),
    *("named_children", "named_modules", "named_parameters", "parameters", "register_buffer"),
    *("register_backward_hook", "register_forward_hook", "register_forward_pre_hook", "to", "type"),
    *("register_full_backward_hook", "register_parameter", "requires_grad_", "share_memory", "xpu"),
    *("zero_grad",),
)


@register
class RemoteModule(torch.nn.Module):
    """A module on another node that is called like a local module.

    Args:
        remote_device: Node and device: "name/cpu", "rank:1/cuda:0", or "name" for its main memory.
        module_cls: Class of the module, or a function that returns one; both sides can import it.
        args: Arguments of the class.
        kwargs: Keyword arguments of the class.

    Raises:
        ConfigError: The node does not exist, or `remote_device` is malformed.

    On failure: an exception of the module's constructor is raised at the module's first use.
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., torch.nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.on, self.device = _place(remote_device)
        made = (module_cls, tuple(args or ()), dict(kwargs or {}), self.device)
        self.module_rref = remote(self.on, _make, made)

    @classmethod
    def init_from_module_rref(cls, remote_device: str, module_rref: RRef) -> RemoteModule:
        """Return a remote module for a module that exists.

        Args:
            remote_device: Its node and device.
            module_rref: Reference to it.
        """
        on, device = _place(remote_device)
        return cls._of_state([on, device, module_rref])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward in its node, and return the result."""
        return self.module_rref.rpc_sync().forward(*args, **kwargs)

    def forward_async(self, *args: Any, **kwargs: Any) -> torch.futures.Future[Any]:
        """Run the module's forward in its node; the future has the result."""
        proxy = self.module_rref.rpc_async()
        future: torch.futures.Future[Any] = proxy.forward(*args, **kwargs)
        return future

    def remote_parameters(self, recurse: bool = True) -> list[RRef]:
        """Return references to the parameters.

        Args:
            recurse: Whether to include parameters of submodules.
        """
        parameters: list[RRef] = rpc_sync(self.on, _parameters, (self.module_rref, recurse))
        return parameters

    def get_module_rref(self) -> RRef:
        """Return the reference to the module."""
        return self.module_rref

    def train(self, mode: bool = True) -> RemoteModule:
        """Set the module, in its node, to training, or to evaluation if not `mode`."""
        rpc_sync(self.on, _set_training, (self.module_rref, mode))
        self.training = mode
        return self

    def eval(self) -> RemoteModule:
        """Set the module, in its node, to evaluation."""
        return self.train(False)

    def __getstate__(self) -> NoReturn:
        msg = (
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when "
            "using RPC: pass it as an argument or a result of remote calls"
        )
        raise RuntimeError(msg)

    def __setstate__(self, state: Any) -> NoReturn:
        self.__getstate__()

    def __repr__(self) -> str:
        return f"<RemoteModule on {self.on}/{self.device}>"

    # -- the form in which `codec` sends it

    def _plain_state(self) -> list[Any]:
        return [self.on, self.device, self.module_rref]

    @classmethod
    def _of_state(cls, state: Sequence[Any]) -> RemoteModule:
        module = cls.__new__(cls)
        torch.nn.Module.__init__(module)
        module.on, module.device, module.module_rref = state
        return module


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refused(self: RemoteModule, *args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        is_parameters = name == "parameters"
        instead = "``remote_parameters`` instead" if is_parameters else "get_module_rref()"
        msg = (
            f"Method ``{name}`` not supported for RemoteModule. Please use {instead}: the module "
            f"is on {self.on}"
        )
        raise ValueError(msg)

    refused.__name__ = name
    refused.__doc__ = f"Raise ValueError: `{name}` works in the module's own node only."
    return refused


for _name in _LOCAL_ONLY:
    setattr(RemoteModule, _name, _refuse(_name))


def _place(remote_device: str) -> tuple[str | int, str]:
    """Return the node and the device in a `remote_device`."""
    node, slash, device = remote_device.partition("/")
    try:
        torch.device(device or "cpu")
        number = int(node[5:]) if node.startswith("rank:") else -1
    except (RuntimeError, ValueError):
        node = ""
    if not node or (slash and not device):
        msg = (
            "remote_device must be 'name/device', 'rank:number/device' or 'name', got "
            f"{remote_device!r}"
        )
        raise ConfigError(msg)
    to = number if number >= 0 else node
    current_agent().directory.find(to)
    return to, device or "cpu"


@register
def _make(
    module_cls: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], device: str
) -> torch.nn.Module:
    """Make the module; in its node."""
    module = module_cls(*args, **kwargs)
    if not isinstance(module, torch.nn.Module):
        msg = (
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but it "
            f"returns an instance of {type(module)}"
        )
        raise ValueError(msg)
    return module.to(device)


@register
def _parameters(rref: RRef, recurse: bool) -> list[RRef]:
    """Return references to the parameters; in the module's node."""
    return [RRef(param) for param in rref.local_value().parameters(recurse)]


@register
def _set_training(rref: RRef, mode: bool) -> None:
    """Set training or evaluation; in the module's node."""
    rref.local_value().train(mode)
