"""Control messages between the launcher and the ranks while a job runs.

Problem: surviving ranks detect a death through their sockets, seconds later and without its cause.
The launcher must guess an exception from a log.

Idea: a few small messages over one authenticated connection per rank. The launcher detects an exit
first and sends its cause; a rank sends its exceptions and its checkpoints. The loss of the launcher
is not an error for ranks: the kernel kills the ranks of a dead launcher, or asks elastic ones to
save.

    rank -> launcher   RankHello  Saved  Loaded  Logged  RankFailed  Exiting  Left  Ready
    launcher -> rank   RankLost  Stop  PauseTraining  NewEpoch
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from braid.errors import BraidError, CommError
from braid.runtime.closing import Closing
from braid.runtime.wire import Connection, Identity, Secret, connect

__all__ = [
    "CONTROL_ROLE",
    "DISMISSED",
    "ControlClient",
    "Exiting",
    "FromLauncher",
    "FromRank",
    "Left",
    "Loaded",
    "Logged",
    "NewEpoch",
    "PauseTraining",
    "RankFailed",
    "RankHello",
    "RankLost",
    "Ready",
    "Saved",
    "Stop",
    "decode_from_rank",
    "encode",
]

CONTROL_ROLE = "control"
MAX_TEXT = 16 << 10  # characters of one text; escaped as UTF-8 it fits into the meta of a frame


class RankHello(msgspec.Struct, tag_field="kind", tag="hello", frozen=True):
    """Notice of a rank to the launcher that it runs, and dumps its stacks on SIGUSR1."""

    pid: int


class Saved(msgspec.Struct, tag_field="kind", tag="saved", frozen=True):
    """Notice of a rank to the launcher that a checkpoint is complete."""

    step: int
    path: str
    sha256_ok: bool


class Loaded(msgspec.Struct, tag_field="kind", tag="loaded", frozen=True):
    """Notice of a rank to the launcher that the run resumes from an earlier run's checkpoint.

    The checkpoint has been verified.

    Attributes:
        step: Step of the checkpoint.
        path: Path of the checkpoint.
        resume: Value of `--resume` that loads it again.
    """

    step: int
    path: str
    resume: str = "auto"


class Logged(msgspec.Struct, tag_field="kind", tag="logged", frozen=True):
    """Numbers that a rank has logged for one step, sent to the launcher; see `braid.log`."""

    row: dict[str, int | float | None]


class RankFailed(msgspec.Struct, tag_field="kind", tag="failed", frozen=True):
    """Notice of a rank to the launcher that an exception is about to end the rank."""

    type: str
    message: str
    where: str
    traceback: str = ""


class Exiting(msgspec.Struct, tag_field="kind", tag="exiting", frozen=True):
    """Notice of a rank to the launcher that `sys.exit` is about to end it, which may take long.

    Attributes:
        code: Exit code, from 1 to 255.
        type: Exception that the program was handling when it called `sys.exit`; else empty.
        message: Message of that exception.
        where: Deepest frame of user code in its traceback.
        traceback: Text of its traceback.
    """

    code: int
    type: str = ""
    message: str = ""
    where: str = ""
    traceback: str = ""


class Left(msgspec.Struct, tag_field="kind", tag="left", frozen=True):
    """Notice of a rank to the launcher that it has left the job on purpose.

    Attributes:
        missed: Ranks that had left before, while an operation of this rank still needed them.
    """

    missed: tuple[int, ...] = ()


class RankLost(msgspec.Struct, tag_field="kind", tag="rank_lost", frozen=True):
    """Notice of the launcher to all other ranks that a rank has ended.

    Attributes:
        rank: Global rank that has ended.
        reason: Clause such as `was killed by signal 9 (SIGKILL)` or `raised ValueError: ...`.
        departed: Whether the rank ended with exit code 0. Then only ranks that still need it fail.
    """

    rank: int
    reason: str
    departed: bool = False


DISMISSED = "the run continues without this process"  # for a process that waits for an epoch


class Stop(msgspec.Struct, tag_field="kind", tag="stop", frozen=True):
    """Request of the launcher to a rank to save its state and end."""

    reason: str


class Ready(msgspec.Struct, tag_field="kind", tag="ready", frozen=True):
    """Notice of a process to the launcher that it waits for the next epoch of an elastic run.

    Attributes:
        epoch: Epoch in which the process is a member; -1 without one.
        num_steps: Number of training steps in the process's state; -1 without state.
        leaves: Reason why the process ends instead of waiting; empty if it waits.
        is_offer: Whether the process ends only if the run can continue without it; then the
            launcher answers `Stop(DISMISSED)`, else with the next epoch.
    """

    epoch: int
    num_steps: int
    leaves: str = ""
    is_offer: bool = False


class Resumable(msgspec.Struct, tag_field="kind", tag="resumable", frozen=True):
    """Notice of a member to the launcher that new processes could begin with a checkpoint.

    Attributes:
        training: Number of the training in its program.
        num_steps: Number of training steps in the checkpoint.
        is_saved: Whether this training has saved it; otherwise the training has begun with it.
    """

    training: int
    num_steps: int
    is_saved: bool


class PauseTraining(msgspec.Struct, tag_field="kind", tag="pause", frozen=True):
    """Request of the launcher to a member to send `Ready` after the current step.

    The launcher sends it when the members of an elastic run must change.
    """


class NewEpoch(msgspec.Struct, tag_field="kind", tag="epoch", frozen=True):
    """Notice of the launcher to each member that an epoch of an elastic run begins.

    Attributes:
        epoch: Number of the epoch.
        members: Launcher's numbers of the member processes, in the order of ranks in their group.
        num_steps: Number of steps in the state of each member; -1 without state.
        checkpoint_step: Number of steps in the checkpoint with which all members begin; -1 if some
            of them have the state.
        training: Number of the training, in its program, that this checkpoint is of.
        can_lose: Whether the run can continue if one of the members leaves, when the epoch begins.
    """

    epoch: int
    members: tuple[int, ...]
    num_steps: tuple[int, ...]
    checkpoint_step: int = -1
    training: int = 0
    can_lose: bool = False


FromRank: TypeAlias = (
    RankHello | Saved | Loaded | Logged | RankFailed | Exiting | Left | Ready | Resumable
)
FromLauncher: TypeAlias = RankLost | Stop | PauseTraining | NewEpoch

_FROM_RANK = msgspec.json.Decoder(FromRank)
_FROM_LAUNCHER = msgspec.json.Decoder(FromLauncher)


def encode(message: FromRank | FromLauncher) -> bytes:
    """Encode a message as the meta of a frame; long texts are shortened in the middle."""
    cut = {
        name: _shorten(value)
        for name in message.__struct_fields__
        if isinstance(value := getattr(message, name), str) and len(value) > MAX_TEXT // 4
    }
    return msgspec.json.encode(msgspec.structs.replace(message, **cut) if cut else message)


def decode_from_rank(meta: bytes) -> FromRank:
    """Decode a message from a rank.

    Raises:
        CommError: `meta` is not a control message.
    """
    try:
        message: FromRank = _FROM_RANK.decode(meta)
    except msgspec.MsgspecError as exc:
        msg = f"{meta[:80]!r} is not a control message of a rank: {exc}"
        raise CommError(msg) from exc
    return message


class ControlClient(Closing):
    """Rank's end of the control connection; no method blocks or fails on a lost launcher.

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
            RendezvousError: The launcher cannot be reached or does not accept this process.
        """
        role = identity._replace(role=CONTROL_ROLE)
        connection = connect(address, secret, role, timeout_s=timeout_s)
        connection.end_if_silent()  # a host without power sends no end
        return cls(connection)

    @property
    def connected(self) -> bool:
        """Whether the connection was open at the last `poll` or `send`."""
        return self._connection is not None

    def fileno(self) -> int:
        """Return the descriptor that becomes readable with messages; -1 if the launcher is lost."""
        return -1 if self._connection is None else self._connection.fileno()

    def poll(self) -> list[FromLauncher]:
        """Return all messages that have arrived; never blocks, never fails."""
        messages: list[FromLauncher] = []
        try:
            while self._connection is not None:
                frame = self._connection.try_recv()
                if frame is None:
                    break
                messages.append(_FROM_LAUNCHER.decode(frame.meta))
        except (BraidError, msgspec.MsgspecError):
            self.close()
        return messages

    def send(self, message: FromRank) -> bool:
        """Send a message to the launcher; return False if the launcher is lost.

        `poll` then returns the launcher's last messages and closes the connection.
        """
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


def _shorten(text: str) -> str:
    half = MAX_TEXT // 8
    return f"{text[:half]}\n  ... {len(text) - 2 * half} characters ...\n{text[-half:]}"
