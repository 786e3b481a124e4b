"""The only global state of this package: this rank's groups, and values set by programs.

Megatron's functions do not take a state but use the process in which they run. So they need a
global state, which is in this module only.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from braid.compat.megatron.failure import GroupNotInitializedError, UsageError
from braid.compat.megatron.groups import create_group
from braid.runtime.torch_internals import known_groups

__all__ = ["STATE", "GlobalMemoryBuffer"]

NAMES = {
    "mp": "model parallel group",
    "tp": "tensor model parallel group",
    "pp": "pipeline model parallel group",
    "dp": "data parallel group",
    "dp_cp": "data parallel group with context parallel combined",
    "dp_cp_ag": "data parallel group with context parallel for all_gather",
    "intra_dp_cp": "intra partial data parallel group",
    "cp": "context parallel group",
    "embd": "embedding group",
    "pos_embd": "position embedding group",
    "tp_dp": "tensor and data parallel group",
    "tp_dp_cp": "tensor and data parallel group with context parallel",
    "tp_cp": "tensor and context parallel group",
    "ep": "expert model parallel group",
    "ep_tp": "expert tensor parallel group",
    "tp_ep": "expert tensor and model parallel group",
    "tp_ep_pp": "expert tensor-model-pipeline parallel group",
    "ep_dp": "expert data parallel group",
    "intra_ep_dp": "intra partial expert data parallel group",
    "inter_ep_dp": "inter distributed optimizer instance group",
    "intra_dist_opt": "intra distributed optimizer instance group",
}
REASONS = {  # why an initialized state may lack a group
    "embd": "this rank's stage has no embedding",
    "pos_embd": "this rank's stage has no position embedding",
    "dp_cp_ag": "pass create_all_gather_group=True to initialize_model_parallel",
    "inter_ep_dp": "pass num_distributed_optimizer_instances to initialize_model_parallel",
    "gloo": "initialize_model_parallel was called with create_gloo_process_groups=False",
}


class GlobalMemoryBuffer:
    """Temporary buffers, which are reused by name and dtype."""

    def __init__(self) -> None:
        self.buffer: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get_tensor(
        self, tensor_shape: tuple[int, ...], dtype: torch.dtype, name: str
    ) -> torch.Tensor:
        """Return a tensor that shares memory with earlier tensors of the same name and dtype."""
        count = torch.Size(tensor_shape).numel()
        known = self.buffer.get((name, dtype))
        if known is None or known.numel() < count:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            known = self.buffer[name, dtype] = torch.empty(count, dtype=dtype, device=device)
        return known[:count].view(tensor_shape)


class ParallelState:
    """Groups of this rank, and values that programs set.

    Attributes:
        groups: This rank's process group of each kind; see `group_plan`.
        ranks: Global ranks of each group.
        overrides: Sizes and ranks that programs have set, by name.
        virtual_size: Number of stages of this rank; None without interleaving.
        virtual_rank: Current stage of this rank.
        with_gloo: Whether the functions for Gloo groups work.
        buffer: Temporary buffers for programs.
        microbatches: Calculator of the number of micro-batches.
    """

    def __init__(self) -> None:
        self.groups: dict[str, Any] = {}
        self.ranks: dict[str, list[int]] = {}
        self.overrides: dict[str, int] = {}
        self.virtual_size: int | None = None
        self.virtual_rank: int | None = None
        self.with_gloo = False
        self.buffer: GlobalMemoryBuffer | None = None
        self.microbatches: object = None

    @property
    def initialized(self) -> bool:
        """Whether groups have been created."""
        return bool(self.groups)

    def open(self, plan: Mapping[str, list[list[int]]], timeout: timedelta) -> None:
        """Create the groups of a plan; all ranks call this."""
        if self.initialized and not self.alive():
            self.close()  # destroying torch's default group has destroyed all groups
        if self.initialized:
            msg = (
                "model parallel groups are initialized already: call destroy_model_parallel() "
                "before you call initialize_model_parallel again"
            )
            raise UsageError(msg)
        rank, every = dist.get_rank(), list(range(dist.get_world_size()))
        # creating groups is cheap if a braid group of all ranks exists
        shared = (
            {} if getattr(dist.group.WORLD, "braid_group", None) is not None else {"world": [every]}
        )
        for kind, groups in (shared | dict(plan)).items():
            for ranks in groups:
                made = create_group(ranks, timeout, group_desc=NAMES.get(kind, kind))
                if rank in ranks:
                    self.groups[kind], self.ranks[kind] = made, ranks
        for part, whole in (("intra_dp_cp", "dp_cp"), ("intra_ep_dp", "ep_dp")):
            if part not in plan:
                self.groups[part], self.ranks[part] = self.groups[whole], self.ranks[whole]
        self.buffer = GlobalMemoryBuffer()

    def close(self) -> None:
        """Destroy the remaining groups, in the same order on all ranks, and reset all values."""
        for group in self.alive():
            dist.destroy_process_group(group)
        for values in (self.groups, self.ranks, self.overrides):
            values.clear()
        self.virtual_size = self.virtual_rank = self.buffer = None
        self.with_gloo = False

    def alive(self) -> list[Any]:
        """Return the groups that torch has not destroyed, the last one first."""
        known = known_groups() if dist.is_initialized() else {}
        return [g for g in reversed(dict.fromkeys(self.groups.values())) if g in known]

    def require(self, kind: str) -> None:
        """Raise GroupNotInitializedError unless this rank has a group of the kind."""
        if kind in self.groups:
            return
        name = NAMES.get(kind, kind)
        if self.initialized:
            msg = f"this rank has no {name}. {REASONS.get(kind, 'It was not requested')}"
        else:
            msg = (
                f"{name} is not initialized: call parallel_state.initialize_model_parallel(...) "
                "first, on all ranks"
            )
        raise GroupNotInitializedError(msg)

    def group(self, kind: str, *, check_initialized: bool = True) -> Any:
        """Return this rank's process group of a kind; without one, raise if `check_initialized`."""
        if check_initialized:
            self.require(kind)
        return self.groups.get(kind)

    def gloo_group(self, kind: str) -> Any:
        """Return the process group of a kind for CPU tensors, which is the same group."""
        if self.initialized and not self.with_gloo:
            msg = f"{NAMES[kind]} of Gloo is not initialized: {REASONS['gloo']}"
            raise GroupNotInitializedError(msg)
        return self.group(kind)

    def members(self, kind: str) -> list[int]:
        """Return the global ranks of this rank's group of a kind."""
        self.require(kind)
        return self.ranks[kind]

    def size(self, kind: str) -> int:
        """Return the size of this rank's group of a kind, or the number that a program has set."""
        set_size = self.overrides.get(f"{kind} size")
        return len(self.members(kind)) if set_size is None else set_size

    def rank(self, kind: str) -> int:
        """Return this rank's position in its group of a kind, or the rank that a program set."""
        set_rank = self.overrides.get(f"{kind} rank")
        return self.members(kind).index(dist.get_rank()) if set_rank is None else set_rank

    def override(self, name: str, value: int | None) -> None:
        """Set a value such as `tp rank` instead of the group's; None removes it again."""
        self.overrides.pop(name, None)
        if value is not None:
            self.overrides[name] = value


STATE = ParallelState()
