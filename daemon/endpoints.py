"""ZeroMQ endpoints: creating, binding and closing sockets the same careful way everywhere.

What is decided here: no socket lingers longer than a stop may take, every connection has heartbeats, ipc
sockets get their mode after binding (they follow the umask otherwise), nobody's live socket is taken over,
and TCP is bound beyond loopback only where keys decide who may connect.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from pathlib import Path

import zmq

from .curve import Door
from .errors import StartError

LINGER_MS = 500
"""How long unsent messages may keep a closing socket: far below the service's TimeoutStopSec."""
HEARTBEAT_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 15_000
_IPC = "ipc://"
_IPC_PATH_LIMIT = 107
"""sun_path of unix(7), less the terminating zero."""


def create(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """Create a socket with our lingers and heartbeats."""
    new = context.socket(kind)
    new.linger = LINGER_MS
    new.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    new.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    return new


def bind(new: zmq.Socket[bytes], endpoint: str, *, mode: int, setting: str, door: Door | None = None) -> str:
    """Bind a socket; return the endpoint with wildcards resolved. A socket that can't be bound is closed.

    Args:
        new: Any socket.
        endpoint: ``ipc://PATH`` or ``tcp://ADDRESS:PORT``.
        mode: Permission bits of an ipc socket.
        setting: Name of the setting that the endpoint comes from, for messages.
        door: Which keys are accepted over TCP; None: no CURVE, and no TCP but on loopback.

    Raises:
        StartError: The endpoint is in use, malformed, open to strangers, or its folder is missing or not writable.
    """
    path = ipc_path(endpoint)
    try:
        _check_scheme(endpoint, setting)
        if path is not None:
            _check_ipc(path, setting)
        elif door is not None:
            door.secure(new, setting)
        else:
            _refuse_strangers(endpoint, setting)
        new.bind(endpoint)
    except zmq.ZMQError as error:
        new.close()
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise StartError(
            f"{setting} = {endpoint}: {reason}. Is another fusewire running? Choose another endpoint, "
            "or stop the program that holds it."
        ) from error
    except StartError:
        new.close()
        raise
    if path is not None:
        path.chmod(mode)
    return str(new.getsockopt_string(zmq.LAST_ENDPOINT))


def ipc_path(endpoint: str) -> Path | None:
    """Return the path of an ipc endpoint; None for other transports."""
    return Path(endpoint.removeprefix(_IPC)) if endpoint.startswith(_IPC) else None


def _check_scheme(endpoint: str, setting: str) -> None:
    scheme, _, address = endpoint.partition("://")
    if scheme not in {"ipc", "tcp"} or not address:
        raise StartError(f"{setting} = {endpoint}: use ipc://PATH, or tcp://ADDRESS:PORT")


def _refuse_strangers(endpoint: str, setting: str) -> None:
    """Refuse to be reached from other hosts where no keys are asked for."""
    host = endpoint.partition("://")[2].rpartition(":")[0].strip("[]")
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise StartError(
            f"{setting} = {endpoint}: {host or 'no host'} is not a loopback address, and nothing "
            "authenticates whoever connects over TCP. Bind 127.0.0.1 or an ipc:// path, or set curve.secret_key and "
            "the folders curve.trainers, curve.operators and curve.subscribers (docs/keys.md)"
        )


def _check_ipc(path: Path, setting: str) -> None:
    """Refuse what zmq would pass over in silence: it replaces an existing socket, dead or alive."""
    if len(os.fsencode(path)) > _IPC_PATH_LIMIT:
        raise StartError(f"{setting}: {path} is longer than the {_IPC_PATH_LIMIT} bytes a socket path may have")
    if not path.parent.is_dir():
        raise StartError(f"{setting}: the folder {path.parent} does not exist; create it, or change the setting")
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise StartError(f"{setting}: {path}: {error.strerror}") from error
    if not stat.S_ISSOCK(kind):
        raise StartError(f"{setting}: {path} exists and is not a socket; remove it, or change the setting")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return  # nobody listens: left behind by a process that was killed
    raise StartError(
        f"{setting}: {path}: address in use. Another fusewire (or another program) is listening there; "
        "stop it, or choose another endpoint."
    )
