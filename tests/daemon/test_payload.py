"""Opening and reading shard files: leases, writers, and files that change under the reader."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from fusewire.daemon import lease
from fusewire.daemon.errors import Reason, ShardNotReady, ShardRejected
from fusewire.daemon.payload import BytesPayload, Identity, MappedPayload, Payload, ReadPayload, open_file

SHARD = save({"a": np.arange(100_000, dtype=np.uint8).repeat(1), "b": np.ones(17, dtype=np.float32)})
OPTIONS: dict[str, Any] = {"settle": 0.0, "incomplete_after": 5.0, "header_limit": 1 << 20}


@pytest.fixture(scope="module", autouse=True)
def ignore_breaks() -> Iterator[None]:
    before = signal.getsignal(signal.SIGIO)
    lease.install_lease_signal_handling()
    yield
    signal.signal(signal.SIGIO, before)


@pytest.fixture(params=["disk", "tmpfs"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
        return
    shm = Path("/dev/shm")  # noqa: S108 - a tmpfs on every Linux
    if not os.access(shm, os.W_OK):
        pytest.skip("its tmpfs can't be written to")
    made = shm / f"fusewire-test-{os.getpid()}-{time.monotonic_ns()}"
    made.mkdir()
    yield made
    for path in made.iterdir():
        path.unlink()
    made.rmdir()


@pytest.fixture
def path(folder: Path) -> Path:
    made = folder / "a.safetensors"
    made.write_bytes(SHARD)
    return made


def data(payload: Payload) -> bytes:
    target = np.zeros(payload.header.nbytes, dtype=np.uint8)
    payload.read_into(0, target)
    return target.tobytes()


def read_and_verify(payload: Payload) -> None:
    data(payload)
    payload.verify()


DATA = SHARD[8 + int.from_bytes(SHARD[:8], "little") :]


@pytest.mark.parametrize("leases", [True, False])
def test_the_bytes_are_those_of_the_file(path: Path, leases: bool) -> None:
    payload = open_file(path, leases=leases, **OPTIONS)
    piece = np.zeros(50, dtype=np.uint8)
    payload.read_into(100, piece)

    assert type(payload) is (MappedPayload if leases else ReadPayload)
    assert payload.proven is leases
    assert data(payload) == DATA
    assert piece.tobytes() == DATA[100:150]
    payload.verify()
    payload.close()
    payload.close()


def test_bytes_in_memory_are_read_where_they_lie() -> None:
    payload = BytesPayload.parse(SHARD, header_limit=1 << 20)
    assert data(payload) == DATA
    payload.verify()
    payload.close()


def test_a_copy_is_proven(path: Path) -> None:
    source = open_file(path, leases=False, **OPTIONS)
    copy = BytesPayload.copy_of(source)
    source.close()
    path.write_bytes(bytes(len(SHARD)))

    assert copy.proven
    assert data(copy) == DATA


def test_several_threads_may_read(path: Path) -> None:
    payload = open_file(path, leases=True, **OPTIONS)
    targets = [np.zeros(payload.header.nbytes, dtype=np.uint8) for _ in range(4)]
    threads = [threading.Thread(target=payload.read_into, args=(0, target)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    payload.close()

    assert all(target.tobytes() == DATA for target in targets)


def test_nothing_stays_open(path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        for leases in (True, False):
            open_file(path, leases=leases, **OPTIONS).close()
    path.write_bytes(b"x")
    for _ in range(20):
        with pytest.raises(ShardRejected):
            open_file(path, leases=True, **OPTIONS)

    assert len(list(Path("/proc/self/fd").iterdir())) == before


# ------------------------------------------------------------------------------------------ not ready


def test_a_file_with_a_writer_is_not_ready(path: Path) -> None:
    with path.open("r+b"), pytest.raises(ShardNotReady, match="writer"):
        open_file(path, leases=True, **OPTIONS)
    open_file(path, leases=True, **OPTIONS).close()


def test_a_writer_that_holds_only_a_mapping_is_seen(path: Path) -> None:
    with path.open("r+b") as file:
        writable = mmap.mmap(file.fileno(), 0)
    with writable, pytest.raises(ShardNotReady, match="writer"):
        open_file(path, leases=True, **OPTIONS)
    open_file(path, leases=True, **OPTIONS).close()


def test_without_a_lease_a_time_a_little_ahead_has_to_pass(path: Path) -> None:
    """A file server's clock may be ahead of ours; a time in the far future is nobody's clock, and is not waited for."""
    os.utime(path, (0, time.time() + 3))
    with pytest.raises(ShardNotReady, match="rest"):
        open_file(path, leases=False, **OPTIONS)
    os.utime(path, (0, time.time() + 86_400))
    open_file(path, leases=False, **OPTIONS).close()


def test_without_a_lease_a_file_has_to_settle(path: Path) -> None:
    with pytest.raises(ShardNotReady, match="rest"):
        open_file(path, leases=False, **(OPTIONS | {"settle": 60.0}))
    os.utime(path, (0, time.time() - 61))
    open_file(path, leases=False, **(OPTIONS | {"settle": 60.0})).close()


def test_without_a_lease_a_short_file_may_still_grow(path: Path) -> None:
    path.write_bytes(SHARD[:-1])
    with pytest.raises(ShardNotReady, match="not complete"):
        open_file(path, leases=False, **OPTIONS)
    os.utime(path, (0, time.time() - 6))
    with pytest.raises(ShardRejected) as refused:
        open_file(path, leases=False, **OPTIONS)
    assert refused.value.reason is Reason.TRUNCATED


def test_with_a_lease_a_short_file_is_truncated(path: Path) -> None:
    path.write_bytes(SHARD[:-1])
    with pytest.raises(ShardRejected) as refused:
        open_file(path, leases=True, **OPTIONS)
    assert refused.value.reason is Reason.TRUNCATED


@pytest.mark.parametrize("leases", [True, False])
def test_a_file_of_the_right_size_with_a_hole(tmp_path: Path, leases: bool) -> None:
    """A writer that sets the size first leaves a file that parses, and reads as zeros."""
    big = save({"a": np.ones(1 << 20, dtype=np.uint8)})
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        file.write(big[:4096])
        file.truncate(len(big))
    os.utime(path, (0, time.time() - 60))
    with pytest.raises(ShardRejected, match="holes"):
        open_file(path, leases=leases, **OPTIONS)


# -------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("leases", [True, False])
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path, leases: bool) -> None:
    real = tmp_path / "real"
    real.write_bytes(SHARD)
    (tmp_path / "link").symlink_to(real)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    begin = time.monotonic()
    for name in ("link", "fifo", "folder"):
        with pytest.raises(ShardRejected) as refused:
            open_file(tmp_path / name, leases=leases, **OPTIONS)
        assert refused.value.reason is Reason.NOT_A_FILE, name
    with pytest.raises(ShardRejected) as refused:
        open_file(Path("/dev/null"), leases=leases, **OPTIONS)
    assert refused.value.reason is Reason.NOT_A_FILE
    assert time.monotonic() - begin < 1


def test_what_is_gone_is_told(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path / "none" / "none"):
        with pytest.raises(ShardRejected) as refused:
            open_file(path, leases=True, **OPTIONS)
        assert refused.value.reason is Reason.VANISHED


STRANGER = """
import os, sys, time
from pathlib import Path
import numpy as np
from fusewire.daemon import lease
from fusewire.daemon.errors import ShardNotReady, ShardRejected
from fusewire.daemon.payload import open_file
lease.install_lease_signal_handling()
os.chdir(sys.argv[1])
os.chmod("a.safetensors", int(sys.argv[2], 8))
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
waited = ""
while True:
    try:
        payload = open_file(Path("a.safetensors"), leases=True, settle=0.0, incomplete_after=5.0, header_limit=1 << 20)
    except ShardNotReady as unready:
        waited = f"{unready}; "
        time.sleep(0.02)
        continue
    except ShardRejected as refused:
        print(f"{waited}{refused.reason} {refused.detail}")
        sys.exit()
    break
