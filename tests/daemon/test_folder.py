"""The drop folder, with real files and the writers that trainers really use."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save, save_file
from watchdog.events import DirCreatedEvent, FileClosedEvent, FileMovedEvent

from fusewire.daemon.errors import StartError
from fusewire.daemon.payload import Identity
from fusewire.daemon.settings import Folder
from fusewire.daemon.sources import filesystems
from fusewire.daemon.sources import folder as folder_module
from fusewire.daemon.sources.folder import FolderSource, PathHint, ScanResult
from fusewire.daemon.sources.scan import FileHint, is_shard_name, look, scan

TIMEOUT = 15.0
SHARD = save({"a": np.ones(3, dtype=np.float32)})


class Heard:
    """What a folder source says, and how the reactor would understand it: relative path -> there or not."""

    def __init__(self) -> None:
        self.letters: list[PathHint | ScanResult] = []
        self.root = Path()

    def __call__(self, letter: PathHint | ScanResult) -> None:
        self.letters.append(letter)

    def hints(self) -> list[FileHint]:
        found: list[FileHint] = []
        for letter in self.letters[:]:
            found += letter.hints if isinstance(letter, ScanResult) else [look(self.root, letter.relative)]
        return found

    def there(self) -> set[str]:
        return {str(hint.relative) for hint in self.hints() if hint.identity is not None}

    def gone(self) -> set[str]:
        return {str(hint.relative) for hint in self.hints() if hint.identity is None}


def wait(condition: Callable[[], bool], what: object = "") -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.01)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "shards"
    made.mkdir()
    return made


Start = Callable[..., tuple[FolderSource, Heard]]


@pytest.fixture
def start(root: Path) -> Iterator[Start]:
    started: list[FolderSource] = []

    def make(path: Path = root, **settings: Any) -> tuple[FolderSource, Heard]:
        heard = Heard()
        settings = {"reconcile_interval": 3600.0} | settings
        source = FolderSource(Folder(path=str(path), **settings), heard)
        heard.root = source.root
        source.start()
        started.append(source)
        return source, heard

    yield make
    for source in started:
        begin = time.monotonic()
        source.stop()
        source.stop()
        assert time.monotonic() - begin < 2


# --------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("model-00001-of-00004.safetensors", True),
        ("step_7/a.safetensors", True),
        ("a/b/c/d/e.safetensors", True),
        ("a/b/c/d/e/f.safetensors", False),
        (".tmpAb3dE", False),
        (".a.safetensors.x8Yq2Z", False),
        (".a.safetensors", False),
        (".~tmp~/a.safetensors", False),
        ("a.safetensors.incomplete", False),
        ("a.safetensors.part", False),
        ("a.safetensors.tmp", False),
        (".nfs000000000123", False),
        ("model.safetensors.index.json", False),
        ("a.SAFETENSORS", False),
        (".", False),
        ("", False),
    ],
)
def test_names(name: str, is_one: bool) -> None:
    assert is_shard_name(PurePath(name)) is is_one


def test_a_scan_finds_all_shards_the_oldest_first(root: Path) -> None:
    for number, name in enumerate(["c", "a", "b"]):
        path = root / f"step_{number}" / f"{name}.safetensors"
        path.parent.mkdir()
        path.write_bytes(SHARD)
        os.utime(path, ns=(0, number * 10**9))
    (root / "step_0" / "notes.txt").touch()
    (root / ".hidden").mkdir()
    (root / ".hidden" / "x.safetensors").touch()
    (root / "link.safetensors").symlink_to("/nowhere")
    found = list(scan(root))

    assert [str(path) for path in found][:3] == [f"step_{n}/{name}.safetensors" for n, name in enumerate("cab")]
    assert str(found[3]) == "link.safetensors", "whoever opens it refuses it"


# ------------------------------------------------------------------------------------------- writers


def write_in_place(path: Path) -> None:
    path.write_bytes(SHARD)


def write_with_safetensors(path: Path) -> None:
    save_file({"a": np.ones(3, dtype=np.float32)}, path)


def rename_within(path: Path) -> None:
    temporary = path.with_name(".a.tmp")
    temporary.write_bytes(SHARD)
    temporary.rename(path)


def move_in(path: Path) -> None:
    outside = path.parents[1] / "outside"
    outside.write_bytes(SHARD)
    outside.rename(path)


def hard_link(path: Path) -> None:
    outside = path.parents[1] / "outside"
    outside.write_bytes(SHARD)
    os.link(outside, path)


def new_folder(path: Path) -> None:
    (path.parent / "step_3").mkdir()
    (path.parent / "step_3" / path.name).write_bytes(SHARD)


def folder_renamed_within(path: Path) -> None:
    aside = path.parent / ".aside"
    aside.mkdir()
    (aside / path.name).write_bytes(SHARD)
    aside.rename(path.parent / "step_3")


def folder_moved_in(path: Path) -> None:
    outside = path.parents[1] / "outside"
    outside.mkdir()
    (outside / path.name).write_bytes(SHARD)
    outside.rename(path.parent / "step_3")


WRITERS = [
    write_in_place,
    write_with_safetensors,
    rename_within,
    move_in,
    hard_link,
    new_folder,
    folder_renamed_within,
    folder_moved_in,
]


@pytest.mark.parametrize("write", WRITERS)
def test_every_way_of_writing_is_heard(write: Callable[[Path], None], root: Path, start: Start) -> None:
    """No periodic scan helps here: it comes once an hour."""
    source, heard = start()
    wait(lambda: source.health() == "ok")
    write(root / "a.safetensors")
    name = "step_3/a.safetensors" if "folder" in write.__name__ else "a.safetensors"

    wait(lambda: name in heard.there(), heard.letters)
    assert heard.there() == {name}, "no temporary name is ever hinted at"


def test_what_is_there_before_the_start_is_found(root: Path, start: Start) -> None:
    (root / "a.safetensors").write_bytes(SHARD)
    _, heard = start()

    wait(lambda: heard.there() == {"a.safetensors"})


def test_a_scan_tells_only_what_changed(root: Path, start: Start) -> None:
    path = root / "a.safetensors"
    path.write_bytes(SHARD)
    _, heard = start(reconcile_interval=0.05)
    wait(lambda: bool(heard.letters))
    time.sleep(0.3)
    assert [len(letter.hints) for letter in heard.letters if isinstance(letter, ScanResult)] == [1]
    path.chmod(0o600)
    wait(lambda: len(heard.letters) == 2)
    path.unlink()
    wait(lambda: heard.gone() >= {"a.safetensors"})


def test_thousands_of_files_at_once_are_all_found(root: Path, start: Start) -> None:
    _, heard = start(reconcile_interval=1.0)
    for number in range(10_000):
        (root / f"{number}.safetensors").touch()

    wait(lambda: len({letter.relative for letter in _hints(heard)}) == 10_000, lambda: len(_hints(heard)))


def _hints(heard: Heard) -> list[FileHint | PathHint]:
    found: list[FileHint | PathHint] = []
    for letter in heard.letters[:]:
        found += letter.hints if isinstance(letter, ScanResult) else [letter]
    return found


def test_whatever_watchdog_warns_of_leads_to_a_scan(root: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full kernel queue is told by a warning in watchdog's log, and in no other way."""
    scans: list[Path] = []

    def count(path: Path) -> dict[PurePath, Identity]:
        scans.append(path)
        return {}

    monkeypatch.setattr(folder_module, "scan", count)
    start()
    wait(lambda: len(scans) == 1)
    logging.getLogger("watchdog.observers.inotify_c").warning("any text at all")

    wait(lambda: len(scans) == 2)
    assert root in scans


