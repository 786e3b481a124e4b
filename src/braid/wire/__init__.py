"""Bytes between processes that trust each other only after a handshake; see README.md."""

from __future__ import annotations

from braid.wire.address import Address, local_address
from braid.wire.connection import DEFAULT_TIMEOUT_S, Connection, SocketConnection
from braid.wire.frames import (
    MAX_META_BYTES,
    Allocate,
    Buffer,
    Frame,
    FrameDecoder,
    FrameLimits,
    encode,
)
from braid.wire.handshake import (
    PROTOCOL_VERSION,
    Established,
    Handshake,
    Identity,
    Refused,
    Send,
)
from braid.wire.listener import Listener, connect
from braid.wire.secret import SECRET_BYTES, Secret
from braid.wire.unsent import Unsent

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "MAX_META_BYTES",
    "PROTOCOL_VERSION",
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
    "Send",
    "SocketConnection",
    "Unsent",
    "connect",
    "encode",
    "local_address",
]
