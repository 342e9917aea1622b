"""The gate between forward passes and updates in place: readers share it, a writer has it alone."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


class Gate:
    """A readers-writer lock that prefers writers, so that a busy model can't keep its update waiting for ever.

    Every wait has a deadline. Not re-entrant.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0
        self._writers_waiting = 0
        self._writing = False

    @contextlib.contextmanager
    def reading(self, timeout: float) -> Iterator[None]:
        """Hold the gate together with other readers.

        Raises:
            TimeoutError: A writer held it, or waited for it, for ``timeout`` seconds.
        """
        with self._changed:
            if not self._wait(lambda: not self._writing and not self._writers_waiting, timeout):
                raise TimeoutError(f"an update of the weights kept the forward pass waiting for {timeout:g} s")
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def writing(self, timeout: float) -> Iterator[None]:
        """Hold the gate alone.

        Raises:
            TimeoutError: Readers or another writer held it for ``timeout`` seconds.
        """
        with self._changed:
            self._writers_waiting += 1
            try:
                if not self._wait(lambda: not self._writing and not self._readers, timeout):
                    raise TimeoutError(f"forward passes kept the update of the weights waiting for {timeout:g} s")
                self._writing = True
            finally:
                self._writers_waiting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    def _wait(self, free: Callable[[], bool], timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while not free():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._changed.wait(left)
        return True
