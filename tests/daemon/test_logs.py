"""Log lines: whatever is logged, one whole line comes out that journald will not split, and nothing is raised."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from fusewire.daemon import logs
from fusewire.daemon.errors import printable
from fusewire.daemon.settings import Log

JOURNALD = 48 * 1024


class Rude:
    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


class RudeError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


class Keep(logging.Handler):
    def __init__(self, kept: list[logging.LogRecord]) -> None:
        super().__init__()
        self.kept = kept

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record)


@pytest.fixture(params=["json", "console"])
def lines(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    root, watchdog = logging.getLogger(), logging.getLogger("watchdog")
    handlers, level, watchdog_level = root.handlers[:], root.level, watchdog.level
    stream = io.StringIO()
    logs.configure(Log(level="info", format=request.param), stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)
    watchdog.setLevel(watchdog_level)
    logging.raiseExceptions = True
    logging.captureWarnings(capture=False)
    structlog.reset_defaults()


def itself() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


ODD = [
    10**5000,
    {"a": -(10**5000)},
    itself(),
    {Rude(): 1},
    [Rude()],
    bytearray(b"\xff" * 10**6),
    [["ü" * 5000] * 60] * 60,
    dict.fromkeys(range(100), "\x1b" * 3000),
    "😀" * 10**6,
    float("-inf"),
    b"\x00",
    "\ud800",
    {"nested": {"nested": {"nested": {"nested": {"nested": {"nested": 1}}}}}},
]


@pytest.mark.parametrize("value", ODD, ids=range(len(ODD)))
def test_odd_values_come_out_as_one_short_line(value: object, lines: io.StringIO) -> None:
    structlog.get_logger("x").warning("shard.odd", value=value, after=1)
    text = lines.getvalue()

    assert text.count("\n") == 1
    assert "shard.odd" in text
    assert "after" in text
    assert len(text.encode(errors="surrogatepass")) < JOURNALD
    assert "\x1b" not in text


@pytest.mark.parametrize("many", [16, 50, 500])
def test_the_event_its_level_and_its_time_are_never_left_out(many: int, lines: io.StringIO) -> None:
    structlog.get_logger("x").warning("shard.wide", **{f"k{n}": "ü" * 5000 for n in range(many)})
    text = lines.getvalue()

    assert len(text.encode()) < JOURNALD
    assert all(word in text for word in ("shard.wide", "warning", "values_left_out"))
    if text.startswith("{"):
        assert list(json.loads(text))[:4] == ["event", "level", "logger", "timestamp"]


def test_small_values_are_all_kept(lines: io.StringIO) -> None:
    structlog.get_logger("x").info("many", **{f"k{n}": n for n in range(100)})

    assert all(f"k{n}" in lines.getvalue() for n in range(100))
    assert "left_out" not in lines.getvalue()


def test_a_long_list_says_how_long_it_is(lines: io.StringIO) -> None:
    structlog.get_logger("x").info("list", names=["a"] * 1000, table=dict.fromkeys(range(60)))

    assert "950 more" in lines.getvalue()
    assert "10 more" in lines.getvalue()


def test_a_traceback_is_kept_without_its_control_characters(lines: io.StringIO) -> None:
    try:
        raise ValueError("\x1b[31m" + "z" * 100_000)
    except ValueError as error:
        structlog.get_logger("x").exception("failed")
        structlog.get_logger("x").error("failed", exc_info=error)
    text = lines.getvalue()

    assert text.count("Traceback (most recent call last)") == 2
    assert "raise ValueError" in text
    assert "\x1b" not in text
    assert all(len(line) < JOURNALD for line in text.splitlines())


def test_an_exception_that_can_not_be_printed_is_logged(lines: io.StringIO) -> None:
    try:
        raise RudeError
    except RudeError:
        structlog.get_logger("x").exception("failed")

    assert "RudeError" in lines.getvalue()


def test_a_library_that_formats_wrongly_is_heard_all_the_same(lines: io.StringIO) -> None:
    logging.getLogger("watchdog.x").warning("%d files", "many")
    (line,) = lines.getvalue().splitlines()

    assert "%d files" in line
    assert "watchdog.x" in line


def test_a_library_that_warns_does_so_in_a_line(lines: io.StringIO) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=False)
        logging.captureWarnings(capture=True)  # as at the start, within what pytest makes of warnings
        warnings.warn("not \x1b[31mwritable", UserWarning, stacklevel=1)
    (line,) = lines.getvalue().splitlines()

    assert "writable" in line
    assert "\x1b[31m" not in line
    assert "py.warnings" in line


def test_watchdogs_warnings_are_made_but_not_written_at_error_level(lines: io.StringIO) -> None:
    heard: list[logging.LogRecord] = []
    handler = Keep(heard)
    logging.getLogger("watchdog").addHandler(handler)
    try:
        logs.set_level("error")
        logging.getLogger("watchdog.observers").warning("queue overflowed")
        logging.getLogger("watchdog.observers").error("worse")
    finally:
        logging.getLogger("watchdog").removeHandler(handler)

    assert len(heard) == 2
    assert "overflowed" not in lines.getvalue()
    assert "worse" in lines.getvalue()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON | st.characters(categories=["Cs"]), max_size=5))
def test_any_event_fits_into_a_line(event: dict[str, Any]) -> None:
    line = json.dumps(logs.bound(None, "info", dict(event)), allow_nan=False)

    assert len(line) < JOURNALD
    assert len(json.loads(line)) == len({printable(key, 100) for key in event})
