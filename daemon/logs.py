"""Logging: an event name and key-values, for people on a terminal and as JSON lines elsewhere. Never raises.

Each value is bounded, and so is the line: journald splits lines over 48 KiB. The standard library's loggers
(watchdog's, for one) come out the same way.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Collection, Mapping, MutableMapping
from itertools import islice
from typing import Any, TextIO

import structlog

from .errors import printable
from .settings import Log

VALUE_LIMIT = 2_000
"""Longest text in a line, in characters."""
TRACEBACK_LIMIT = 6 * VALUE_LIMIT
LIST_LIMIT = 50
"""Most elements of a list or mapping in a line."""
DEPTH_LIMIT = 2
"""Lists within lists that are shown as such; what lies deeper is shown as text."""
ELEMENT_LIMIT = 200
"""Longest text in a list or mapping, in characters."""
LINE_LIMIT = 40 * 1024
"""Longest line, in bytes of JSON."""
_INTEGER_LIMIT = 10**18
_HEAD = ("event", "level", "logger", "timestamp")
"""What comes first, and is never left out."""
_INTERNAL = ("_record", "_from_structlog")
"""What structlog hands on to itself."""

_Event = MutableMapping[str, Any]


class _Formatter(structlog.stdlib.ProcessorFormatter):
    """Makes a line of whatever it gets."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; in the worst case one that says that it could not be made."""
        try:
            return super().format(record)
        except Exception as error:  # noqa: BLE001 - a wrong % in some library's message, say
            message = _bounded(record.msg)
            return json.dumps(
                {
                    "event": message,
                    "level": record.levelname.lower(),
                    "logger": record.name,
                    "unprintable": _bounded(error),
                }
            )


def configure(settings: Log, stream: TextIO | None = None) -> None:
    """Set up logging for the process.

    Args:
        settings: Level and format; ``auto`` is a console on a terminal, JSON otherwise.
        stream: Where lines go; None: stderr.
    """
    out = stream or sys.stderr
    console = settings.format == "console" or (settings.format == "auto" and out.isatty())
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback)
        if console
        else structlog.processors.JSONRenderer(default=str, ensure_ascii=True, sort_keys=False)
    )
    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        bound,
    ]
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        _Formatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    logging.raiseExceptions = False  # a line that can't be written is lost, not the daemon
    logging.captureWarnings(capture=True)  # or a library's come out between the lines, as they are
    set_level(settings.level)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


def set_level(level: str) -> None:
    """Change the level of a running process."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    for handler in root.handlers:
        if isinstance(handler.formatter, _Formatter):
            handler.setLevel(root.level)
    # At debug level watchdog writes a line for each of the kernel's events. Its warnings are made at every level,
    # since the folder listens to them; whether they are written is the handler's business.
    logging.getLogger("watchdog").setLevel(min(max(root.level, logging.INFO), logging.WARNING))


def bound(_logger: object, _method: str, event: _Event) -> _Event:
    """Make each value, and the line, short, printable and fit for JSON (a structlog processor)."""
    line: dict[str, Any] = {}
    left, cut = LINE_LIMIT, 0
    for key in sorted(event, key=lambda key: _HEAD.index(key) if key in _HEAD else len(_HEAD)):
        if key in _INTERNAL:
            line[key] = event[key]
            continue
        name = printable(key, 100)
        value = _traceback(event[key]) if key == "exception" else _bounded(event[key])
        cost = _size(name) + _size(value)
        if cost > left > VALUE_LIMIT:  # as much of it as there is room for
            value = _fitting(value, left - _size(name))
            cost = _size(name) + _size(value)
        if cost <= left or key in _HEAD:
            line[name] = value
            left -= cost
        else:
            cut += 1
    if cut:
        line["values_left_out"] = cut
    return line


def _bounded(value: Any, depth: int = 0) -> Any:  # noqa: ANN401 - anything may be logged
    """Return a value that JSON can hold, with a bound on its size; never raises."""
    try:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int) and abs(value) < _INTEGER_LIMIT:
            return int(value)
        if isinstance(value, float) and math.isfinite(value):
            return float(value)
        if depth < DEPTH_LIMIT and isinstance(value, Mapping | list | tuple | set | frozenset):
            return _bounded_elements(value, depth + 1)
        limit = ELEMENT_LIMIT if depth else VALUE_LIMIT
        return printable(bytes(value[:limit]) if isinstance(value, bytes | bytearray) else value, limit)
    except Exception:  # noqa: BLE001 - a value whose str() raises, or that changes meanwhile, must not end the daemon
        return _unprintable(value)


def _bounded_elements(value: Mapping[Any, Any] | Collection[Any], depth: int) -> dict[str, Any] | list[Any]:
    more = len(value) - LIST_LIMIT
    if isinstance(value, Mapping):
        shown = {printable(k, 100): _bounded(v, depth) for k, v in islice(value.items(), LIST_LIMIT)}
        return shown | {"…": f"{more} more"} if more > 0 else shown
    elements = [_bounded(element, depth) for element in islice(value, LIST_LIMIT)]
    return [*elements, f"… {more} more"] if more > 0 else elements


def _unprintable(value: object) -> str:
    return f"<{type(value).__name__} that can't be printed>"


def _traceback(value: object) -> str:
    """Keep a traceback's lines apart, and of a long one the beginning and, above all, the end."""
    text = "\n".join(printable(line, VALUE_LIMIT) for line in str(value)[: 10 * TRACEBACK_LIMIT].split("\n"))
    if len(text) <= TRACEBACK_LIMIT:
        return text
    return f"{text[:VALUE_LIMIT]}\n…\n{text[VALUE_LIMIT - TRACEBACK_LIMIT :]}"


def _size(value: Any) -> int:  # noqa: ANN401 - what _bounded returns
    return len(json.dumps(value))


def _fitting(value: Any, room: int) -> str:  # noqa: ANN401 - the same
    """Cut a value down to a text that needs no more than so many bytes of JSON."""
    text = value if isinstance(value, str) else json.dumps(value)
    while _size(text) > room - _size("…"):
        text = text[: len(text) * room // (_size(text) + room // 8 + 1)]  # at least a ninth shorter each time
    return text + "…"
