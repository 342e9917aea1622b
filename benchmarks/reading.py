"""What the benchmarks have written under results/, read again. Nothing is measured or printed here."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]
BENCHMARKS = ("folder", "latency", "ingest", "names", "widths", "versions", "growth", "overhead", "peers")
"""In the order in which `make bench` runs them."""


class NotMeasured(Exception):
    """A figure is wanted that no result has."""


@dataclass(frozen=True)
class Result:
    """What one benchmark has written."""

    machine: str
    cpu: str
    memory_bytes: int
    measured: str
    """When; empty if the file does not say."""
    records: list[Record]


class Results:
    """All results of a folder.

    Args:
        folder: Where ``NAME.json`` files lie; those that are missing count as not measured.
    """

    def __init__(self, folder: Path) -> None:
        self.found: dict[str, Result] = {}
        for name in BENCHMARKS:
            path = folder / f"{name}.json"
            if path.is_file():
                content = json.loads(path.read_text())
                self.found[name] = Result(
                    content.get("machine", "unknown"),
                    content.get("cpu", "unknown"),
                    content.get("memory_bytes", 0),
                    content.get("measured", ""),
                    content["records"],
                )

    def all(self, benchmark: str, **wanted: object) -> list[Record]:
        """Return the records of a benchmark that have these values; none if it was not run."""
        result = self.found.get(benchmark)
        records = result.records if result is not None else []
        return [record for record in records if all(record.get(key) == value for key, value in wanted.items())]

    def some(self, benchmark: str, **wanted: object) -> list[Record]:
        """Return the same, or raise NotMeasured if there are none."""
        found = self.all(benchmark, **wanted)
        if not found:
            raise NotMeasured(f"{benchmark}: {wanted}")
        return found

    def one(self, benchmark: str, **wanted: object) -> Record:
        """Return the first of them, or raise NotMeasured."""
        return self.some(benchmark, **wanted)[0]

    def way(self, benchmark: str, start: str, **wanted: object) -> Record:
        """Return the first record whose way begins like this, or raise NotMeasured."""
        return first(self.all(benchmark, **wanted), lambda record: str(record.get("way", "")).startswith(start))


def first(records: list[Record], fits: Callable[[Record], bool]) -> Record:
    """Return the first record that fits, or raise NotMeasured."""
    for record in records:
        if fits(record):
            return record
    raise NotMeasured


def median(record: Record) -> float:
    """Return the median of a record's seconds."""
    return float(statistics.median(record["seconds"]))


def ratio(floor: Record, record: Record) -> float:
    """Return how much of the floor's speed something has: 1 is as fast."""
    return median(floor) / median(record)


def duration(seconds: float) -> str:
    """Write a duration for people."""
    if seconds < 1e-3:  # noqa: PLR2004 - a unit
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def size(nbytes: float) -> str:
    """Write a number of bytes for people."""
    if abs(nbytes) < 1e9:  # noqa: PLR2004 - a unit
        return f"{nbytes / 1e6:,.1f} MB"
    return f"{nbytes / 1e9:.2f} GB"
