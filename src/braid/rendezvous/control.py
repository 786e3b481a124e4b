"""What launcher and rank tell each other while the job runs.

Problem: survivors learn of a death from their sockets, seconds later and without its cause; the
launcher learns of an exception by guessing from a log. Idea: a few small messages over one
authenticated connection per rank. The launcher sees an exit first and says why it happened; a rank
says what it raised and what it saved. Losing the launcher is no error here: ranks of a dead
launcher are killed by the kernel, and everything else goes on without it.

    rank -> launcher   Hello  Saved  Failed  Left
    launcher -> rank   RankLost  Stop
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from braid.errors import BraidError, CommError
from braid.wire import Connection, Identity, Secret, connect

__all__ = [
    "CONTROL_ROLE",
    "ControlClient",
    "Failed",
    "FromLauncher",
    "FromRank",
    "Hello",
    "Left",
    "RankLost",
    "Saved",
    "Stop",
    "decode_from_rank",
    "encode",
]

CONTROL_ROLE = "control"
MAX_TEXT = 16 << 10  # characters of one text; escaped UTF-8 stays below the limit of a frame's meta


class Hello(msgspec.Struct, tag_field="kind", tag="hello", frozen=True):
    """The rank is up and answers SIGUSR1 by dumping its stacks."""

    pid: int


class Saved(msgspec.Struct, tag_field="kind", tag="saved", frozen=True):
    """A checkpoint is complete."""

    step: int
    path: str
    sha256_ok: bool


class Failed(msgspec.Struct, tag_field="kind", tag="failed", frozen=True):
    """An exception is about to end the rank."""

    type: str
    message: str
    where: str
    traceback: str = ""


class Left(msgspec.Struct, tag_field="kind", tag="left", frozen=True):
    """The rank has shut down on purpose."""


class RankLost(msgspec.Struct, tag_field="kind", tag="rank_lost", frozen=True):
    """A rank has ended.

    Attributes:
        rank: Its global rank.
        reason: A clause: `was killed by signal 9 (SIGKILL)`, `exited with code 3`, `raised
        ValueError: ...`.
        left: It ended with exit code 0: only who still needs it is hurt.
    """

    rank: int
    reason: str
    left: bool = False


class Stop(msgspec.Struct, tag_field="kind", tag="stop", frozen=True):
    """Save what must be saved and end."""

    reason: str


FromRank: TypeAlias = Hello | Saved | Failed | Left
FromLauncher: TypeAlias = RankLost | Stop

_FROM_RANK = msgspec.json.Decoder(Hello | Saved | Failed | Left)
_FROM_LAUNCHER = msgspec.json.Decoder(RankLost | Stop)


def encode(message: FromRank | FromLauncher) -> bytes:
    """The message as the meta of a frame; texts that would not fit are shortened in the middle."""
    cut = {
        name: _shorten(value)
        for name in message.__struct_fields__
        if isinstance(value := getattr(message, name), str) and len(value) > MAX_TEXT // 4
    }
    return msgspec.json.encode(msgspec.structs.replace(message, **cut) if cut else message)


def decode_from_rank(meta: bytes) -> FromRank:
    """The message that a rank sent.

    Raises:
        CommError: It is none.
    """
    try:
        message: FromRank = _FROM_RANK.decode(meta)
    except msgspec.MsgspecError as exc:
        msg = f"expected a control message of a rank, found {meta[:80]!r}: {exc}"
        raise CommError(msg) from exc
    return message


class ControlClient:
    """The rank's end: news without waiting, and reports that never fail.

    Args:
        connection: Connection to the launcher with role `control`; owned and closed by this object.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection: Connection | None = connection

    @classmethod
    def dial(
        cls, address: str, secret: Secret, identity: Identity, *, timeout_s: float
    ) -> ControlClient:
        """Connect to the launcher at `address`.

        Raises:
            RendezvousError: The launcher is not there or does not trust this process.
        """
        role = identity._replace(role=CONTROL_ROLE)
        return cls(connect(address, secret, role, timeout_s=timeout_s))

    @property
    def connected(self) -> bool:
        """Whether the launcher was there when last looked."""
        return self._connection is not None

    def fileno(self) -> int:
        """Descriptor that becomes readable when there is news; -1 once the launcher is gone."""
        return -1 if self._connection is None else self._connection.fileno()

    def poll(self) -> list[FromLauncher]:
        """All messages that have arrived; never waits, never fails."""
        news: list[FromLauncher] = []
        try:
            while self._connection is not None:
                frame = self._connection.try_recv()
                if frame is None:
                    break
                news.append(_FROM_LAUNCHER.decode(frame.meta))
        except (BraidError, msgspec.MsgspecError):
            self.close()
        return news

    def send(self, message: FromRank) -> bool:
        """Tell the launcher; False when it is gone. `poll` then has what it said last, and ends the connection."""
        connection = self._connection
        if connection is None:
            return False
        try:
            connection.send(encode(message))
        except BraidError:
            return False
        return True

    def close(self) -> None:
        """Close the connection. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _shorten(text: str) -> str:
    half = MAX_TEXT // 8
    return f"{text[:half]}\n  ... {len(text) - 2 * half} characters ...\n{text[-half:]}"
