"""The journal and the spool on their own: what is written is read back, whatever the disk does."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash

from fusewire.daemon.errors import StartError
from fusewire.daemon.journal import FILE, Journal
from fusewire.daemon.lifecycle import VersionState
from fusewire.daemon.records import Held, Memory, OpenVersion, ShardRecord, Standing
from fusewire.daemon.spool import Spool

MODEL = "a model"


def record(number: int, **changes: object) -> ShardRecord:
    made = ShardRecord(
        id=number,
        order=number,
        key=f"folder:{number}",
        name=f"shard {number}",
        source="folder",
        place=f"{number}.safetensors",
        identity=(1, 2, 3, 4, number),
        digest="0" * 32,
        version=number,
        run="a run",
        nbytes=10 * number,
        standing="staged",
        slots=((0, 3), (5, 6)),
    )
    return msgspec.structs.replace(made, **changes)


def journal(folder: Path, *, known_limit: int = 100, sync: bool = False, model: str = MODEL) -> Journal:
    return Journal(folder / "state", model, sync=sync, known_limit=known_limit)


@pytest.mark.parametrize("sync", [True, False])
def test_what_is_written_is_read_back(tmp_path: Path, sync: bool) -> None:
    standing = Standing(
        ready=True,
        live=2**63 - 1,
        run="r",
        past_runs=("q", "\x1b"),
        floor=7,
        ended=((3, VersionState.ABORTED, "why"),),
        open=(OpenVersion(number=8, promised=((0, 2),), closed=False, promise="index", approved=True),),
    )
    written = journal(tmp_path, sync=sync)
    assert written.memory == Memory()
    odd = {"key": "folder:\udcff\ud800", "place": "\udcff"}  # names that are no text
    assert written.write([record(1, **odd), record(2, version=None, identity=None, run=None), standing])
    assert written.write([Held(id=1, standing="live", slots=((0, 1),)), record(3, reason="truncated", slots=())])
    written.close()

    again = journal(tmp_path, sync=sync)
    assert again.memory.standing == standing
    assert again.memory.shards == (
        record(1, standing="live", slots=((0, 1),), **odd),
        record(2, version=None, identity=None, run=None),
        record(3, reason="truncated", slots=()),
    )
    again.close()


def test_what_is_noted_is_written_with_the_next(tmp_path: Path) -> None:
    written = journal(tmp_path)
    written.note([record(1)])
    assert written._database.execute("SELECT count(*) FROM shards").fetchone() == (0,)
    written.note([Held(id=1, standing="live", slots=((0, 1),))])
    assert written.write([record(2)])
    written.note([record(3)])
    written.retry()
    written.note([record(4)])
    written.close()
    again = journal(tmp_path)
    assert [shard.id for shard in again.memory.shards] == [1, 2, 3, 4]
    assert again.memory.shards[0].standing == "live"
    again.close()


def test_a_kill_leaves_each_transaction_whole(tmp_path: Path) -> None:
    """Another process writes pairs of records until it is killed: never one without the other, none that was told."""
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from test_journal import journal, record\n"
        "written, number = journal(Path(sys.argv[1])), 1\n"
        "while True:\n"
        "    assert written.write([record(number), record(number + 1)])\n"
        "    print(number + 1, flush=True)\n"
        "    number += 2\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(50):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        told = [line for line in process.stdout if line.endswith("\n")]
    last = int(told[-1]) if told else 100
    again = journal(tmp_path)
    count = len(again.memory.shards)
    assert count % 2 == 0
    assert last <= count <= last + 2
    again.close()


def test_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    written = journal(tmp_path)
    assert written.write([record(1)])
    pages = written._database.execute("PRAGMA page_count").fetchone()[0]
    written._database.execute(f"PRAGMA max_page_count = {pages}")
    assert not written.write([record(n, detail="x" * 3000) for n in range(2, 50)])
    assert "full" in written.health()
    assert not written.write([Held(id=2, standing="over")])
    written._database.execute("PRAGMA max_page_count = 100000")
    deadline = time.monotonic() + 10
    while written.health() != "ok":
        assert time.monotonic() < deadline, written.health()
        time.sleep(0.05)
        written.retry()
    written.close()
    again = journal(tmp_path)
    assert [shard.id for shard in again.memory.shards] == list(range(1, 50))
    assert again.memory.shards[1].standing == "over", "in the order in which they were told"
    again.close()


def test_what_is_over_is_forgotten_beyond_the_limit(tmp_path: Path) -> None:
    written = journal(tmp_path, known_limit=100)
    for number in range(1, 3001):
        written.write([record(number, standing="over" if number % 100 else "live")])
    written.close()
    again = journal(tmp_path)
    kept = [shard for shard in again.memory.shards if shard.standing == "over"]
    assert 100 <= len(kept) <= 100 + 1000
    assert kept[-1].id == 2999
    assert len([shard for shard in again.memory.shards if shard.standing == "live"]) == 30, "those never"
    again.close()


def test_only_one_uses_it(tmp_path: Path) -> None:
    first = journal(tmp_path)
    with pytest.raises(StartError, match=f"another fusewire \\(process {os.getpid()}\\)"):
        journal(tmp_path)
    first.close()
    journal(tmp_path).close()


def test_another_model(tmp_path: Path) -> None:
    journal(tmp_path).close()
    with pytest.raises(StartError, match="another model"):
        journal(tmp_path, model="other")
    journal(tmp_path).close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b"not a database at all, by far" * 200),
        lambda path: path.write_bytes(path.read_bytes()[:4096] + b"\xff" * 8192),
        lambda path: sqlite3.connect(path, isolation_level=None).execute("UPDATE about SET value = '99'"),
        lambda path: sqlite3.connect(path, isolation_level=None).execute("UPDATE shards SET record = x'00'"),
        lambda path: sqlite3.connect(path, isolation_level=None).execute(
            "INSERT OR REPLACE INTO about VALUES ('standing', '{]')"
        ),
    ],
)
def test_a_damaged_journal_is_refused_with_its_name(tmp_path: Path, damage: object) -> None:
    written = journal(tmp_path)
    written.write([record(n) for n in range(1, 200)])
    written.close()
    assert callable(damage)
    damage(tmp_path / "state" / FILE)
    with pytest.raises(StartError, match="journal"):
        journal(tmp_path)
    assert (tmp_path / "state" / FILE).exists(), "nothing is thrown away"


def test_a_state_folder_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(StartError, match=r"state\.path"):
        journal(tmp_path)


# ------------------------------------------------------------------------------------------- the spool


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(tmp_path / "spool", limit=1000, sync=True, known=())
    made.start()
    yield made
    made.stop(5)


def keep(spool: Spool, number: int, data: bytes) -> str:
    kept = spool.begin(number, 2 + len(data))
    assert kept is not None
    kept.head(b"hd")
    kept.data(np.frombuffer(data, dtype=np.uint8))
    name = kept.finish()
    assert kept.digest == xxhash.xxh3_128_hexdigest(data)
    return name


def test_what_is_kept_is_there_until_it_is_discarded(spool: Spool) -> None:
    name = keep(spool, 7, b"data")
    assert (spool.folder / name).read_bytes() == b"hddata"
    assert spool.used == 6
    spool.discard(7)
    spool.discard(8)
    deadline = time.monotonic() + 5
    while spool.used:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert list(spool.folder.iterdir()) == []


def test_what_no_journal_knows_of_is_removed_at_the_start(tmp_path: Path, spool: Spool) -> None:
    keep(spool, 1, b"a")
    name = keep(spool, 2, b"b")
    begun = spool.begin(3, 10)
    assert begun is not None
    (spool.folder / "somebody's").touch()
    again = Spool(tmp_path / "spool", limit=1000, sync=False, known=[name])
    assert sorted(path.name for path in again.folder.iterdir()) == [name, "somebody's"]
    assert again.used == 3


def test_the_limit_is_told_and_ends(spool: Spool) -> None:
    keep(spool, 1, b"x" * 900)
    assert spool.begin(2, 200) is None
    assert "spool_bytes" in spool.failure
    keep(spool, 3, b"y" * 50)
    assert spool.failure == ""


def test_what_is_abandoned_leaves_nothing(spool: Spool) -> None:
    begun = spool.begin(3, 10)
    assert begun is not None
    begun.head(b"x")
    begun.abandon()
    begun.abandon()
    assert list(spool.folder.iterdir()) == []
    assert spool.used == 0


def test_a_spool_that_is_gone_is_told_and_comes_back(spool: Spool) -> None:
    away = spool.folder.with_name("away")
    spool.folder.rename(away)
    assert spool.begin(1, 10) is None
    assert "No such file" in spool.failure
    away.rename(spool.folder)
    keep(spool, 2, b"x")
    assert spool.failure == ""


def test_many_short_lives_are_bounded_too(tmp_path: Path) -> None:
    for life in range(5):
        short = journal(tmp_path, known_limit=10)
        short.write(record(10 * life + number, standing="over", slots=()) for number in range(10))
        short.close()
    again = journal(tmp_path, known_limit=10)
    assert [shard.id for shard in again.memory.shards] == list(range(40, 50))
    again.close()