# ------------------------------------------------------------------------------------- trouble, recovery


def test_a_handler_passes_on_hints_and_nothing_else(root: Path) -> None:
    heard: list[PathHint | ScanResult] = []
    asked: list[int] = []
    handler = folder_module._Handler(root, heard.append, lambda: asked.append(1))
    handler.dispatch(FileClosedEvent(str(root / "a.safetensors")))
    handler.dispatch(FileMovedEvent(str(root / ".tmp"), str(root / "b.safetensors")))
    handler.dispatch(FileMovedEvent(str(root / "b.safetensors"), str(root / "b.bak")))
    handler.dispatch(DirCreatedEvent(str(root / "step_1")))

    assert heard == [PathHint(PurePath("a.safetensors")), PathHint(PurePath("b.safetensors"))]
    assert asked == [1]


@pytest.mark.parametrize("how", ["removed", "renamed"])
def test_a_folder_that_is_replaced_is_watched_anew(how: str, root: Path, start: Start) -> None:
    source, heard = start(reconcile_interval=0.05)
    wait(lambda: source.health() == "ok")
    if how == "removed":
        root.rmdir()
    else:
        root.rename(root.with_name("elsewhere"))
    wait(lambda: "no such folder" in source.health())
    root.mkdir()
    wait(lambda: source.health() == "ok")
    (root / "a.safetensors").write_bytes(SHARD)

    wait(lambda: "a.safetensors" in heard.there())


def test_dead_threads_of_watchdog_are_replaced(root: Path, start: Start) -> None:
    source, heard = start(reconcile_interval=0.1)
    observer = source._observer
    assert observer is not None
    for emitter in list(observer.emitters):
        emitter.stop()
        emitter.join(5)
    wait(lambda: source._observer is not observer)
    source._interval = 3600.0  # from now on the watching alone can tell
    (root / "a.safetensors").write_bytes(SHARD)

    wait(lambda: "a.safetensors" in heard.there())


