"""Key files for CURVE: made, read and checked; and what a client needs to show who it is. Needs zmq, no torch.

The format is zmq's own, as ``zmq.auth.create_certificates`` writes it: ``NAME.key`` holds a public key and may be
handed out, ``NAME.key_secret`` holds both and stays with its owner. No message of this module shows what a file holds.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

import zmq
from zmq.utils import z85

from .errors import KeyFileError, printable

PUBLIC_SUFFIX = ".key"
SECRET_SUFFIX = ".key_secret"  # noqa: S105 - a file's name
FILE_LIMIT = 65536
"""Largest key file that is read, in bytes; one has about 300."""
FOLDER_LIMIT = 10_000
"""Most key files of one folder."""
PRIVATE = 0o077
"""Permission bits that the file of a secret key may not have."""
OTHERS_WRITE = 0o002
"""A public key that anybody can replace, or a folder that anybody can add one to, would let anybody in."""
_KEY_LENGTH = 40
"""Characters of a key in Z85: 32 bytes."""
_LINE = re.compile(rb"""(?m)^[ \t]*(public|secret)-key[ \t]*=[ \t]*["']?([^\s"']*)["']?[ \t]*\r?$""")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_FORMAT = "key files are those of `fusewire keygen`, or of zmq.auth.create_certificates"


class Pair(NamedTuple):
    """A key pair, each key in Z85."""

    public: bytes
    secret: bytes


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """What a client needs to speak CURVE: its own pair, and the daemon's public key. See `load`."""

    public: bytes
    server: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def load(cls, secret_file: str | os.PathLike[str], server_file: str | os.PathLike[str]) -> Self:
        """Read key files.

        Args:
            secret_file: The client's own, ``NAME.key_secret``.
            server_file: The daemon's public one, ``fusewire.key``.

        Raises:
            KeyFileError: One can't be read, is no key file, is the wrong one of a pair, or a secret that others can
                read.
        """
        pair = read_pair(Path(secret_file))
        return cls(public=pair.public, secret=pair.secret, server=read_public(Path(server_file)))

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket speak CURVE; before it connects."""
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret
        socket.curve_serverkey = self.server


def hint(endpoint: str, keys: ClientKeys | None) -> str:
    """Return what a message about silence should add: whoever is not let in by ZeroMQ hears nothing at all."""
    if keys is not None:
        return (
            ". Keys were used: the daemon accepts only those in its key folders (curve.trainers, curve.operators, "
            "curve.subscribers; `systemctl reload fusewire` after a change), and the server's key has to be its own"
        )
    return ". Over TCP it may want keys (CURVE): give yours and its public one" if endpoint.startswith("tcp://") else ""


def read_pair(path: Path, *, forbidden: int = PRIVATE) -> Pair:
    """Read the file of a secret key.

    Args:
        path: Of the file; links are not followed.
        forbidden: Permission bits that it may not have.

    Raises:
        KeyFileError: It can't be read, others can read it, or it holds no pair.
    """
    content, mode = _read(path)
    if mode & forbidden:
        raise KeyFileError(
            f"key file {path}: its mode is {mode:#o}, so that others can read or change it: chmod 600 {path}"
        )
    found = _keys(path, content)
    if "secret" not in found:
        raise KeyFileError(f"key file {path}: holds no secret key; the one that does ends in {SECRET_SUFFIX}")
    public = zmq.curve_public(found["secret"])
    if found.get("public", public) != public:
        raise KeyFileError(f"key file {path}: its public key is not that of its secret key; {_FORMAT}")
    return Pair(public, found["secret"])


def read_public(path: Path) -> bytes:
    """Read the file of a public key. Links are not followed.

    Raises:
        KeyFileError: It can't be read, anybody can change it, it holds no key, or a secret one, which only its owner
            may have.
    """
    content, mode = _read(path)
    if mode & OTHERS_WRITE:
        raise KeyFileError(f"key file {path}: its mode is {mode:#o}, so that anybody can change it: chmod o-w {path}")
    found = _keys(path, content)
    if "secret" in found:
        raise KeyFileError(
            f"key file {path}: holds a secret key, which belongs to its owner alone: use the public one, which ends in "
            f"{PUBLIC_SUFFIX}, and make a new pair if others could have read this one"
        )
    if "public" not in found:
        raise KeyFileError(f"key file {path}: holds no public key; {_FORMAT}")
    return found["public"]


def read_folder(folder: Path) -> tuple[dict[bytes, str], list[KeyFileError]]:
    """Read all public keys of a folder, ``*.key``.

    Returns:
        Key -> the name of its file without the suffix; and what is wrong with files that are left out.

    Raises:
        KeyFileError: The folder can't be read, anybody can write to it, or it has too many files.
    """
    try:
        mode = stat.S_IMODE(folder.stat().st_mode)
        files = sorted(
            path for path in folder.iterdir() if path.name.endswith(PUBLIC_SUFFIX) and not path.name.startswith(".")
        )
    except OSError as error:
        raise KeyFileError(f"key folder {folder}: {error.strerror}; create it, or correct the setting") from error
    if mode & OTHERS_WRITE:
        raise KeyFileError(f"key folder {folder}: its mode is {mode:#o}: anybody could add a key: chmod o-w {folder}")
    if len(files) > FOLDER_LIMIT:
        raise KeyFileError(f"key folder {folder}: {len(files)} keys, the most is {FOLDER_LIMIT}")
    found: dict[bytes, str] = {}
    wrong = []
    for path in files:
        try:
            found.setdefault(read_public(path), printable(path.name.removesuffix(PUBLIC_SUFFIX), 100))
        except KeyFileError as error:
            wrong.append(error)
    return found, wrong


def make(folder: Path, name: str, *, force: bool = False) -> tuple[Path, Path]:
    """Make a key pair in two files; the secret one has mode 0600 from its first moment.

    Args:
        folder: Where; made if it is not there.
        name: Of the files, without suffix: letters, digits, ``.``, ``_`` and ``-``.
        force: Whether to overwrite files of these names.

    Returns:
        The public and the secret file.

    Raises:
        KeyFileError: The name can't be one, a file is there already, or can't be written.
    """
    if not _NAME.fullmatch(name):
        raise KeyFileError(f"key name {printable(name, 50)}: up to 100 letters, digits, '.', '_' and '-'")
    if not zmq.has("curve"):
        raise KeyFileError("this libzmq was built without CURVE; pyzmq's own wheels have it")
    public, secret = zmq.curve_keypair()
    texts = {
        folder / f"{name}{SECRET_SUFFIX}": (_text(public, secret), 0o600),
        folder / f"{name}{PUBLIC_SUFFIX}": (_text(public), 0o644),
    }
    there = [path for path in texts if os.path.lexists(path)]
    if there and not force:
        raise KeyFileError(f"{there[0]} is there already: choose another --name, or overwrite it with --force")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, (text, mode) in texts.items():
            _write(path, text, mode, force=force)
    except OSError as error:
        raise KeyFileError(f"key files can't be written to {folder}: {error.strerror}") from error
    secret_file, public_file = texts
    return public_file, secret_file


def _text(public: bytes, secret: bytes | None = None) -> bytes:
    kind = "secret key: keep it to yourself" if secret else "public key: may be handed out"
    lines = [f"# fusewire, CURVE {kind}", "", "metadata", "curve", f'    public-key = "{public.decode()}"']
    lines += [f'    secret-key = "{secret.decode()}"'] if secret else []
    return ("\n".join(lines) + "\n").encode()


def _write(path: Path, text: bytes, mode: int, *, force: bool) -> None:
    """Make a file as a whole: nobody sees half of one, and an old one is there until the new one is."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode & 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if force:
            draft.replace(path)
        else:
            os.link(draft, path)  # fails where a rename would overwrite
    finally:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()


