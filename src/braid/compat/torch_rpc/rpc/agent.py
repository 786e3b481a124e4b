"""Properties of this process's node: torch's agent, and counts as text."""

from __future__ import annotations

import torch

from braid.compat.torch_rpc import dist_autograd
from braid.rpc.agent import Agent
from braid.rpc.current import current_agent, has_default
from braid.rpc.workers import To, WorkerInfo

__all__ = ["RpcAgent", "TensorPipeAgent", "get_rpc_timeout"]


class TensorPipeAgent:
    """A node with torch's interface of agents.

    Args:
        agent: Agent of the node.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def get_worker_info(self, to: To | None = None) -> WorkerInfo:
        """Return name and number of a node; of this node when None."""
        if to is None:
            return self._agent.info
        record = self._agent.directory.find(to)
        return WorkerInfo(record.name, record.id)

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Return names and numbers of all known nodes."""
        return self._agent.directory.infos

    def get_debug_info(self) -> dict[str, str]:
        """Return counts of this node's calls and threads, by torch's names."""
        num_pending, num_running = len(self._agent.caller), self._agent.callee.num_running
        num_threads = self._agent.options.num_worker_threads
        return {
            "agent.num_pending_requests": str(num_pending),
            "agent.thread_pool_size": str(num_threads),
            "agent.num_idle_threads": str(max(0, num_threads - num_running)),
            "agent.client_active_calls": str(num_pending),
            "agent.server_active_calls": str(num_running),
            "agent.server_active_async_calls": "0",
        }

    @property
    def is_static_group(self) -> bool:
        """Whether the number of nodes is fixed."""
        return self._agent.world_size is not None

    def _get_device_map(self, to: WorkerInfo) -> dict[torch.device, torch.device]:
        """Return the map from this node's devices to another node's devices."""
        maps = self._agent.options.device_maps.get(to.name, {})
        return {torch.device(here): torch.device(there) for here, there in maps.items()}


RpcAgent = TensorPipeAgent


def _is_current_rpc_agent_set() -> bool:
    """Return whether this process is a node."""
    return has_default()


def _get_current_rpc_agent() -> TensorPipeAgent:
    """Return the node of this process."""
    return TensorPipeAgent(current_agent())


def get_rpc_timeout() -> float:
    """Return the default timeout of calls in seconds; 0 for none."""
    return current_agent().options.rpc_timeout


def _set_rpc_timeout(seconds: float) -> None:
    """Set the default timeout of calls in seconds."""
    current_agent().options.rpc_timeout = seconds


def _rref_context_get_debug_info() -> dict[str, str]:
    """Return counts of remote references.

    num_owner_rrefs counts local values that other nodes reference, num_forks counts their
    references, and num_pending_users counts references that their owner has not confirmed.
    """
    references = current_agent().references
    references.collect()
    counts = references.counts()
    return {
        "num_owner_rrefs": str(counts.shared),
        "num_pending_futures": str(counts.creating),
        "num_pending_users": str(counts.pending),
        "num_forks": str(counts.forks),
    }


def _get_debug_info() -> dict[str, str]:
    """Return all counts of this node."""
    return {
        **_rref_context_get_debug_info(),
        **_get_current_rpc_agent().get_debug_info(),
        **dist_autograd._get_debug_info(),  # noqa: SLF001 - torch's name
    }
