"""The job's secret: 32 random bytes that distinguish the job's own processes from all others.

Problem: without a secret, anyone who reaches a port of a training job can join it. Environment
variables, command lines and logs can be read by other users, by crash reporters and by people who
get them in a bug report, so the secret must not be in them.

Idea: the launcher draws the bytes and passes them to each process through an inherited file
descriptor, or the user puts them into a file that only this user can read. The bytes never leave
this object; it only signs and verifies.

Source: HMAC-SHA256, RFC 2104 and FIPS 198-1.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import os
import socket
import stat
import struct
from pathlib import Path
from typing import NoReturn

from braid.errors import ConfigError
from braid.runtime.wire.address import Address

__all__ = ["SECRET_BYTES", "Secret", "one_user_problem", "same_user_problem"]

SECRET_BYTES = 32  # the output size of HMAC-SHA256; a longer key would not be safer
_SEALS = ("F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_WRITE")


class Secret:
    """A shared key that signs and verifies, and is never shown, pickled or compared.

    Args:
        key: Exactly 32 bytes from a cryptographic random generator.
        seals_frames: See the attribute.
        for_one_user: See the attribute.

    Attributes:
        seals_frames: Whether frames between hosts carry message authentication codes. They also do
            if the peer's secret requires it.
        for_one_user: Whether others may know the key, for example from a store that anyone can
            read. Then only unix sockets are used, where the system confirms that the peer is of the
            same user, and the key only identifies the job.

    Raises:
        ConfigError: `key` has another length.
    """

    __slots__ = ("_key", "for_one_user", "seals_frames")

    def __init__(
        self, key: bytes, *, seals_frames: bool = True, for_one_user: bool = False
    ) -> None:
        if len(key) != SECRET_BYTES:
            msg = (
                f"a secret must have {SECRET_BYTES} bytes, got {len(key)}: make one with "
                "Secret.generate() or `head -c 32 /dev/urandom`"
            )
            raise ConfigError(msg)
        self._key = bytes(key)
        self.seals_frames = seals_frames
        self.for_one_user = for_one_user

    def sealing(self, seals_frames: bool) -> Secret:
        """Return a copy of this secret with another value of `seals_frames`."""
        return Secret(self._key, seals_frames=seals_frames, for_one_user=self.for_one_user)

    @classmethod
    def generate(cls) -> Secret:
        """Draw a new secret from the operating system's random generator."""
        return cls(os.urandom(SECRET_BYTES))

    @classmethod
    def from_fd(cls, fd: int) -> Secret:
        """Read the secret that another process wrote with `to_fd`, and close `fd`.

        Several children may inherit the same memory file: reading does not move the file position
        that they share.

        Raises:
            ConfigError: `fd` is not open, or does not hold exactly 32 bytes.
        """
        try:
            try:
                return cls(_read_all(fd))
            finally:
                os.close(fd)
        except OSError as exc:
            msg = (
                f"cannot read the job's secret from file descriptor {fd}: {exc.strerror}; "
                "start this program by its launcher, which passes the descriptor"
            )
            raise ConfigError(msg) from exc

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Secret:
        """Read the secret from a file of this user that no other user may open.

        Raises:
            ConfigError: The file is missing, is not a regular file, belongs to another user, has
                another mode than 0600, or does not hold exactly 32 bytes.
        """
        name = Path(path)
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as exc:
            msg = (
                f"cannot open the job's secret in the file {name}: {exc.strerror}; make it "
                f"with `(umask 077; head -c 32 /dev/urandom > {name})`"
            )
            raise ConfigError(msg) from exc
        try:
            # Check the open file, not its name: the name may be given to another file meanwhile.
            status = os.fstat(fd)
            mode = stat.S_IMODE(status.st_mode)
            if not stat.S_ISREG(status.st_mode) or mode != 0o600 or status.st_uid != os.geteuid():
                msg = (
                    f"the secret {name} must be a regular file of user {os.geteuid()} with mode "
                    f"0600, got mode {mode:04o} of user {status.st_uid}: other users may have read "
                    f"it; make a new one and `chmod 600 {name}`"
                )
                raise ConfigError(msg)
            return cls(_read_all(fd))
        finally:
            os.close(fd)

    def to_fd(self) -> int:
        """Return a new descriptor from which `from_fd` reads this secret; the caller closes it.

        It is closed on exec: list it in `pass_fds` for the process that needs it. On systems
        without memory files it is a pipe, which only one process can read.
        """
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("braid-secret", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.write(fd, self._key)
            seals = sum(getattr(fcntl, name, 0) for name in _SEALS)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            return fd
        reader, writer = os.pipe()
        os.write(writer, self._key)
        os.close(writer)
        return reader

    def sign(self, *parts: bytes) -> bytes:
        """Return the HMAC-SHA256 of `parts`.

        The lengths are signed as well, so two different lists never have the same signature.
        """
        text = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hmac.digest(self._key, text, "sha256")

    def verify(self, signature: bytes, *parts: bytes) -> bool:
        """Return whether `signature` matches `parts`, in the same time for any wrong signature."""
        return hmac.compare_digest(signature, self.sign(*parts))

    def __repr__(self) -> str:
        return "Secret(...)"

    def __reduce__(self) -> NoReturn:
        msg = "a Secret is never pickled: pass it by to_fd() and from_fd()"
        raise TypeError(msg)


def _read_all(fd: int) -> bytes:
    """Read at most one byte more than a secret from `fd`."""
    try:
        return os.pread(fd, SECRET_BYTES + 1, 0)
    except OSError as exc:
        if exc.errno != errno.ESPIPE:
            raise
    data = b""
    while len(data) <= SECRET_BYTES and (piece := os.read(fd, SECRET_BYTES + 1 - len(data))):
        data += piece
    return data


def one_user_problem(secret: Secret, address: Address) -> str | None:
    """Return why no peer can be trusted at an address; None if one can."""
    if not secret.for_one_user or (address.is_unix and hasattr(socket, "SO_PEERCRED")):
        return None
    return (
        "the job has no secret of its own, and the system does not identify the user of a peer "
        "there: set BRAID_SECRET_FILE to a file with 32 random bytes (mode 0600)"
    )


def same_user_problem(sock: socket.socket) -> str | None:
    """Return why the process at the other end of a unix socket is not of this user, or None."""
    option = getattr(socket, "SO_PEERCRED", None)  # not on macOS: there only file mode and secret
    if sock.family != socket.AF_UNIX or option is None:
        return None
    credentials = struct.Struct("3i")
    _, uid, _ = credentials.unpack(sock.getsockopt(socket.SOL_SOCKET, option, credentials.size))
    if uid == os.geteuid():
        return None
    return f"the other side is of user {uid}, this one of user {os.geteuid()}: run all as one user"
