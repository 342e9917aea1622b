"""The drop folder, with real files and the writers that trainers really use."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save, save_file
from watchdog.events import DirCreatedEvent, FileClosedEvent, FileMovedEvent
from watchdog.observers.inotify_c import InotifyConstants, InotifyEvent, InotifyFD, WatchDescriptor

from fusewire.daemon import logs
from fusewire.daemon.errors import StartError
from fusewire.daemon.payload import Identity
from fusewire.daemon.settings import Folder
from fusewire.daemon.sources import folder as folder_module
from fusewire.daemon.sources.folder import FolderSource, Handler, PathHint, ScanResult
from fusewire.daemon.sources.scan import FileHint, Found, is_shard_name, look, scan

TIMEOUT = 40.0
SHARD = save({"a": np.ones(3, dtype=np.float32)})
NOBODY = 65534


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Give up root's right to read everything: on this thread, and on those that it starts."""
    if os.geteuid():
        yield
        return
    libc = ctypes.CDLL(None)
    libc.setfsuid(NOBODY)
    try:
        yield
    finally:
        libc.setfsuid(0)


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that everybody may enter, as pytest's own ones are not."""
    with tempfile.TemporaryDirectory(prefix="fusewire-test-") as made:
        path = Path(made)
        path.chmod(0o755)
        yield path
        for below in path.rglob("*"):
            if below.is_dir():
                below.chmod(0o755)


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
        chosen: dict[str, Any] = {"reconcile_interval": 3600.0, "polling": "never"} | settings
        source = FolderSource(Folder(path=str(path), **chosen), heard)
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
    found = scan(root)

    assert list(found.shards)[:3] == [f"step_{n}/{name}.safetensors" for n, name in enumerate("cab")]
    assert list(found.shards)[3] == "link.safetensors", "whoever opens it refuses it"
    assert not found.passed_over


NAMES = st.lists(
    st.sampled_from(["a", "step_1", ".b", "c.safetensors", "d.safetensors.tmp", ".e.safetensors", "x y"]),
    min_size=1,
    max_size=7,
)


@given(st.lists(NAMES, max_size=8))
def test_a_scan_and_the_rule_of_names_agree(paths: list[list[str]]) -> None:
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        for parts in paths:
            path = root.joinpath(*parts)
            with contextlib.suppress(FileExistsError, NotADirectoryError):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
        files = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}

        assert set(scan(root).shards) == {path for path in files if is_shard_name(PurePath(path))}


def test_what_can_not_be_looked_into_is_told(public: Path) -> None:
    (public / "step_1").mkdir()
    (public / "step_1" / "a.safetensors").touch()
    (public / "step_1").chmod(0)
    (public / "a/b/c/d/e").mkdir(parents=True)
    (public / "b.safetensors").touch()
    with as_nobody():
        found = scan(public)

    assert list(found.shards) == ["b.safetensors"]
    assert found.passed_over == {"step_1": "Permission denied", "a/b/c/d/e": "more than 4 levels deep"}
    assert found.is_unknown("step_1/a.safetensors")
    assert not found.is_unknown("step_11/a.safetensors")


