"""Schema of messages: types registered by name, against which both ends check every message.

Problem: pickle executes data from a peer. Dictionaries and strings move mistakes of the sender into
the code of the receiver, where their origin is unknown.

Idea: every message is a `msgspec.Struct` that is registered by name. Encoding rejects types that
are not registered. Decoding rejects unknown names and bodies without the fields and types of the
struct, with an error that names the sender.

    class Join(msgspec.Struct, tag="join", frozen=True):
        host: str

    schema = Schema(Join, Leave)
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from braid.errors import CommError, ConfigError

__all__ = ["Failed", "Message", "PeerLost", "Schema"]

Message = msgspec.Struct
MessageType = TypeVar("MessageType", bound=type[msgspec.Struct])
MAX_NAME_BYTES = 64


class Failed(msgspec.Struct, tag="braid.failed", frozen=True):
    """Answer to a request if its handler raised; part of every schema.

    Attributes:
        error: Name of the exception's type.
        text: Message of the exception. Exceptions are sent as text only.
    """

    error: str
    text: str


class PeerLost(msgspec.Struct, tag="braid.lost", frozen=True):
    """Notice of a van to its own node that a peer is lost; never sent.

    It is delivered after all messages from the peer.

    Attributes:
        reason: Reason for the end of the peer's link.
        orderly: Whether the peer closed its van on purpose.
        silent: Whether the peer is lost because it was silent.
        replaced: Whether the peer refuses this node, because a later process has this node's name.
    """

    reason: str
    orderly: bool = False
    silent: bool = False
    replaced: bool = False


class Schema:
    """Types of messages between nodes; both ends must register the same types.

    Args:
        types: Struct types; the name of each on the wire is its `tag`, or its class name without a
            tag.

    Raises:
        ConfigError: A type is not a Struct, or two types have the same name.
    """

    def __init__(self, *types: type[Message]) -> None:
        self._types: dict[str, type[Message]] = {}
        self._names: dict[type[Message], str] = {}
        self._decoders: dict[str, msgspec.msgpack.Decoder[Message]] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self.register(Failed)
        for message_type in types:
            self.register(message_type)

    def register(self, message_type: MessageType) -> MessageType:
        """Add a type of messages; can be used as a decorator."""
        if not hasattr(message_type, "__struct_config__"):
            msg = f"a message must be a msgspec.Struct type, got {message_type!r}"
            raise ConfigError(msg)
        tag = message_type.__struct_config__.tag
        name = message_type.__name__ if tag is None else str(tag)
        other = self._types.get(name)
        if other is message_type:
            return message_type
        problem = "" if other is None else f"that {other.__qualname__} has already"
        if issubclass(message_type, PeerLost):
            problem = "that only a van itself may write"
        elif not 0 < len(name.encode()) <= MAX_NAME_BYTES:
            problem = f"of {len(name.encode())} bytes (allowed: 1 to {MAX_NAME_BYTES})"
        if problem:
            msg = (
                f"cannot register message {message_type.__qualname__} under the name {name!r} "
                f"{problem}: "
                "give it another `tag`"
            )
            raise ConfigError(msg)
        try:
            self._decoders[name] = msgspec.msgpack.Decoder(message_type)
        except (TypeError, NameError) as exc:
            msg = f"message {name!r} has a field that cannot be sent: {exc}"
            raise ConfigError(msg) from exc
        self._types[name] = message_type
        self._names[message_type] = name
        return message_type

    def encode(self, message: Message) -> tuple[str, bytes]:
        """Return the name and the encoded body of `message`.

        Raises:
            ConfigError: The message's type is not registered, or a value cannot be encoded.
        """
        name = self._names.get(type(message))
        if name is None:
            msg = (
                f"messages of type {type(message).__qualname__} are not registered "
                f"(registered: {self}): register the type in the Schema of both nodes"
            )
            raise ConfigError(msg)
        try:
            return name, self._encoder.encode(message)
        except (TypeError, ValueError, OverflowError, RecursionError) as exc:
            msg = f"message {name!r} has a field value that cannot be sent: {exc}"
            raise ConfigError(msg) from exc

    def decode(self, name: str, body: bytes | memoryview, *, sender: str) -> Message:
        """Return the message from the name and body that `encode` returned.

        Raises:
            CommError: The name is not registered, or the body does not fit the type; the message
                names `sender`.
        """
        decoder = self._decoders.get(name)
        if decoder is None:
            msg = (
                f"{sender} sent a message {name!r}, which is not registered here (registered: "
                f"{self}): run the same version of the program on both nodes"
            )
            raise CommError(msg)
        try:
            return decoder.decode(body)
        except Exception as exc:  # a type's checks may raise any exception; the sender is at fault
            msg = (
                f"{sender} sent a message {name!r} that does not have the fields of its type: {exc}"
            )
            raise CommError(msg) from exc

    def __str__(self) -> str:
        return ", ".join(name for name in self._types if not name.startswith("braid."))

    def __repr__(self) -> str:
        return f"<Schema of {len(self._types)} messages: {self}>"
