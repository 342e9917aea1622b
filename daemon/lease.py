"""Read leases (fcntl F_SETLEASE): the kernel's word that nobody is writing a file, and a warning before anybody may.

While a read lease is held, every open for writing and every truncate of the file waits until it is given up, at
most /proc/sys/fs/lease-break-time seconds. The break is announced by a signal whose default action kills the
process; here nobody needs the signal: the lease itself is asked (F_GETLEASE).
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import signal


class Lease(enum.Enum):
    """What came of asking for a lease."""

    HELD = "held"
    WRITER = "writer"
    """Somebody has the file open for writing."""
    NONE = "none"
    """Not to be had: another owner without CAP_LEASE, a file system without leases, or a break would kill us."""


def install_lease_signal_handling() -> None:
    """Ignore the signal that announces a break. Call once, from the main thread, before taking leases."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)


def take(descriptor: int) -> Lease:
    """Ask for a read lease on an open file; never while the signal of a break still has its deadly default."""
    if signal.getsignal(signal.SIGIO) is signal.SIG_DFL:
        return Lease.NONE
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return Lease.WRITER if error.errno == errno.EAGAIN else Lease.NONE
    return Lease.HELD


def holds(descriptor: int) -> bool:
    """Whether the lease is held and nobody waits for it to be given up.

    While a break is pending, F_GETLEASE tells what the lease is being broken to (F_UNLCK for a writer).
    """
    return fcntl.fcntl(descriptor, fcntl.F_GETLEASE) == fcntl.F_RDLCK


def give_up(descriptor: int) -> None:
    """Give a lease back, so that whoever waits for it may go on.

    Closing the file does it as well, but only once no process that was forked meanwhile shares it. A lease that the
    kernel has taken away already is no error.
    """
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
