"""Leases: which requests read which generation, so that none changes under a reader (the idea of RCU).

A request takes a lease on the live generation and keeps it until it has ended, whatever goes live meanwhile. Making
another generation live is one assignment, and costs the same for a model of any size. A generation that is no longer
live may be written once its last lease has ended.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import NamedTuple


class Held(NamedTuple):
    """The leases on one generation."""

    leases: int
    age: float
    """Seconds for which the oldest has been held."""


class Leases:
    """Counts readers of generations. Thread-safe; the lock is only ever held for a few assignments.

    Args:
        on_idle: Called with a generation's index when its last lease ends while it is not live; from the thread that
            ended it, outside of the lock. Must not block or raise.
    """

    def __init__(self, on_idle: Callable[[int], None] = lambda _: None) -> None:
        self.on_idle = on_idle
        self._lock = threading.Lock()
        self._live: int | None = None
        self._tokens = itertools.count()
        self._held: dict[int, dict[int, float]] = {}

    @property
    def live(self) -> int | None:
        """Index of the generation that the next lease is on; None before there is one."""
        return self._live

    def take(self) -> tuple[int, int] | None:
        """Begin a lease on the live generation: (its index, a token for `end`); None if none is live."""
        with self._lock:
            index = self._live
            if index is None:
                return None
            token = next(self._tokens)
            self._held.setdefault(index, {})[token] = time.monotonic()
        return index, token

    def end(self, index: int, token: int) -> None:
        """End a lease."""
        with self._lock:
            held = self._held[index]
            del held[token]
            idle = not held and index != self._live
        if idle:
            self.on_idle(index)

    def flip(self, index: int) -> int:
        """Make a generation live. Returns how many leases the one before still has; `on_idle` tells of the last."""
        with self._lock:
            before, self._live = self._live, index
            return 0 if before is None else len(self._held.get(before, ()))

    def held(self, index: int) -> Held:
        """Return the leases on a generation."""
        with self._lock:
            since = self._held.get(index, {}).values()
            return Held(len(since), time.monotonic() - min(since) if since else 0.0)
