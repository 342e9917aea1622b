"""The gate: readers together, a writer alone, writers first, and no wait without an end."""

from __future__ import annotations

import threading

import pytest

from fusewire.model.gate import Gate

TIMEOUT = 10.0


def test_readers_share_and_a_writer_waits() -> None:
    gate = Gate()
    with (
        gate.reading(TIMEOUT),
        gate.reading(TIMEOUT),
        pytest.raises(TimeoutError, match="forward passes"),
        gate.writing(0.02),
    ):
        pytest.fail("a writer beside readers")
    with gate.writing(TIMEOUT):
        with pytest.raises(TimeoutError, match="update"), gate.reading(0.02):
            pytest.fail("a reader beside a writer")
        with pytest.raises(TimeoutError), gate.writing(0.02):
            pytest.fail("two writers")
    with gate.reading(0.02):
        pass


def test_a_waiting_writer_goes_before_new_readers() -> None:
    gate = Gate()
    order: list[str] = []
    holding, release = threading.Event(), threading.Event()

    def hold() -> None:
        with gate.reading(TIMEOUT):
            holding.set()
            release.wait(TIMEOUT)

    def write() -> None:
        with gate.writing(TIMEOUT):
            order.append("writer")

    def read() -> None:
        with gate.reading(TIMEOUT):
            order.append("reader")

    first = threading.Thread(target=hold)
    first.start()
    assert holding.wait(TIMEOUT)
    writer = threading.Thread(target=write)
    writer.start()
    while not gate._writers_waiting:
        pass
    reader = threading.Thread(target=read)
    reader.start()
    release.set()
    for thread in (first, writer, reader):
        thread.join(TIMEOUT)

    assert order == ["writer", "reader"]


def test_an_error_within_gives_the_gate_back() -> None:
    gate = Gate()
    for way in (gate.reading, gate.writing):
        with pytest.raises(ZeroDivisionError), way(TIMEOUT):
            raise ZeroDivisionError
    with gate.writing(0.02):
        pass


def test_a_writer_that_gives_up_lets_readers_in() -> None:
    gate = Gate()
    with gate.reading(TIMEOUT):
        with pytest.raises(TimeoutError), gate.writing(0.02):
            pass
        with gate.reading(0.02):
            pass
