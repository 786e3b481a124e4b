"""Handshake: both ends prove that they belong to the same job before other data is read.

Problem: a port scanner, a rank of an earlier job or an attacker on the network must not be able to
make a training process parse data, trust it or allocate memory for it. TCPStore, Gloo and NCCL
trust any client that connects; a password sent in clear text can be replayed.

Idea: three frames of one fixed size. Each side draws a new nonce and proves that it knows the
secret by an HMAC over all bytes that both have sent, with a label for the direction. The state
machine does no input or output: bytes in, instructions out.

In HELLO and ANSWER each side also states whether it wants codes on the frames that follow
(`frame_mac`). If one side does, both derive a key for each direction from the same bytes as the
proofs.

    client                                                         server
      HELLO   version, run, role, rank, epoch, nonce_c     ---->
              <----  ANSWER  version, run, role, rank, epoch, nonce_s, HMAC("server", HELLO, ANSWER)
      PROOF   HMAC("client", HELLO, ANSWER)                ---->

    side    state    event                          instructions                         next
    client  START    start()                        SendBytes(HELLO)                     ANSWER
    server  START    start()                        -                                    HELLO
    server  HELLO    HELLO of this run              SendBytes(ANSWER)                    PROOF
    client  ANSWER   ANSWER of this run, signed     SendBytes(PROOF), Established(peer)  DONE
    server  PROOF    PROOF, signed                  Established(peer)                    DONE
    any     any      REFUSAL                        Refused                              DONE
    any     any      first bytes not braid's        Refused                              DONE
    any     any      anything else                  SendBytes(REFUSAL), Refused          DONE

A replayed PROOF fails because nonce_s is new; a reflected HELLO is of the wrong kind, and a
reflected signature has the wrong label. The handshake authenticates the epoch; the caller, who
knows which epochs are current, must check it.

Source: the SIGMA family of protocols with a pre-shared key (H. Krawczyk, "SIGMA: the 'SIGn-and-MAc'
approach to authenticated Diffie-Hellman", CRYPTO 2003), without key agreement: the peer is
authenticated at the start, and traffic is not encrypted.
"""

from __future__ import annotations

import struct
from enum import Enum, IntEnum
from typing import Literal, NamedTuple, TypeAlias

from braid.errors import ConfigError, InternalError
from braid.runtime.wire.frame_mac import FrameKeys
from braid.runtime.wire.secret import Secret

__all__ = [
    "FRAME_BYTES",
    "NONCE_BYTES",
    "Established",
    "Handshake",
    "Identity",
    "Instruction",
    "Refused",
    "SendBytes",
]

PROTOCOL_VERSION = 2
NONCE_BYTES = 32
MAGIC = b"BRAID\r\n\x00"  # the line end reveals a transport that rewrites line ends
# magic, version, kind, refusal code (HELLO, ANSWER: whether frames have codes), run id, role, rank,
# epoch, nonce, signature
_FRAME = struct.Struct("!8sHBB64s16sqq32s32s")
_PREFIX = struct.Struct("!8sH")  # must stay the same in all future versions
FRAME_BYTES = _FRAME.size
_SIGNED_BYTES = FRAME_BYTES - 32
_RUN_ID_BYTES = 64
_ROLE_BYTES = 16
_KEY_LABELS = {"client": b"braid frames: client", "server": b"braid frames: server"}
_LABELS = {"client": b"braid handshake: client", "server": b"braid handshake: server"}

Side: TypeAlias = Literal["client", "server"]


class Identity(NamedTuple):
    """Identity that a process claims; proven once the handshake is `Established`.

    Attributes:
        run_id: Name of the job, at most 64 bytes of UTF-8.
        role: Purpose of the connection, such as `store` or `control`; at most 16 bytes.
        rank: Global rank; -1 for a process that is not a rank, such as the launcher.
        epoch: Current membership epoch of the process.
    """

    run_id: str
    role: str
    rank: int
    epoch: int = 0

    def __str__(self) -> str:
        """Return `rank 2 (store, run a3f, epoch 0)`, as in error messages."""
        who = f"rank {self.rank}" if self.rank >= 0 else "the launcher"
        return f"{who} ({self.role}, run {self.run_id}, epoch {self.epoch})"


class SendBytes(NamedTuple):
    """Instruction: write `data` to the peer."""

    data: bytes


class Established(NamedTuple):
    """Instruction: the peer has proven its identity; later bytes belong to the connection.

    Attributes:
        peer: The identity.
        keys: Keys of the frames' codes; None for frames without codes.
    """

    peer: Identity
    keys: FrameKeys | None = None


