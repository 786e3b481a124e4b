"""Choices of a node of remote calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from braid.errors import ConfigError

__all__ = ["DEFAULT_TIMEOUT_S", "RpcOptions"]

DEFAULT_TIMEOUT_S = 60.0


@dataclass(kw_only=True)
class RpcOptions:
    """Choices of a node.

    Attributes:
        num_worker_threads: Calls of peers that run at the same time.
        rpc_timeout: Seconds after which a call fails; 0 for never.
        init_method: Place at which nodes meet: "env://", "tcp://host:port" or "file:///path".
        device_maps: For each other node, where its tensors arrive: the device here, then there.
        devices: Devices that this node uses.
        allowed_modules: Modules whose functions and classes peers may use, beside the program's.
        allow_pickle: Whether values without another form travel as pickles. A peer can run any code
            then; refused on a network without authentication.
        shared_memory: Whether large tensors pass through shared memory inside a host.
        max_unanswered: Calls of this node that a peer may not have answered; the next one waits, so
            that nobody is buried.
    """

    num_worker_threads: int = 16
    rpc_timeout: float = DEFAULT_TIMEOUT_S
    init_method: str = "env://"
    device_maps: dict[str, dict[str, str]] = field(default_factory=dict)
    devices: Sequence[str] = ()
    allowed_modules: Sequence[str] = ()
    allow_pickle: bool = False
    shared_memory: bool = True
    max_unanswered: int = 4096

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.max_unanswered < 1 or self.num_worker_threads < 1:
            msg = (
                "a node needs num_worker_threads >= 1 and max_unanswered >= 1, got "
                f"{self.num_worker_threads} and {self.max_unanswered}"
            )
            raise ConfigError(msg)

    def set_device_map(self, to: str, device_map: Mapping[object, object]) -> None:
        """Let tensors on some devices here arrive on some devices of the node `to`."""
        named = {_device(here): _device(there) for here, there in device_map.items()}
        self.device_maps.setdefault(to, {}).update(named)


def _device(device: object) -> str:
    return f"cuda:{device}" if isinstance(device, int) else str(device)