def test_files_and_folders_that_vanish_during_a_scan_are_left_out(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (root / name).mkdir()
        (root / name / f"{name}.safetensors").touch()
    scandir = os.scandir

    def racing(path: Path) -> Any:
        if path == root / "b":
            (path / "b.safetensors").unlink()
            path.rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", racing)
    found = scan(root)

    assert list(found.shards) == ["a/a.safetensors"]
    assert not found.passed_over


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


def test_thousands_of_files_at_once_are_all_found(root: Path) -> None:
    names: set[PurePath] = set()

    def sink(letter: PathHint | ScanResult) -> None:
        names.update([hint.relative for hint in letter.hints] if isinstance(letter, ScanResult) else [letter.relative])

    source = FolderSource(Folder(path=str(root), reconcile_interval=1.0, polling="never"), sink)
    source.start()
    try:
        for number in range(10_000):
            (root / f"{number}.safetensors").touch()
        wait(lambda: len(names) == 10_000, lambda: len(names))
        assert source.health() == "ok"
    finally:
        source.stop()


def count_scans(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    scans: list[Path] = []

    def count(path: Path) -> Found:
        scans.append(path)
        return scan(path)

    monkeypatch.setattr(folder_module, "scan", count)
    return scans


@pytest.mark.parametrize("level", ["info", "error"])
def test_a_full_kernel_queue_leads_to_a_scan(level: str, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Watchdog tells of it by a warning, which must reach us also when the log is to hold errors only."""
    logger, root_logger = logging.getLogger("watchdog"), logging.getLogger()
    before, root_before = logger.level, root_logger.level
    scans = count_scans(monkeypatch)
    source, _ = start()
    wait(lambda: len(scans) == 1)
    assert source._watching is not None
    reader = source._watching._observer._inotify_fd  # type: ignore[union-attr]
    try:
        logs.set_level(level)
        reader.handle_event(InotifyEvent(WatchDescriptor(-1), InotifyConstants.IN_Q_OVERFLOW, 0, b""))
        wait(lambda: len(scans) > 1)
    finally:
        logger.setLevel(before)
        root_logger.setLevel(root_before)


def test_nothing_listens_to_watchdogs_log_after_the_end(start: Start) -> None:
    before = logging.getLogger("watchdog").handlers[:]
    source, _ = start()
    assert logging.getLogger("watchdog").handlers != before
    source.stop()

    assert logging.getLogger("watchdog").handlers == before


# ------------------------------------------------------------------------------------- trouble, recovery


def test_a_handler_passes_on_hints_and_nothing_else(root: Path) -> None:
    heard: list[PurePath] = []
    asked: list[int] = []
    handler = Handler(root, heard.append, lambda: asked.append(1))
    handler.dispatch(FileClosedEvent(str(root / "a.safetensors")))
    handler.dispatch(FileMovedEvent(str(root / ".tmp"), str(root / "b.safetensors")))
    handler.dispatch(FileMovedEvent(str(root / "b.safetensors"), str(root / "b.bak")))
    handler.dispatch(FileClosedEvent(os.fsencode(root / "step_1" / "c.safetensors")))
    handler.dispatch(FileClosedEvent(str(root / "\udcff.safetensors")))
    handler.dispatch(DirCreatedEvent(str(root / "step_1")))

    assert [str(path) for path in heard] == [
        "a.safetensors",
        "b.safetensors",
        "step_1/c.safetensors",
        "\udcff.safetensors",
    ]
    assert asked == [1]


def test_a_receiver_that_fails_does_not_end_the_watching(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in a handler would end watchdog's thread, and nobody would be told."""
    heard: list[PathHint | ScanResult] = []

    def sink(letter: PathHint | ScanResult) -> None:
        heard.append(letter)
        if isinstance(letter, PathHint):
            raise RuntimeError  # noqa: TRY004 - any exception

    scans = count_scans(monkeypatch)
    source = FolderSource(Folder(path=str(root), reconcile_interval=3600, polling="never"), sink)
    source.start()
    try:
        wait(lambda: len(scans) == 1)
        (root / "a.safetensors").write_bytes(SHARD)
        wait(lambda: any(isinstance(letter, ScanResult) for letter in heard), "what the hint was about, a scan finds")
        (root / "b.safetensors").write_bytes(SHARD)
        wait(lambda: PathHint(PurePath("b.safetensors")) in heard)
        assert source.health() == "ok"
    finally:
        source.stop()


@pytest.mark.parametrize("how", ["removed", "renamed"])
def test_a_folder_that_is_replaced_is_watched_anew(how: str, root: Path, start: Start) -> None:
    source, heard = start(reconcile_interval=0.05)
    wait(lambda: source.health() == "ok")
    if how == "removed":
        root.rmdir()
    else:
        root.rename(root.with_name("elsewhere"))
    wait(lambda: "no such folder" in source.health())
    assert source.failure() == "", "a restart would cure nothing"
    root.mkdir()
    wait(lambda: source.health() == "ok")
    (root / "a.safetensors").write_bytes(SHARD)

    wait(lambda: "a.safetensors" in heard.there())


def test_a_folder_that_is_made_again_between_two_scans_is_watched_anew(root: Path, start: Start) -> None:
    """The new one often has the inode of the old one."""
    source, heard = start()
    wait(lambda: source.health() == "ok")
    watching = source._watching
    root.rmdir()
    root.mkdir()
    wait(lambda: source.health() == "ok" and source._watching is not watching)  # no scan is due, health asks for it
    (root / "a.safetensors").write_bytes(SHARD)

    # Asked for its health on and on, as the reactor does: watchdog's shared reader may still have been about to end.
    wait(lambda: source.health() != "" and "a.safetensors" in heard.there())


@pytest.mark.parametrize("which", ["observer", "emitter", "reader"])
def test_a_dead_thread_of_watchdogs_is_told_and_replaced(which: str, root: Path, start: Start) -> None:
    source, heard = start()
    wait(lambda: source.health() == "ok" and source._scanning_since is None)
    watching = source._watching
    assert watching is not None
    observer: Any = watching._observer
    thread = {"observer": observer, "emitter": next(iter(observer.emitters)), "reader": observer._inotify_fd}[which]
    thread.stop()
    thread.join(5)
    assert "set up anew" in source.health()
    wait(lambda: source.health() == "ok")
    assert source._watching is not watching
    (root / "a.safetensors").write_bytes(SHARD)

    # Asked for its health on and on, as the reactor does: watchdog's shared reader may still have been about to end.
    wait(lambda: source.health() != "" and "a.safetensors" in heard.there())


def test_a_watching_that_can_not_be_set_up_is_tried_again(
    root: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, heard = start(reconcile_interval=0.05)
    wait(lambda: source.health() == "ok")

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "no luck")

    with monkeypatch.context() as patch:
        patch.setattr(folder_module, "Watching", broken)
        root.rename(root.with_name("elsewhere"))
        root.mkdir()
        wait(lambda: "no luck" in source.health())
    wait(lambda: source.health() == "ok")
    (root / "a.safetensors").write_bytes(SHARD)

    wait(lambda: PathHint(PurePath("a.safetensors")) in heard.letters)


def test_a_scan_that_hangs_is_told_and_does_not_hold_up_the_stop(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, go_on = threading.Event(), threading.Event()

    def hang(_: Path) -> Found:
        hangs.set()
        assert go_on.wait(TIMEOUT)
        return Found({}, {})

    monkeypatch.setattr(folder_module, "scan", hang)
    monkeypatch.setattr(folder_module, "STALL", 0.05)
    source, _ = start()
    assert hangs.wait(TIMEOUT)
    wait(lambda: "hangs" in source.health())
    begin = time.monotonic()
    source.stop()
    elapsed = time.monotonic() - begin
    go_on.set()
    source._thread.join(TIMEOUT)

    assert elapsed < 2
    assert not source._thread.is_alive()


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


@pytest.mark.parametrize(
    ("number", "limit"), [(errno.EMFILE, "max_user_instances"), (errno.ENOSPC, "max_user_watches")]
)
def test_inotify_limits_lead_to_polling_until_there_is_room(
    number: int, limit: str, root: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "POLL_INTERVAL", 0.05)
    monkeypatch.setattr(folder_module, "RETRY_INTERVAL", 0.5)
    threads = threading.active_count()

    def full(*_: object) -> None:
        raise OSError(number, "limit reached")

    with monkeypatch.context() as patch:
        patch.setattr(InotifyFD, "_create_inotify_fd" if number == errno.EMFILE else "add_callback", full)
        source, heard = start()
        assert limit in source.notes()[0]
        assert threading.active_count() <= threads + 1, "what watchdog had started has ended"
        (root / "a.safetensors").write_bytes(SHARD)
        wait(lambda: "a.safetensors" in heard.there())
        assert source.health() == "ok"
    wait(lambda: source.notes() == ())
    (root / "b.safetensors").write_bytes(SHARD)

    wait(lambda: PathHint(PurePath("b.safetensors")) in heard.letters)


def test_an_unreadable_subfolder_is_told_and_what_was_in_it_is_not_gone(public: Path) -> None:
    heard = Heard()
    heard.root = public
    step = public / "step_1"
    step.mkdir()
    (step / "a.safetensors").write_bytes(SHARD)
    with as_nobody():
        source = FolderSource(Folder(path=str(public), reconcile_interval=0.05, polling="never"), heard)
        source.start()
    try:
        wait(lambda: "step_1/a.safetensors" in heard.there())
        step.chmod(0)
        wait(lambda: "step_1 (Permission denied)" in str(source.notes()), source.notes)
        assert source.health() == "ok"
        (public / "b.safetensors").write_bytes(SHARD)
        wait(
            lambda: (
                FileHint(PurePath("b.safetensors"), look(public, PurePath("b.safetensors")).identity) in heard.hints()
            )
        )
        assert FileHint(PurePath("step_1/a.safetensors"), None) not in [
            hint for letter in heard.letters if isinstance(letter, ScanResult) for hint in letter.hints
        ]
        step.chmod(0o755)
        wait(lambda: source.notes() == (), source.notes)
    finally:
        source.stop()


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


def test_two_looks_in_quick_succession_prove_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FolderSource(Folder(path=str(root), polling="always"), print)
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    first, second = Identity(1, 1, 1, 1, 1), Identity(1, 1, 2, 2, 2)
    assert source._settled({"a": first}) == {}
    assert source._settled({"a": first}) == {}
    now += 1
    assert source._settled({"a": first}) == {"a": first}
    assert source._settled({"a": second}) == {}
    now += 1
    assert source._settled({"a": second, "b": first}) == {"a": second}


def test_where_a_link_leads_decides_on_polling(
    root: Path, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, remote = tmp_path / "link", tmp_path / "remote"
    link.symlink_to(root)
    remote.mkdir()
    monkeypatch.setattr(folder_module, "POLL_INTERVAL", 0.05)
    monkeypatch.setattr(folder_module, "needs_polling", lambda path: "nfs4" if path == remote else "")
    source, heard = start(link, polling="auto", reconcile_interval=0.05)
    assert source.notes() == ()
    link.unlink()
    link.symlink_to(remote)
    wait(lambda: "nfs4" in str(source.notes()))
    heard.root = remote
    (remote / "a.safetensors").write_bytes(SHARD)
    wait(lambda: "a.safetensors" in heard.there())

    assert source._watching is None
    assert source.health() == "ok"


# ------------------------------------------------------------------------------------------ bad starts


def test_a_folder_that_can_not_be_used_is_refused(tmp_path: Path) -> None:
    file, loop = tmp_path / "file", tmp_path / "loop"
    file.touch()
    loop.symlink_to(loop)
    for path, why in [
        (tmp_path / "none", "no such folder; create it"),
        (file / "below", "no such folder"),
        (file, "not a folder"),
        (loop, "Too many levels of symbolic links"),
    ]:
        with pytest.raises(StartError, match=why):
            FolderSource(Folder(path=str(path)), print)


@pytest.mark.parametrize("mode", [0o000, 0o444, 0o111])
def test_a_folder_that_may_not_be_read_is_refused(mode: int, public: Path) -> None:
    shards = public / "shards"
    shards.mkdir()
    shards.chmod(mode)
    with as_nobody(), pytest.raises(StartError, match="may not read it; it needs r and x"):
        FolderSource(Folder(path=str(shards)), print)


def test_a_folder_below_one_that_may_not_be_entered_is_refused(public: Path) -> None:
    (public / "closed" / "shards").mkdir(parents=True)
    (public / "closed").chmod(0)
    with as_nobody(), pytest.raises(StartError, match="x on all folders above"):
        FolderSource(Folder(path=str(public / "closed" / "shards")), print)


def test_a_private_tmp_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "is_private_tmp", lambda _: True)
    with pytest.raises(StartError, match="PrivateTmp"):
        FolderSource(Folder(path=str(root)), print)


def test_a_folder_that_can_be_neither_watched_nor_polled_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(folder_module, "Observer", broken)
    source = FolderSource(Folder(path=str(root), polling="never"), print)
    with pytest.raises(StartError, match="can't be watched: Input/output error"):
        source.start()
    source.stop()
