"""Who may speak over TCP: CURVE on the bound sockets, and the handler that ZeroMQ asks about each new peer (ZAP).

CURVE alone admits whoever knows the server's public key; that a peer's own key is asked about is this handler's doing.
It is bound before any socket is, and the sockets refuse everybody where there is no handler, so that there is no moment
at which strangers get in. Each socket is a domain with folders of keys of its own. ipc sockets are not touched: their
file mode decides.

The reactor's thread only: the handler is a socket in its poller, and so as alive as the reactor is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import structlog
import zmq
from zmq.utils import z85

from . import keys
from .errors import KeyFileError, StartError, printable
from .settings import Curve

log = structlog.get_logger()

Role: TypeAlias = Literal["trainers", "operators", "subscribers"]
Domain: TypeAlias = Literal["ingest", "control", "events"]

DOMAINS: dict[Domain, tuple[Role, ...]] = {
    "ingest": ("trainers",),
    "control": ("operators", "subscribers"),  # a subscriber asks for snapshots; `control` refuses it the rest
    "events": ("subscribers", "operators"),
}
"""Socket -> whose keys it accepts. Operators don't push: who does both has its key in both folders."""
CREDENTIAL = "fusewire.key"
"""Name of systemd's credential that is used when ``curve.secret_key`` is empty."""
LOG_INTERVAL = 5.0
"""Seconds between two log lines about refusals at one socket."""
BATCH = 64
"""Requests of ZeroMQ's that are answered in one go."""
ENDPOINT = "inproc://zeromq.zap.01"
"""Where ZeroMQ asks, by its RFC 27."""
_VERSION = b"1.0"
_FRAMES = 7
"""Of a request with one credential: version, id, domain, address, identity, mechanism, key."""


class Refused(NamedTuple):
    """The last refusal at a socket."""

    address: str
    key: str
    at: float


@dataclass(slots=True)
class Door:
    """One socket's part of the guard."""

    guard: Guard
    domain: Domain
    secured: bool = False
    """Whether the socket speaks CURVE: over TCP it does, over ipc the file's mode decides."""

    def secure(self, socket: zmq.Socket[bytes], setting: str) -> None:
        """Make a socket that will be bound to TCP speak CURVE.

        Raises:
            StartError: No folder of keys is set, so that nobody could connect.
        """
        roles = DOMAINS[self.domain]
        if not any(self.guard.folders[role] for role in roles):
            wanted = " or ".join(f"curve.{role}" for role in roles)
            raise StartError(
                f"{setting} is on TCP with CURVE, and nobody could connect: set {wanted}, a folder of keys"
            )
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no handler, no entry
        socket.zap_domain = self.domain.encode()
        socket.curve_publickey = self.guard.pair.public
        socket.curve_secretkey = self.guard.pair.secret
        socket.curve_server = True
        self.secured = True

    def admits(self, key: str) -> bool:
        """Whether a peer whose key this is may speak here, as of now: it may have been admitted and then revoked."""
        return bool(self.guard.roles(key) & set(DOMAINS[self.domain]))

    def refuse(self, key: str) -> None:
        """Take note of a message from a peer whose key has been revoked."""
        self.guard.note_refusal(self.domain, "its connection", key)

    def is_operator(self, key: str) -> bool:
        """Whether a peer may order as well as ask; where keys don't decide, the socket's mode has."""
        return not self.secured or "operators" in self.guard.roles(key)


