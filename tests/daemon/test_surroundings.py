"""Mailbox, systemd notification, logs and metrics."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import select
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from fusewire.daemon import events, logs, notify
from fusewire.daemon.errors import StartError
from fusewire.daemon.ledger import Ledger
from fusewire.daemon.mailbox import Mailbox
from fusewire.daemon.metrics import Metrics
from fusewire.daemon.progress import Coverage
from fusewire.daemon.settings import Log

# ------------------------------------------------------------------------------------------- mailbox


def readable(mailbox: Mailbox[Any], seconds: float = 0.0) -> bool:
    return bool(select.select([mailbox], [], [], seconds)[0])


def test_letters_wake_the_reader_and_come_in_order() -> None:
    mailbox: Mailbox[int] = Mailbox()
    assert not readable(mailbox)
    for number in range(3):
        mailbox.put(number)
    assert readable(mailbox)
    assert mailbox.drain() == [0, 1, 2]
    assert not readable(mailbox)
    assert mailbox.drain() == []
    mailbox.close()
    mailbox.put(4)
    mailbox.close()
    assert mailbox.drain() == [4]


def test_no_letter_of_many_threads_is_lost() -> None:
    mailbox: Mailbox[int] = Mailbox()

    def write() -> None:
        for number in range(5000):
            mailbox.put(number)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    found: list[int] = []
    while len(found) < 20_000:
        assert readable(mailbox, 10)
        found += mailbox.drain()
    for thread in threads:
        thread.join()
    mailbox.close()

    assert sorted(found) == sorted(list(range(5000)) * 4)


def test_a_signal_handler_may_put_letters() -> None:
    mailbox: Mailbox[int] = Mailbox()
    before = signal.signal(signal.SIGUSR1, lambda number, _: mailbox.put(number))
    try:
        for _ in range(100):
            os.kill(os.getpid(), signal.SIGUSR1)
            mailbox.put(0)
    finally:
        signal.signal(signal.SIGUSR1, before)

    letters = mailbox.drain()
    mailbox.close()
    assert letters.count(0) == 100
    assert letters.count(signal.SIGUSR1) == 100


# -------------------------------------------------------------------------------------------- notify


@pytest.fixture(params=["path", "abstract"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    address = str(tmp_path / "n") if request.param == "path" else f"@fusewire-test-{os.getpid()}"
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(address.replace("@", "\0", 1))
        listening.settimeout(5)
        yield listening


def test_systemd_is_told(systemd: socket.socket) -> None:
    notify.ready("all\nwell\x1b")
    notify.status("ü" * 500)
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    notify.reloading()
    notify.stopping()
    notify.watchdog()
    notify.extend_timeout(2.5)
    heard = [systemd.recv(4096).decode().split("\n") for _ in range(6)]

    assert heard[0] == ["READY=1", "STATUS=all\\nwell\\x1b"]
    assert len(heard[1][0]) < 220
    assert heard[2][0] == "RELOADING=1"
    told = int(heard[2][1].removeprefix("MONOTONIC_USEC="))
    assert before <= told <= before + 5_000_000, "systemd takes an earlier time for the end of another reload"
    assert heard[3][0] == "STOPPING=1"
    assert heard[4:] == [["WATCHDOG=1"], ["EXTEND_TIMEOUT_USEC=2500000"]]


@pytest.mark.parametrize("address", [None, "", "relative", "/nowhere/at/all", "@fusewire-nobody-listens"])
def test_without_systemd_nothing_happens(address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    if address is not None:
        monkeypatch.setenv("NOTIFY_SOCKET", address)
    assert not notify.send("READY=1")
    notify.ready("x")


def test_a_full_socket_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "n"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(str(tmp_path / "n"))
        sent = [notify.send("STATUS=" + "x" * 1000) for _ in range(5000)]
    assert not all(sent)


@pytest.mark.parametrize(
    ("usec", "pid", "interval"),
    [("30000000", "", 30.0), ("30000000", "1", None), ("0", "", None), ("", "", None), ("x", "", None)],
)
def test_the_watchdogs_interval(usec: str, pid: str, interval: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    monkeypatch.setenv("WATCHDOG_PID", pid)
    assert notify.watchdog_interval() == interval


# ---------------------------------------------------------------------------------------------- logs


class Rude:
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    logs.configure(Log(level="info", format="json"), stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.raiseExceptions = True
    logging.captureWarnings(capture=False)
    structlog.reset_defaults()


def parsed(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_lines_are_whole_json(lines: io.StringIO) -> None:
    structlog.get_logger("x").info("shard.applied", shard="a", nbytes=3)
    logging.getLogger("watchdog").warning("from the standard library: %s", "ü")
    first, second = parsed(lines)

    assert (first["event"], first["shard"], first["nbytes"], first["level"]) == ("shard.applied", "a", 3, "info")
    assert second["event"] == "from the standard library: ü"
    assert second["level"] == "warning"


def test_a_librarys_warning_is_a_line_too(lines: io.StringIO) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("two\nlines", UserWarning, stacklevel=1)
    (line,) = parsed(lines)

    assert "UserWarning: two" in line["event"]
    assert (line["level"], line["logger"]) == ("warning", "py.warnings")


@pytest.mark.parametrize(
    "value",
    ["\ud800", float("nan"), float("inf"), b"\xff", Rude(), [Rude()], {"a": Rude()}, object(), "x\n\x1b[31m", 2**70],
)
def test_no_value_breaks_a_line(value: object, lines: io.StringIO) -> None:
    structlog.get_logger().warning("odd", value=value)
    (line,) = parsed(lines)
    assert line["event"] == "odd"
    assert "\x1b" not in lines.getvalue()


def test_lines_are_bounded(lines: io.StringIO) -> None:
    structlog.get_logger().info("big", **{f"k{n}": "ü" * 10_000 for n in range(100)}, names=["y" * 3000] * 1000)
    try:
        raise ValueError("z" * 100_000)
    except ValueError:
        structlog.get_logger().exception("failed")
    texts = lines.getvalue().splitlines()

    assert len(texts) == 2
    assert "Traceback" in json.loads(texts[1])["exception"]
    assert json.loads(texts[0])["k0"].startswith("ü")


def test_the_level_can_be_changed(lines: io.StringIO) -> None:
    log = structlog.get_logger()
    log.debug("hidden")
    logs.set_level("debug")
    log.debug("shown")
    logging.getLogger("watchdog").debug("watchdog stays quiet")
    logs.set_level("error")
    log.warning("hidden again")

    assert [line["event"] for line in parsed(lines)] == ["shown"]


def test_a_console_is_for_people() -> None:
    stream = io.StringIO()
    before = logging.getLogger().handlers[:]
    logs.configure(Log(format="console"), stream)
    structlog.get_logger().info("shard.applied", shard="a")
    logging.getLogger().handlers[:] = before
    structlog.reset_defaults()

    assert "shard.applied" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


# ------------------------------------------------------------------------------------------- metrics


def fetch(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
        return str(response.read().decode())


def test_events_are_counted_and_the_state_is_shown() -> None:
    metrics = Metrics()
    port = metrics.start(0)
    metrics.record(events.ShardApplied(shard="a", source="folder", tensors=1, skipped=0, nbytes=7, seconds=0.01))
    metrics.record(events.ShardRefused(shard="a", source="socket", reason="truncated", detail=""))
    metrics.record(events.LayerFused(layer=1))
    metrics.record(events.FusionExpired(layer=1, tensor="t", age=1, nbytes=1, cause="age"))
    ledger = Ledger(Coverage(layer_of=(0, 0), fusions={}, layers=1, names=("a", "b")), held_limit=1, known_limit=1)
    ledger.filled = 1
    metrics.observe(ledger, {"journal": "the disk is full", "loader": "ok"}, 12)
    text = fetch(port)
    metrics.stop()

    for line in (
        'fusewire_healthy{part="journal"} 0.0',
        'fusewire_healthy{part="loader"} 1.0',
        "fusewire_spool_bytes 12.0",
        'fusewire_shards_applied_total{source="folder"} 1.0',
        'fusewire_shards_rejected_total{reason="truncated",source="socket"} 1.0',
        "fusewire_bytes_applied_total 7.0",
        "fusewire_layers_fused_total 1.0",
        'fusewire_fusion_expired_total{cause="age"} 1.0',
        "fusewire_events_total 4.0",
        "fusewire_slots_filled 1.0",
        "fusewire_slots_total 2.0",
        "fusewire_ready 0.0",
        "fusewire_live_version -1.0",
    ):
        assert line in text
    with pytest.raises(urllib.error.URLError):
        fetch(port)


def test_the_page_for_operators_names_metrics_that_there_are() -> None:
    page = (Path(__file__).parents[2] / "docs/operations.md").read_text()
    named = set(re.findall(r"`(fusewire_\w+)", page))
    families = list(Metrics().registry.collect())
    there = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert named
    assert named <= there


def test_only_loopback_is_listened_on() -> None:
    metrics = Metrics()
    port = metrics.start(0)
    assert metrics._server is not None
    assert metrics._server[0].server_address[0] == "127.0.0.1"
    with pytest.raises(StartError, match=rf"metrics\.port = {port}"):
        Metrics().start(port)
    metrics.stop()
    metrics.stop()