target = np.zeros(payload.header.nbytes, dtype=np.uint8)
payload.read_into(0, target)
payload.verify()
print(type(payload).__name__, payload.proven, target.sum(dtype=np.uint64))
"""


def as_a_stranger(folder: Path, mode: int) -> str:
    """Open the shard in ``folder``, just given this mode, as a user who is not its owner, or at least not root."""
    folder.chmod(0o755)
    command = [sys.executable, "-c", STRANGER, str(folder), f"{mode:o}"]
    run = subprocess.run(command, capture_output=True, timeout=30, check=False)
    assert run.returncode == 0, run.stderr.decode()
    return run.stdout.decode().strip()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file that belongs to somebody else")
def test_a_file_of_another_user_is_read_without_a_lease(path: Path) -> None:
    total = np.frombuffer(DATA, dtype=np.uint8).sum(dtype=np.uint64)

    assert as_a_stranger(path.parent, 0o644) == f"ReadPayload False {total}"


def test_a_file_that_may_not_be_read_is_refused_with_a_remedy(path: Path) -> None:
    """Mode 0600, which safetensors gives its files, for a stranger; as an ordinary user, a file of mode 0.

    Not at once: its writer may be about to chmod it.
    """
    told = as_a_stranger(path.parent, 0o600 if os.geteuid() == 0 else 0)
    waited, _, refused = told.partition("; ")

    assert waited.startswith("permission denied for uid")
    assert refused.startswith(Reason.UNREADABLE)
    assert "chmod" in refused


def test_no_lease_is_taken_while_its_signal_would_kill(path: Path) -> None:
    before = signal.signal(signal.SIGIO, signal.SIG_DFL)
    try:
        payload = open_file(path, leases=True, **OPTIONS)
        path.write_bytes(SHARD)
    finally:
        signal.signal(signal.SIGIO, before)

    assert isinstance(payload, ReadPayload)
    payload.close()


# ------------------------------------------------------------------------------- changes while reading


def test_a_change_without_a_lease_is_found(path: Path) -> None:
    changes: dict[str, Callable[[], object]] = {
        "overwritten": lambda: path.write_bytes(SHARD),
        "shorter": lambda: os.truncate(path, len(SHARD) - 1),
        "linked": lambda: os.link(path, path.with_name("other")),
    }
    for change in changes.values():
        path.unlink()
        path.write_bytes(SHARD)
        payload = open_file(path, leases=False, **OPTIONS)
        change()
        with pytest.raises(ShardRejected) as refused:
            read_and_verify(payload)
        assert refused.value.reason is Reason.CHANGED_WHILE_READING
        payload.close()


@pytest.mark.parametrize("leases", [True, False])
def test_a_file_renamed_or_deleted_is_read_to_the_end(path: Path, leases: bool) -> None:
    payload = open_file(path, leases=leases, **OPTIONS)
    other = path.with_name("b.safetensors")
    other.write_bytes(bytes(len(SHARD)))
    other.replace(path)

    assert data(payload) == DATA
    payload.close()


def test_a_writer_waits_for_us_and_goes_on_when_we_close(path: Path) -> None:
    payload = open_file(path, leases=True, **OPTIONS)
    assert isinstance(payload, MappedPayload)
    assert payload.proven
    truncating = threading.Thread(target=os.truncate, args=(path, 3))
    truncating.start()
    deadline = time.monotonic() + 10
    while payload.proven:
        assert time.monotonic() < deadline
    assert data(payload) == DATA, "the bytes are still there"
    payload.verify()
    assert data(BytesPayload.copy_of(payload)) == DATA
    assert truncating.is_alive()
    payload.close()
    truncating.join(10)

    assert path.stat().st_size == 3


def test_a_writer_is_not_kept_waiting_for_ever(path: Path) -> None:
    payload = open_file(path, leases=True, **OPTIONS)
    assert isinstance(payload, MappedPayload)
    payload._patience = 0.05
    opening = threading.Thread(target=lambda: path.open("r+b").close())
    opening.start()

    def verify_on_and_on() -> None:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            payload.verify()

    with pytest.raises(ShardRejected, match="writer") as refused:
        verify_on_and_on()
    assert refused.value.reason is Reason.CHANGED_WHILE_READING
    payload.close()
    opening.join(10)


CAMPAIGN = """
import sys, time
from pathlib import Path
import numpy as np
from fusewire.daemon import lease
from fusewire.daemon.errors import ShardNotReady, ShardRejected
from fusewire.daemon.payload import open_file
lease.install_lease_signal_handling()
path, leases, end = Path(sys.argv[1]), sys.argv[2] == "True", time.monotonic() + 1.0
outcomes = {}
while time.monotonic() < end:
    try:
        payload = open_file(path, leases=leases, settle=0.0, incomplete_after=0.0, header_limit=1 << 20)
        target = np.zeros(payload.header.nbytes, dtype=np.uint8)
        try:
            for start in range(0, target.size, 65536):
                payload.read_into(start, target[start:start + 65536])
            payload.verify()
        finally:
            payload.close()
        assert target.min() == target.max() in (1, 2), "a mixture was accepted"
        outcome = "read"
    except (ShardNotReady, ShardRejected) as error:
        outcome = getattr(error, "reason", "not ready")
    outcomes[outcome] = outcomes.get(outcome, 0) + 1
