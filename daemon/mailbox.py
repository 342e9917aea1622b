"""The reactor's mailbox: other threads, and signal handlers, put letters in; one file descriptor wakes the reactor.

A deque, not a queue.Queue: its append takes no lock, so that a signal handler that interrupts another `put` can't
wait for itself. It is not bounded here: what is put in are hints and outcomes of work that was asked for, and the
reactor folds repeated hints into one.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from typing import Generic, TypeVar

Letter = TypeVar("Letter")


class Mailbox(Generic[Letter]):
    """Letters for one reader."""

    def __init__(self) -> None:
        self._letters: deque[Letter] = deque()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        # Closed with the last reference and not before: a late `put` on another thread would otherwise write its
        # eight bytes into whatever file has got the number since.
        weakref.finalize(self, os.close, self._event)

    def put(self, letter: Letter) -> None:
        """Add a letter and wake the reader. From any thread or signal handler; never waits, never raises."""
        self._letters.append(letter)
        if not self._closed:
            with contextlib.suppress(OSError):  # the counter is full: the reader is awake anyway
                os.eventfd_write(self._event, 1)

    def fileno(self) -> int:
        """The descriptor that is readable while there are letters."""
        return self._event

    def drain(self) -> list[Letter]:
        """Take out all letters, the oldest first."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        return [self._letters.popleft() for _ in range(len(self._letters))]

    def close(self) -> None:
        """End the waking. Letters put in later are kept, and wake nobody. May be called twice."""
        self._closed = True
