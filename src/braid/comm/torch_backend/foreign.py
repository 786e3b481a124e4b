"""torch's backends, for tensors that cannot be in shared memory: GPU tensors and sparse tensors.

torch calls the creator of a Python process group once, for all devices, and then makes no other
backend ("cpu:braid,cuda:nccl" would lose NCCL). So each of our groups contains an ordinary
`ProcessGroup`, which gets NCCL, Gloo or another device's backend with its first tensor. All members
reach that tensor at the same point of the program, so this late start is a collective call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from braid.comm.engines.diagnostics import shared_gpu_error
from braid.errors import ConfigError
from braid.runtime.torch_internals import (
    backend_for,
    backend_options,
    plugins,
    register_backend,
    set_default_timeout,
    set_timeout_option,
)

__all__ = ["ExplainedGroup", "Foreign"]

c10d: Any = distributed_c10d  # torch's stubs are incomplete
_KINDS = dist.ProcessGroup.BackendType


class ExplainedGroup:
    """Proxy of a process group of torch that raises braid's error if ranks share a GPU.

    Args:
        group: The process group.
        ranks: Global ranks of the members.
    """

    def __init__(self, group: Any, ranks: tuple[int, ...]) -> None:
        self._group = group
        self._ranks = ranks

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._group, name)

        @functools.wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            try:
                return method(*args, **options)
            except RuntimeError as exc:
                shared_gpu = shared_gpu_error(str(exc), self._ranks)
                if shared_gpu is None:
                    raise
                raise shared_gpu from exc

        return call


class Foreign:
    """torch's ordinary process group inside one of braid's process groups.

    Attributes:
        ranks: Global ranks of the members.
        timeout: Deadline of later operations.

    Args:
        options: Options that torch passed to the creator.
        ranks: Global ranks of the members.
    """

    def __init__(self, options: Any, ranks: tuple[int, ...]) -> None:
        self.timeout: timedelta = options.timeout
        self._options = options
        self.ranks = ranks
        self._backends: dict[str, Any] = {}
        self._group: Any = None

    @property
    def devices(self) -> list[torch.device]:
        """Devices that have a backend already."""
        return [torch.device(device) for device in self._backends]

    def group(self, device: torch.device) -> Any:
        """Return the process group for tensors on `device`.

        Raises:
            ConfigError: torch has no backend for `device`.
        """
        if device.type not in self._backends:
            self._open(device.type)
        return self._group

    def backend(self, device: torch.device) -> Any:
        """Return the backend for tensors on `device`."""
        return backend_for(self.group(device), device)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the deadline of later operations."""
        self.timeout = timeout
        for backend in self._backends.values():
            set_default_timeout(backend, timeout)

    def shutdown(self) -> None:
        """Close all backends."""
        for backend in self._backends.values():
            backend.shutdown()
        self._backends.clear()
        self._group = None

    def abort(self) -> None:
        """Abort all backends and their operations."""
        for backend in self._backends.values():
            with contextlib.suppress(RuntimeError):  # not all backends support it
                backend.abort()
        self._backends.clear()
        self._group = None

    def _open(self, device_type: str) -> None:
        options = self._options
        if self._group is None:
            store = c10d.PrefixStore("inside/", options.store)
            self._group = dist.ProcessGroup(store, options.group_rank, options.group_size)
        store = c10d.PrefixStore(f"inside/{device_type}/", options.store)
        kind, backend = self._new(device_type, store)
        register_backend(
            self._group,
            torch.device(device_type),
            kind,
            backend,
            name=options.group_id,
            is_default=not self._backends,
        )
        self._backends[device_type] = backend

    def _new(self, device_type: str, store: Any) -> tuple[Any, Any]:
        """Return a new backend, as torch's `_new_process_group_helper` makes it."""
        rank, size = self._options.group_rank, self._options.group_size
        name = dist.Backend.default_device_backend_map.get(device_type, "")
        if name == "nccl" and dist.is_nccl_available():
            nccl = c10d.ProcessGroupNCCL.Options()
            return _KINDS.NCCL, c10d.ProcessGroupNCCL(store, rank, size, self._described(nccl))
        if name == "xccl" and dist.is_xccl_available():
            xccl = c10d.ProcessGroupXCCL.Options()
            return _KINDS.XCCL, c10d.ProcessGroupXCCL(store, rank, size, self._described(xccl))
        if name.upper() in plugins() and name != "braid":
            return _KINDS.CUSTOM, self._from_plugin(name, store)
        if device_type in {"cpu", "cuda"} and dist.is_gloo_available():
            return _KINDS.GLOO, c10d.ProcessGroupGloo(store, rank, size, timeout=self.timeout)
        msg = (
            f"a tensor is on device {device_type!r}, but torch has no communication backend for "
            "it on this machine: move it to the CPU, or install the package of the backend"
        )
        raise ConfigError(msg)

    def _described(self, options: Any) -> Any:
        set_timeout_option(options, self.timeout)
        options.global_ranks_in_group = list(self.ranks)
        options.group_name = self._options.group_id
        return options

    def _from_plugin(self, name: str, store: Any) -> Any:
        plugin = plugins()[name.upper()]
        rank, size = self._options.group_rank, self._options.group_size
        if not plugin.extended_api:
            return plugin.creator_fn(store, rank, size, self.timeout)
        options = backend_options()
        options.store, options.group_rank, options.group_size = store, rank, size
        options.timeout, options.group_id = self.timeout, self._options.group_id
        options.global_ranks_in_group = list(self.ranks)
        return plugin.creator_fn(options, None)
