"""The mailbox's descriptor, at the edges of its life."""

from __future__ import annotations

import errno
import os
import select

import pytest

from fusewire.daemon.mailbox import Mailbox


def test_a_late_letter_is_not_written_into_somebody_elses_file() -> None:
    """A thread that was about to wake the reader may do so only after the mailbox was closed."""
    mailbox: Mailbox[str] = Mailbox()
    number = mailbox.fileno()
    mailbox.close()
    reading, writing = os.pipe()
    try:
        assert number not in (reading, writing)
        mailbox._closed = False  # as that thread still sees it
        mailbox.put("late")
        assert not select.select([reading], [], [], 0)[0]
    finally:
        os.close(reading)
        os.close(writing)
    assert mailbox.drain() == ["late"]


def test_the_descriptor_is_given_back() -> None:
    mailbox: Mailbox[str] = Mailbox()
    number = mailbox.fileno()
    del mailbox

    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(number)


def test_a_full_counter_loses_no_letter_and_does_not_wait() -> None:
    mailbox: Mailbox[str] = Mailbox()
    os.eventfd_write(mailbox.fileno(), 2**64 - 2)
    mailbox.put("a")
    mailbox.put("b")

    assert mailbox.drain() == ["a", "b"]
    assert not select.select([mailbox], [], [], 0)[0]


def test_a_child_process_does_not_inherit_it() -> None:
    assert not os.get_inheritable(Mailbox[str]().fileno())
