"""Logging: an event name and key-values, for people on a terminal and as JSON lines elsewhere. Never raises.

Each value is bounded, and so is the line: journald splits lines over 48 KiB. The standard library's loggers
(watchdog's, for one) come out the same way.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, TextIO

import structlog

from .errors import printable
from .settings import Log

VALUE_LIMIT = 2_000
"""Longest value in a line, in characters."""
LIST_LIMIT = 50
"""Most elements of a list in a line."""
_EVENT_KEYS_LIMIT = 15
"""Most key-values that are kept whole; with VALUE_LIMIT, a line stays below 48 KiB."""

_Event = MutableMapping[str, Any]


def configure(settings: Log, stream: TextIO | None = None) -> None:
    """Set up logging for the process.

    Args:
        settings: Level and format; ``auto`` is a console on a terminal, JSON otherwise.
        stream: Where lines go; None: stderr.
    """
    out = stream or sys.stderr
    console = settings.format == "console" or (settings.format == "auto" and out.isatty())
    renderer: Any = (
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if console
        else structlog.processors.JSONRenderer(default=str, ensure_ascii=True, sort_keys=False)
    )
    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info if not console else _as_is,
        bound,
    ]
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    logging.raiseExceptions = False  # a line that can't be written is lost, not the daemon
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
    logging.getLogger().setLevel(level.upper())
    # At debug level watchdog writes a line for each of the kernel's events.
    logging.getLogger("watchdog").setLevel(max(logging.getLogger().level, logging.INFO))


def bound(_logger: object, _method: str, event: _Event) -> _Event:
    """Make each value short, printable and fit for JSON (a structlog processor)."""
    kept = list(event.items())
    line = {str(key): _bounded(value, key) for key, value in kept[:_EVENT_KEYS_LIMIT]}
    # What structlog itself needs comes last and has to stay.
    line.update({key: value for key, value in kept[_EVENT_KEYS_LIMIT:] if key.startswith("_")})
    return line


def _bounded(value: Any, key: str = "") -> Any:  # noqa: ANN401 - anything may be logged
    finite = isinstance(value, float) and math.isfinite(value)
    if finite or key.startswith("_") or value is None or isinstance(value, bool | int):
        return value
    if key == "exception":
        text = str(value).encode("utf-8", "replace").decode()
        return text if len(text) <= 6 * VALUE_LIMIT else f"{text[:VALUE_LIMIT]}\n…\n{text[-5 * VALUE_LIMIT :]}"
    try:
        if isinstance(value, Mapping):
            return {printable(k, 100): _bounded(v) for k, v in list(value.items())[:LIST_LIMIT]}
        if isinstance(value, list | tuple | set | frozenset):
            return [_bounded(element) for element in list(value)[:LIST_LIMIT]]
        return printable(value, VALUE_LIMIT)
    except Exception:  # noqa: BLE001 - a value whose str() raises must not take the daemon down
        return f"<{type(value).__name__} that can't be printed>"


def _as_is(_logger: object, _method: str, event: _Event) -> _Event:
    return event
