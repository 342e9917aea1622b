"""What kind of file system a folder lies on, from /proc/self/mountinfo (proc_pid_mountinfo(5))."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import NamedTuple

MOUNTINFO = Path("/proc/self/mountinfo")
LOCAL = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "tmpfs", "ramfs", "zfs", "bcachefs", "vfat", "exfat"}
)
"""File systems on which inotify hears of every writer. On all others one may write from another host, unheard."""
_ESCAPES = {"\\040": " ", "\\011": "\t", "\\012": "\n", "\\134": "\\"}


class Mount(NamedTuple):
    """One mounted file system."""

    point: PurePosixPath
    root: str
    """Which folder of the file system is mounted here."""
    kind: str
    """Such as ``ext4``, ``nfs4``, ``fuse.sshfs``."""


def parse(mountinfo: str) -> list[Mount]:
    """Read the lines of mountinfo; lines that make no sense are passed over."""
    mounts = []
    for line in mountinfo.splitlines():
        before, dash, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if dash and len(fields) >= 5 and rest:  # noqa: PLR2004 - id, parent, device, root, mount point
            mounts.append(Mount(PurePosixPath(_unescape(fields[4])), _unescape(fields[3]), rest[0]))
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
    mount = mount_of(path, parse(MOUNTINFO.read_text()))
    return "" if mount is not None and mount.kind in LOCAL else (mount.kind if mount else "unknown")


def is_private_tmp(path: Path, mounts: list[Mount] | None = None) -> bool:
    """Whether a path lies in a /tmp that systemd made for this service alone (PrivateTmp=)."""
    mount = mount_of(path, parse(MOUNTINFO.read_text()) if mounts is None else mounts)
    private = mount is not None and "systemd-private-" in mount.root
    return private and PurePosixPath(path).parts[1:2] in {("tmp",), ("var",)}


def _unescape(text: str) -> str:
    for escape, char in _ESCAPES.items():
        text = text.replace(escape, char)
    return text
