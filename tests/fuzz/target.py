"""What a target is: it makes an input of decisions, hands it to our code, and judges what came of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from material import Choices

from fusewire.daemon.errors import FusewireError, printable


class Input(NamedTuple):
    """Something from outside."""

    content: Any
    nbytes: int
    """Its size, to which the memory that it takes is compared."""


class Memory(NamedTuple):
    """How much may be allocated at the same time while an input is dealt with: per byte of it, and besides."""

    factor: int
    besides: int


class Target(Protocol):
    """Raises AssertionError, or whatever our code lets out, for an input that shows a defect."""

    name: str
    memory: Memory

    def make(self, choices: Choices) -> Input:
        """Make an input."""

    def act(self, content: Any) -> Any:
        """Hand it to our code. This alone is measured: its time, its memory, and what it raises."""

    def judge(self, content: Any, outcome: Any) -> str:
        """Compare the outcome with an oracle. Returns what it was, in a word, to be counted."""

    def close(self) -> None:
        """Give everything back."""


class Refusal(NamedTuple):
    """One of our own errors."""

    error: Any

    def check(self, longest: int = 400) -> None:
        """Whatever is told of an input has to be fit for a log line."""
        assert isinstance(self.error, FusewireError | ValueError)
        text = str(self.error)
        assert text, "a refusal has to say why"
        assert len(text) <= longest, f"{len(text)} characters: {text[:100]!r}"
        assert text == printable(text, longest), f"not fit to be printed: {text!r}"


def memory_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a folder, in memory if there is a file system of that kind: a hundred thousand files on a disk take long."""
    shm = "/dev/shm"  # noqa: S108 - a folder of our own is made in it
    return tempfile.TemporaryDirectory(prefix="fusewire-fuzz-", dir=shm if os.access(shm, os.W_OK) else None)


def attempt(work: Callable[[], Any], errors: type[Exception] | tuple[type[Exception], ...] = FusewireError) -> Any:
    """Return what the work returns, or the error that it may raise; all others come out."""
    try:
        return work()
    except errors as error:
        return Refusal(error)
