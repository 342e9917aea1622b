"""What kind of file system a folder lies on, and who else sees it, from mountinfo (proc_pid_mountinfo(5))."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import NamedTuple

MOUNTINFO = Path("/proc/self/mountinfo")
MOUNTINFO_OF_INIT = Path("/proc/1/mountinfo")
LOCAL = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "tmpfs", "ramfs", "zfs", "bcachefs", "vfat", "exfat"}
)
"""File systems on which inotify hears of every writer. On all others one may write from another host, unheard."""
TEMPORARY = (PurePosixPath("/tmp"), PurePosixPath("/var/tmp"))  # noqa: S108 - the folders that PrivateTmp= replaces
_ESCAPES = {"\\040": " ", "\\011": "\t", "\\012": "\n", "\\134": "\\"}


class Mount(NamedTuple):
    """One mounted file system."""

    point: PurePosixPath
    root: str
    """Which folder of the file system is mounted here."""
    kind: str
    """Such as ``ext4``, ``nfs4``, ``fuse.sshfs``."""
    device: str
    """Major and minor number, such as ``8:1``."""


def parse(mountinfo: str) -> list[Mount]:
    """Read the lines of mountinfo; lines that make no sense are passed over."""
    mounts = []
    for line in mountinfo.splitlines():
        before, dash, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if dash and len(fields) >= 5 and rest:  # noqa: PLR2004 - id, parent, device, root, mount point
            mounts.append(Mount(PurePosixPath(_unescape(fields[4])), _unescape(fields[3]), rest[0], fields[2]))
    return mounts


def mount_of(path: Path, mounts: list[Mount]) -> Mount | None:
    """Return the mount that a path without links lies on; of several at one point, the last."""
    best = None
    for mount in mounts:
        if PurePosixPath(path).is_relative_to(mount.point) and (
            best is None or len(mount.point.parts) >= len(best.point.parts)
        ):
            best = mount
    return best


def needs_polling(path: Path) -> str:
    """Return the kind of a file system on which inotify can't be relied upon; empty for a local one."""
    mount = mount_of(path, _read(MOUNTINFO))
    return "" if mount is not None and mount.kind in LOCAL else (mount.kind if mount else "unknown")


def kind_of(path: Path) -> str:
    """Return the kind of the file system that a path lies on; ``unknown`` if nobody knows."""
    mount = mount_of(path, _read(MOUNTINFO))
    return mount.kind if mount is not None else "unknown"


def is_private_tmp(path: Path) -> bool:
    """Whether a path lies in a /tmp that systemd made for this service alone (PrivateTmp=).

    ``PrivateTmp=yes`` mounts a folder of a telling name. ``disconnected`` mounts an empty tmpfs, which differs from
    what init sees there; that says something only of a unit's own process, since others (a sandboxed shell and all
    that runs in it) may share their /tmp with the trainer.
    """
    if not any(PurePosixPath(path).is_relative_to(folder) for folder in TEMPORARY):
        return False
    ours = mount_of(path, _read(MOUNTINFO))
    if ours is None:
        return False
    if "systemd-private-" in ours.root:
        return True
    if os.environ.get("SYSTEMD_EXEC_PID") != str(os.getpid()):
        return False
    inits = mount_of(path, _read(MOUNTINFO_OF_INIT))
    return inits is not None and (inits.device, inits.root) != (ours.device, ours.root)


def _read(mountinfo: Path) -> list[Mount]:
    """Read a table of mounts; none if it can't be read (ProtectProc= hides that of init)."""
    try:
        return parse(mountinfo.read_text(errors="surrogateescape"))
    except OSError:
        return []


def _unescape(text: str) -> str:
    for escape, char in _ESCAPES.items():
        text = text.replace(escape, char)
    return text