print({str(key): value for key, value in outcomes.items()})
"""


@pytest.mark.parametrize("leases", [True, False])
@pytest.mark.parametrize("mischief", ["truncate", "overwrite", "replace", "delete"])
def test_whatever_another_process_does_to_it(tmp_path: Path, mischief: str, leases: bool) -> None:
    """The right bytes or a clean refusal; never a mixture, never a dead process (an unleased mapping would die)."""
    path = tmp_path / "a.safetensors"
    shards = [save({"a": np.full(1_000_000, value, dtype=np.uint8)}) for value in (1, 2)]
    path.write_bytes(shards[0])
    reader = subprocess.Popen(
        [sys.executable, "-c", CAMPAIGN, str(path), str(leases)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    number = 0
    while reader.poll() is None:
        number += 1
        content = shards[number % 2]
        if mischief == "truncate":
            os.truncate(path, 10)
            path.write_bytes(content)
        elif mischief == "overwrite":
            with path.open("r+b") as file:
                file.write(content)
        elif mischief == "replace":
            temporary = path.with_name("b")
            temporary.write_bytes(content)
            temporary.replace(path)
        else:
            path.unlink()
            path.write_bytes(content)
        time.sleep(0.002)
    output, errors = reader.communicate(timeout=10)

    assert reader.returncode == 0, errors.decode()
    assert "read" in output.decode(), "it did get to read now and then"


def test_leases_are_what_they_are_said_to_be(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x")
    descriptor = os.open(path, os.O_RDONLY)
    assert lease.take(descriptor) is lease.Lease.HELD
    assert lease.holds(descriptor)
    assert fcntl.fcntl(descriptor, fcntl.F_GETLEASE) == fcntl.F_RDLCK
    lease.give_up(descriptor)
    assert not lease.holds(descriptor)
    with path.open("r+b"):
        assert lease.take(descriptor) is lease.Lease.WRITER
    os.close(descriptor)
    read, write = os.pipe()
    assert lease.take(read) is lease.Lease.NONE
    os.close(read)
    os.close(write)


def test_an_identity_tells_content_from_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x")
    before = Identity.of(path.stat())
    path.chmod(0o600)
    os.link(path, tmp_path / "y")
    after = Identity.of(path.stat())

    assert after != before
    assert after.content == before.content
    path.write_bytes(b"y")
    assert Identity.of(path.stat()).content != before.content
