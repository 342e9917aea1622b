"""What systemd is told (sd_notify(3)): datagrams to the socket that it names. Never raises, never waits."""

from __future__ import annotations

import contextlib
import os
import socket
import time

from .errors import printable


def send(*assignments: str) -> bool:
    """Send assignments such as ``READY=1`` in one datagram; return whether somebody took it."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):  # the abstract namespace
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)  # noqa: FBT003 - the socket module's own signature
        sender.sendto("\n".join(assignments).encode(errors="replace"), address)
        return True
    return False


def ready(text: str) -> None:
    """The service is up, or has finished reloading."""
    send("READY=1", f"STATUS={printable(text)}")


def status(text: str) -> None:
    """One line for `systemctl status`."""
    send(f"STATUS={printable(text)}")


def reloading() -> None:
    """A reload begins; `ready` ends it."""
    send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")


def stopping() -> None:
    """The service is shutting down."""
    send("STOPPING=1", "STATUS=stopping")


def watchdog() -> None:
    """All is well."""
    send("WATCHDOG=1")


def extend_timeout(seconds: float) -> None:
    """Ask for so many more seconds from now to start."""
    send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")


def watchdog_interval() -> float | None:
    """Return within how many seconds `watchdog` has to be called again and again; None if nobody waits for it."""
    usec, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not usec.isdecimal() or int(usec) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 1e6
