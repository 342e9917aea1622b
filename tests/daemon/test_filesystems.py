"""Kinds of file systems, and a /tmp that nobody else sees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fusewire.daemon.sources import filesystems

MOUNTINFO = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:30 / /srv/data rw - nfs4 server:/data rw
31 22 0:31 / /srv/data/local rw - xfs /dev/sdb1 rw
32 22 8:1 /tmp/systemd-private-1a2b-fusewire.service-x/tmp /tmp rw - ext4 /dev/sda1 rw
33 22 0:33 / /mnt/with\\040space rw - fuse.sshfs host: rw
34 22 0:34 / /mnt/stacked rw - ext4 /dev/sdc1 rw
35 34 0:35 / /mnt/stacked rw - cifs //server/share rw
36 22 0:36 / /mnt/back\\134slash\\134040 rw - lustre mgs:/fs rw
nonsense
"""


@pytest.fixture
def mountinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    fake = tmp_path / "mountinfo"
    fake.write_text(MOUNTINFO)
    monkeypatch.setattr(filesystems, "MOUNTINFO", fake)
    monkeypatch.setattr(filesystems, "MOUNTINFO_OF_INIT", tmp_path / "hidden")
    return fake


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/x", ""),
        ("/srv/data/x", "nfs4"),
        ("/srv/data/local/x", ""),
        ("/srv/database", ""),
        ("/mnt/with space/x", "fuse.sshfs"),
        ("/mnt/stacked/x", "cifs"),
        ("/mnt/back\\slash\\040/x", "lustre"),
    ],
)
@pytest.mark.usefixtures("mountinfo")
def test_only_local_kinds_are_trusted(path: str, kind: str) -> None:
    assert filesystems.needs_polling(Path(path)) == kind


def test_what_is_unknown_is_not_trusted(mountinfo: Path) -> None:
    mountinfo.write_text("")
    assert filesystems.needs_polling(Path("/var")) == "unknown"
    mountinfo.unlink()
    assert filesystems.needs_polling(Path("/var")) == "unknown"


@pytest.mark.usefixtures("mountinfo")
def test_a_private_tmp_is_recognised() -> None:
    assert filesystems.is_private_tmp(Path("/tmp/shards"))  # noqa: S108 - a name
    assert not filesystems.is_private_tmp(Path("/var/lib/shards"))
    assert not filesystems.is_private_tmp(Path("/tmpx/shards"))  # noqa: S108 - the same


def test_a_disconnected_tmp_is_recognised_in_a_units_own_process(
    mountinfo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, same, own = (
        Path("/var/tmp/shards"),  # noqa: S108 - the same
        "22 1 8:1 / / rw - ext4 d rw\n",
        "40 22 0:40 / /var/tmp rw - tmpfs t rw\n",
    )
    inits = mountinfo.with_name("hidden")
    mountinfo.write_text(same + own)
    monkeypatch.setenv("SYSTEMD_EXEC_PID", str(os.getpid()))
    assert not filesystems.is_private_tmp(path), "init's mounts can't be seen"
    inits.write_text(same)
    assert filesystems.is_private_tmp(path)
    inits.write_text(same + own)
    assert not filesystems.is_private_tmp(path)
    inits.write_text(same)
    monkeypatch.setenv("SYSTEMD_EXEC_PID", str(os.getpid() + 1))
    assert not filesystems.is_private_tmp(path), "a sandboxed shell shares its /tmp with the trainer in it"


def test_the_real_mountinfo_is_understood(tmp_path: Path) -> None:
    mounts = filesystems.parse(filesystems.MOUNTINFO.read_text())
    mount = filesystems.mount_of(tmp_path, mounts)

    assert mount is not None
    major, minor = (int(number) for number in mount.device.split(":"))
    status = tmp_path.stat()
    assert mount.kind == "btrfs" or (major, minor) == (os.major(status.st_dev), os.minor(status.st_dev))