class Refused(NamedTuple):
    """Instruction: the peer is not trusted, close the connection."""

    reason: str


Instruction: TypeAlias = SendBytes | Established | Refused


class _Kind(IntEnum):
    HELLO = 1
    ANSWER = 2
    PROOF = 3
    REFUSAL = 4


class _Code(IntEnum):
    VERSION = 1
    RUN = 2
    PROOF = 3
    REFLECTED = 4
    UNEXPECTED = 5


_CODE_TEXTS: dict[int, str] = {
    _Code.VERSION: "this process uses another version of braid's protocol: install the same braid "
    "on all hosts",
    _Code.RUN: "this process belongs to another run: give all processes the same run id and "
    "address",
    _Code.PROOF: "this process has another secret: give all processes of the job the same one",
    _Code.REFLECTED: "this process received its own bytes back",
    _Code.UNEXPECTED: "this process received an unexpected frame",
}


class _State(Enum):
    START = "start"
    HELLO = "waiting for HELLO"
    ANSWER = "waiting for ANSWER"
    PROOF = "waiting for PROOF"
    DONE = "done"


_EXPECTED_KIND = {
    _State.HELLO: _Kind.HELLO,
    _State.ANSWER: _Kind.ANSWER,
    _State.PROOF: _Kind.PROOF,
}


class _Fields(NamedTuple):
    """Fields of one frame."""

    magic: bytes
    version: int
    kind: int
    code: int
    run_id: bytes
    role: bytes
    rank: int
    epoch: int
    nonce: bytes
    signature: bytes