def _read(path: Path) -> tuple[bytes, int]:
    """Return a key file's content and its permission bits; no link is followed, and no pipe waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise KeyFileError(f"key file {path}: is not a regular file; put the file itself there")
            content = os.read(descriptor, FILE_LIMIT + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        link = os.path.islink(path)  # noqa: PTH114 - Path's own raises for some paths
        reason = "is a link, which is not followed; put the file itself there" if link else error.strerror
        raise KeyFileError(f"key file {path}: {reason}; `fusewire keygen` makes one") from error
    if len(content) > FILE_LIMIT:
        raise KeyFileError(f"key file {path}: is larger than {FILE_LIMIT} bytes; {_FORMAT}")
    return content, stat.S_IMODE(status.st_mode)


def _keys(path: Path, content: bytes) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for match in _LINE.finditer(content):
        kind, key = match[1].decode(), match[2]
        if not _is_key(key):
            raise KeyFileError(f"key file {path}: its {kind} key is not {_KEY_LENGTH} characters of Z85; {_FORMAT}")
        if found.setdefault(kind, key) != key:
            raise KeyFileError(f"key file {path}: has two {kind} keys; {_FORMAT}")
    return found


def _is_key(text: bytes) -> bool:
    try:
        return len(text) == _KEY_LENGTH and bool(z85.decode(text))
    except (KeyError, struct.error):  # a character that is none of Z85's; a number over 32 bits
        return False
