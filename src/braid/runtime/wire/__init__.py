"""Authenticated connections between the processes of a job; see README.md."""

from __future__ import annotations

from braid.runtime.wire.address import Address, local_address
from braid.runtime.wire.connect import connect
from braid.runtime.wire.connection import DEFAULT_TIMEOUT_S, Connection
from braid.runtime.wire.frames import (
    MAX_META_BYTES,
    Allocate,
    Buffer,
    Frame,
    FrameDecoder,
    FrameLimits,
    encode,
)
from braid.runtime.wire.handshake import (
    Established,
    Handshake,
    Identity,
    Refused,
    SendBytes,
)
from braid.runtime.wire.listener import Listener
from braid.runtime.wire.secret import SECRET_BYTES, Secret
from braid.runtime.wire.unsent import Unsent

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "MAX_META_BYTES",
    "SECRET_BYTES",
    "Address",
    "Allocate",
    "Buffer",
    "Connection",
    "Established",
    "Frame",
    "FrameDecoder",
    "FrameLimits",
    "Handshake",
    "Identity",
    "Listener",
    "Refused",
    "Secret",
    "SendBytes",
    "Unsent",
    "connect",
    "encode",
    "local_address",
]