class Guard:
    """The keys that are accepted, and the handler that ZeroMQ asks.

    Args:
        context: Of the sockets that are guarded; to be made before any of them is bound.
        pair: The daemon's own keys.
        settings: Which folders hold the others'.
        on_refused: Called with the domain at each refusal.

    Raises:
        StartError: A folder or a file in it can't be used, or this libzmq has no CURVE.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        pair: keys.Pair,
        settings: Curve,
        on_refused: Callable[[Domain], None] = lambda _: None,
    ) -> None:
        if not zmq.has("curve"):
            raise StartError("curve: this libzmq was built without CURVE; pyzmq's own wheels have it")
        self.pair = pair
        self.folders: dict[Role, str] = {
            "trainers": settings.trainers,
            "operators": settings.operators,
            "subscribers": settings.subscribers,
        }
        self.names: dict[Role, dict[str, str]] = {}
        """Role -> key in Z85 -> name of its file."""
        for role, complaints in self._read().items():
            if complaints:
                raise StartError(f"curve.{role}: {complaints[0]}")
        self.refused: dict[Domain, int] = dict.fromkeys(DOMAINS, 0)
        self.last: dict[Domain, Refused] = {}
        self._logged: dict[Domain, float] = {}
        self._on_refused = on_refused
        self._failure = ""
        self._complaints: tuple[str, ...] = ()
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ENDPOINT)

    def door(self, domain: Domain) -> Door:
        """Return what the socket of this domain needs."""
        return Door(self, domain)

    def roles(self, key: str) -> set[Role]:
        """Return what the owner of a key may be, as of now."""
        return {role for role, names in self.names.items() if key in names}

    def reload(self) -> None:
        """Read the folders again. A file that can't be used is left out; a folder that can't keeps its old keys."""
        before = {role: set(names) for role, names in self.names.items()}
        complaints = self._read()
        self._complaints = tuple(f"curve.{role}: {told}" for role, all_of in complaints.items() for told in all_of)
        for told in self._complaints:
            log.error("keys.unusable", reason=told)
        log.info(
            "keys.reloaded",
            accepted={role: len(names) for role, names in self.names.items()},
            added=sorted(names[key] for role, names in self.names.items() for key in set(names) - before[role]),
            revoked=sum(len(before[role] - set(names)) for role, names in self.names.items()),
        )

    def answer(self) -> None:
        """Answer what ZeroMQ has asked, at most BATCH of it, without waiting."""
        for _ in range(BATCH):
            try:
                request = self.socket.recv_multipart(zmq.DONTWAIT)
                self.socket.send_multipart(self._judge(request), zmq.DONTWAIT)
            except zmq.Again:
                return
            except zmq.ZMQError as error:  # then nobody new gets in: the watchdog may have us restarted
                self._failure = f"the handler of ZeroMQ's questions failed: {error}"
                log.error("keys.handler_failed", reason=str(error))  # noqa: TRY400 - a traceback would add nothing
                return

    def note_refusal(self, domain: Domain, address: str, key: str) -> None:
        """Count a refusal, and log it, though not each of a flood."""
        now = time.monotonic()
        self.refused[domain] += 1
        self.last[domain] = Refused(address, key, now)
        self._on_refused(domain)
        if now - self._logged.get(domain, -LOG_INTERVAL) >= LOG_INTERVAL:
            self._logged[domain] = now
            remedy = " or ".join(f"curve.{role}" for role in DOMAINS[domain])
            log.warning(
                "peer.refused",
                socket=domain,
                address=address,
                key=key,
                refused=self.refused[domain],
                remedy=f"put its public key into {remedy} and reload, if it should be let in",
            )

    def health(self) -> str:
        """Return ``ok``, or why nobody new can connect."""
        return self._failure or "ok"

    def notes(self) -> tuple[str, ...]:
        """Return what an operator should know."""
        told = [
            f"{count} connections or messages were refused at the {domain} socket, the last from "
            f"{self.last[domain].address} with the key {self.last[domain].key}"
            for domain, count in self.refused.items()
            if count
        ]
        empty = [f"curve.{role} holds no key" for role, names in self.names.items() if self.folders[role] and not names]
        return (*self._complaints, *empty, *told)

    def close(self) -> None:
        """Close the handler; the sockets that it guards have to be closed."""
        self.socket.close()

    def _read(self) -> dict[Role, list[str]]:
        """Read all folders; return what is wrong with them."""
        complaints: dict[Role, list[str]] = {role: [] for role in self.folders}
        for role, folder in self.folders.items():
            self.names.setdefault(role, {})
            if folder:
                try:
                    found, wrong = keys.read_folder(Path(folder))
                except KeyFileError as error:
                    complaints[role].append(str(error))
                    continue
                self.names[role] = {key.decode("ascii"): name for key, name in found.items()}
                complaints[role] += map(str, wrong)
        return complaints

    def _judge(self, request: list[bytes]) -> list[bytes]:
        """Return the reply to one question: RFC 27. Whatever is not a known key at a known door is refused."""
        ident = request[1] if len(request) > 1 else b""
        if len(request) != _FRAMES or request[0] != _VERSION or request[5] != b"CURVE":
            return [_VERSION, ident, b"400", b"CURVE is wanted", b"", b""]
        domain = next((one for one in DOMAINS if one.encode() == request[2]), None)
        if domain is None or len(request[6]) != 32:  # noqa: PLR2004 - bytes of a key
            return [_VERSION, ident, b"400", b"unknown domain", b"", b""]
        key = z85.encode(request[6]).decode("ascii")
        if self.roles(key) & set(DOMAINS[domain]):
            return [_VERSION, ident, b"200", b"OK", key.encode(), b""]
        self.note_refusal(domain, printable(request[3].decode("utf-8", "replace"), 60), key)
        return [_VERSION, ident, b"400", b"unknown key", b"", b""]


def guard_of(
    settings: Curve,
    environment: Mapping[str, str],
    context: zmq.Context[zmq.Socket[bytes]],
    on_refused: Callable[[Domain], None] = lambda _: None,
) -> Guard | None:
    """Make the guard that the settings, or systemd's credentials, ask for; None if neither names a secret key.

    Raises:
        StartError: A key file or folder can't be used; the message names it, the reason and the remedy.
    """
    credentials = environment.get("CREDENTIALS_DIRECTORY", "")
    handed = Path(credentials) / CREDENTIAL if credentials else None
    path = Path(settings.secret_key) if settings.secret_key else handed
    if path is None or (path is handed and not path.exists()):
        return None
    # systemd gives a service's user access by an ACL, which shows as the group's bits; the folder is the service's own.
    forbidden = 0o007 if credentials and path.parent == Path(credentials) else keys.PRIVATE
    try:
        pair = keys.read_pair(path, forbidden=forbidden)
    except KeyFileError as error:
        source = "curve.secret_key" if settings.secret_key else f"systemd's credential {CREDENTIAL}"
        raise StartError(f"{source}: {error}") from error
    return Guard(context, pair, settings, on_refused)