class Handshake:
    """One side of the handshake of one connection.

    Args:
        side: `client` for the side that connected, `server` for the one that accepted.
        secret: The job's secret.
        identity: Identity of this side.
        nonce: 32 new random bytes; passed in, so that tests can repeat a handshake.
        seals_frames: Whether this side wants codes on frames.

    Raises:
        ConfigError: A field of `identity` does not fit the frame.
    """

    def __init__(
        self,
        side: Side,
        secret: Secret,
        identity: Identity,
        nonce: bytes,
        *,
        seals_frames: bool = False,
    ) -> None:
        if len(nonce) != NONCE_BYTES:
            msg = f"a nonce must have {NONCE_BYTES} bytes, got {len(nonce)}"
            raise InternalError(msg)
        self._side = side
        self._secret = secret
        self._identity = identity
        self._nonce = nonce
        self._text = (
            _packed_text("run_id", identity.run_id, _RUN_ID_BYTES),
            _packed_text("role", identity.role, _ROLE_BYTES),
        )
        self._state = _State.START
        self._received = bytearray()
        self._hello = b""  # signed parts of the frames HELLO and ANSWER
        self._answer = b""
        self._peer: Identity | None = None
        self._seals_frames = seals_frames

    @property
    def needs(self) -> int:
        """Largest number of bytes that may be read next; 0 when the handshake is over.

        A caller that reads no more than this leaves later bytes of the stream to the connection.
        """
        return 0 if self._state is _State.DONE else FRAME_BYTES - len(self._received)

    def start(self) -> list[Instruction]:
        """Begin the handshake on a new connection; returns instructions."""
        if self._side == "server":
            self._state = _State.HELLO
            return []
        self._state = _State.ANSWER
        frame = self._frame(_Kind.HELLO)
        self._hello = frame[:_SIGNED_BYTES]
        return [SendBytes(frame)]

    def feed(self, data: bytes) -> list[Instruction]:
        """Process `data`, at most `needs` bytes from the peer; returns instructions."""
        if len(data) > self.needs:
            msg = f"the handshake needs at most {self.needs} bytes, got {len(data)}"
            raise InternalError(msg)
        self._received += data
        received = bytes(self._received)
        # The first bytes are checked as they arrive: an HTTP request is shorter than a frame.
        if not MAGIC.startswith(received[: len(MAGIC)]):
            return self._refuse(
                None,
                f"{received[:16]!r} is not braid's handshake: another program uses this port",
            )
        if len(received) >= _PREFIX.size:
            version = _PREFIX.unpack_from(received)[1]
            if version != PROTOCOL_VERSION:
                return self._refuse(
                    _Code.VERSION,
                    f"the other side has version {version} of braid's protocol, this one "
                    f"{PROTOCOL_VERSION}: install the same braid on all hosts",
                )
        if len(received) < FRAME_BYTES:
            return []
        self._received.clear()
        return self._frame_received(received)

    def _frame_received(self, raw: bytes) -> list[Instruction]:
        fields = _Fields(*_FRAME.unpack(raw))
        if fields.kind == _Kind.REFUSAL:
            text = _CODE_TEXTS.get(fields.code, f"code {fields.code}")
            return self._refuse(None, f"the other side refused this process, because {text}")
        expected = _EXPECTED_KIND[self._state]
        if fields.nonce == self._nonce or (fields.kind == _Kind.HELLO and expected is _Kind.ANSWER):
            return self._refuse(
                _Code.REFLECTED,
                f"expected {expected.name}, got {_kind_name(fields.kind)} as this side sends "
                "it: the bytes were reflected, or both ends connected",
            )
        if fields.kind != expected:
            return self._refuse(
                _Code.UNEXPECTED, f"expected {expected.name}, got {_kind_name(fields.kind)}"
            )
        if expected is _Kind.PROOF:
            return self._proof_received(fields)
        return self._introduction_received(fields, raw[:_SIGNED_BYTES])

    def _introduction_received(self, fields: _Fields, signed: bytes) -> list[Instruction]:
        try:
            self._peer = Identity(
                _unpacked_text(fields.run_id),
                _unpacked_text(fields.role),
                fields.rank,
                fields.epoch,
            )
        except UnicodeDecodeError:
            return self._refuse(
                _Code.UNEXPECTED, f"run id {fields.run_id!r} or role {fields.role!r} is not UTF-8"
            )
        if self._peer.run_id != self._identity.run_id:
            return self._refuse(
                _Code.RUN,
                f"the other side belongs to run {self._peer.run_id!r}, this one to "
                f"{self._identity.run_id!r}: is this the right address?",
            )
        self._seals_frames |= fields.code != 0
        if self._side == "client":
            self._answer = signed
            if not self._signed_by("server", fields.signature):
                return self._refuse(_Code.PROOF, self._no_proof())
            self._state = _State.DONE
            return [SendBytes(self._frame(_Kind.PROOF, "client")), self._established(self._peer)]
        self._hello = signed
        self._answer = self._frame(_Kind.ANSWER)[:_SIGNED_BYTES]
        self._state = _State.PROOF
        return [SendBytes(self._frame(_Kind.ANSWER, "server"))]

    def _proof_received(self, fields: _Fields) -> list[Instruction]:
        assert self._peer is not None
        if not self._signed_by("client", fields.signature):
            return self._refuse(_Code.PROOF, self._no_proof())
        self._state = _State.DONE
        return [self._established(self._peer)]

    def _established(self, peer: Identity) -> Established:
        if not self._seals_frames:
            return Established(peer)
        other: Side = "client" if self._side == "server" else "server"
        sent, received = (
            self._secret.sign(_KEY_LABELS[side], self._hello, self._answer)
            for side in (self._side, other)
        )
        return Established(peer, FrameKeys(sent, received))

    def _signed_by(self, side: Side, signature: bytes) -> bool:
        return self._secret.verify(signature, _LABELS[side], self._hello, self._answer)

    def _no_proof(self) -> str:
        return (
            f"{self._peer} sent a wrong signature: give all processes of the job the same secret "
            "(it has another one, or replays an old handshake)"
        )

    def _refuse(self, code: _Code | None, reason: str) -> list[Instruction]:
        self._state = _State.DONE
        refused = Refused(reason)
        if code is None:
            return [refused]
        return [SendBytes(self._frame(_Kind.REFUSAL, code=code)), refused]

    def _frame(self, kind: _Kind, sign_as: Side | None = None, code: int = 0) -> bytes:
        signature = b""
        if sign_as is not None:
            signature = self._secret.sign(_LABELS[sign_as], self._hello, self._answer)
        nonce = b""
        if kind in {_Kind.HELLO, _Kind.ANSWER}:
            nonce, code = self._nonce, int(self._seals_frames)
        return _FRAME.pack(
            MAGIC,
            PROTOCOL_VERSION,
            kind,
            code,
            *self._text,
            self._identity.rank,
            self._identity.epoch,
            nonce,
            signature,
        )


def _packed_text(name: str, text: str, limit: int) -> bytes:
    raw = text.encode()
    if not raw or len(raw) > limit or b"\0" in raw:
        msg = (
            f"Identity.{name} must have 1 to {limit} bytes of UTF-8 without NUL, got {text!r} "
            f"({len(raw)} bytes): choose a shorter name"
        )
        raise ConfigError(msg)
    return raw


def _unpacked_text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode()


def _kind_name(kind: int) -> str:
    return _Kind(kind).name if kind in set(_Kind) else f"kind {kind}"