def test_a_scan_thread_that_has_died_is_told(root: Path, start: Start) -> None:
    source, _ = start()
    assert root.is_dir()
    wait(lambda: source.health() == "ok")
    dead = threading.Thread(target=lambda: None)
    dead.start()
    dead.join()
    source._thread = dead

    assert "has ended" in source.health()


def test_a_root_that_is_a_link_is_followed_and_watched(root: Path, start: Start, tmp_path: Path) -> None:
    link, other = tmp_path / "link", tmp_path / "other"
    link.symlink_to(root)
    other.mkdir()
    source, heard = start(link, reconcile_interval=0.1)
    (root / "a.safetensors").write_bytes(SHARD)
    wait(lambda: "a.safetensors" in heard.there())
    link.unlink()
    link.symlink_to(other)
    wait(lambda: source.root == other)
    heard.root = other
    (other / "b.safetensors").write_bytes(SHARD)

    wait(lambda: "b.safetensors" in heard.there())


def test_inotify_limits_lead_to_polling(root: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def schedule(self, *_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder_module, "Observer", Full)
    monkeypatch.setattr(folder_module, "POLL_INTERVAL", 0.05)
    source, heard = start()
    (root / "a.safetensors").write_bytes(SHARD)

    wait(lambda: "a.safetensors" in heard.there())
    assert "fs.inotify.max_user_watches" in source.notes()[0]


def test_polling_waits_until_a_file_looks_the_same_twice(
    root: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "POLL_INTERVAL", 0.1)
    source, heard = start(polling="always")
    path = root / "a.safetensors"
    end = time.monotonic() + 1
    with path.open("wb") as file:
        while time.monotonic() < end:
            file.write(b"x")
            file.flush()
            time.sleep(0.01)
            assert not heard.letters
    wait(lambda: "a.safetensors" in heard.there())
    assert "polling" in source.notes()[0]


# ------------------------------------------------------------------------------------------ bad starts


def test_a_folder_that_can_not_be_used_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (tmp_path / "none", file):
        with pytest.raises(StartError, match="no such folder"):
            FolderSource(Folder(path=str(path)), print)


def test_a_folder_that_may_not_be_read_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may read everything
    with pytest.raises(StartError, match="may not read"):
        FolderSource(Folder(path=str(root)), print)


def test_a_private_tmp_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "is_private_tmp", lambda _: True)
    with pytest.raises(StartError, match="PrivateTmp"):
        FolderSource(Folder(path=str(root)), print)


# ---------------------------------------------------------------------------------------- file systems

MOUNTINFO = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:30 / /srv/data rw - nfs4 server:/data rw
31 22 0:31 / /srv/data/local rw - xfs /dev/sdb1 rw
32 22 8:1 /tmp/systemd-private-1a2b-fusewire.service-x/tmp /tmp rw - ext4 /dev/sda1 rw
33 22 0:33 / /mnt/with\\040space rw - fuse.sshfs host: rw
nonsense
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/x", "ext4"),
        ("/srv/data/x", "nfs4"),
        ("/srv/data/local/x", "xfs"),
        ("/srv/database", "ext4"),
        ("/mnt/with space/x", "fuse.sshfs"),
    ],
)
def test_the_kind_of_a_file_system(path: str, kind: str) -> None:
    mount = filesystems.mount_of(Path(path), filesystems.parse(MOUNTINFO))

    assert mount is not None
    assert mount.kind == kind


def test_only_local_ones_are_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "mountinfo"
    fake.write_text(MOUNTINFO)
    monkeypatch.setattr(filesystems, "MOUNTINFO", fake)

    assert filesystems.needs_polling(Path("/var")) == ""
    assert filesystems.needs_polling(Path("/srv/data/x")) == "nfs4"
    fake.write_text("")
    assert filesystems.needs_polling(Path("/var")) == "unknown"


def test_a_private_tmp_is_recognised() -> None:
    mounts = filesystems.parse(MOUNTINFO)

    assert filesystems.is_private_tmp(Path("/tmp/shards"), mounts)  # noqa: S108 - a name
    assert not filesystems.is_private_tmp(Path("/var/lib/shards"), mounts)


def test_the_real_mountinfo_is_understood(tmp_path: Path) -> None:
    assert filesystems.parse(filesystems.MOUNTINFO.read_text())
    assert filesystems.mount_of(tmp_path, filesystems.parse(filesystems.MOUNTINFO.read_text())) is not None
    shutil.rmtree(tmp_path)
