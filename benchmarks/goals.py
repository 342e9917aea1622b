"""The one table: each figure that matters, its goal, and whether it is met. The goals are ours; they stand here alone.

A goal is a ratio to something that was measured in the same run wherever there is such a thing, since bare seconds say
more about the machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness import percentile
from reading import NotMeasured, Record, Results, duration, median, ratio, size

FLOOR = "memcpy, 2 threads"
FLOOR_ONE = "memcpy, 1 thread"
EVENT = "fusewire: close() to event"
MS = 1e-3
MB = 1e6


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    figure: str
    floor: str
    """Ratio to the floor; empty where there is none."""
    goal: str
    met: str
    """``yes``, ``no``, or ``not measured``."""


@dataclass(frozen=True)
class Found:
    """A figure that was measured."""

    figure: str
    value: float
    """What is compared with the goal."""
    floor: float | None = None


@dataclass(frozen=True)
class Goal:
    """What is looked at, and what it should be."""

    what: str
    find: Callable[[Results], Found]
    words: str
    """The goal in words; ``{}`` is its limit."""
    least: float | None = None
    most: float | None = None

    def row(self, results: Results) -> Row:
        """Look at the results."""
        goal = self.words.format(f"{self.most if self.least is None else self.least:g}")
        try:
            found = self.find(results)
        except NotMeasured:
            return Row(self.what, "not measured", "", goal, "not measured")
        met = found.value >= self.least if self.least is not None else found.value <= (self.most or 0.0)
        return Row(
            self.what, found.figure, "" if found.floor is None else f"{found.floor:.2f}", goal, "yes" if met else "no"
        )


# ------------------------------------------------------------------------------------------------- figures


def folder(title: str) -> Callable[[Results], Found]:
    """From close() to the event, beside the floor."""

    def find(results: Results) -> Found:
        mine = results.way("folder", EVENT, title=title)
        share = ratio(results.way("folder", FLOOR, title=title), mine)
        return Found(f"{duration(median(mine))} for {size(mine['bytes'])}", share, share)

    return find


def beside_usual(title: str) -> Callable[[Results], Found]:
    """How many times as fast as the faster of the two usual ways."""

    def find(results: Results) -> Found:
        mine = results.way("folder", EVENT, title=title)
        usual = [record for record in results.some("folder", title=title) if record["way"].startswith("usual")]
        if not usual:
            raise NotMeasured
        times = min(map(median, usual)) / median(mine)
        return Found(f"{times:.1f} times as fast", times)

    return find


def latency(start: str, share: float) -> Callable[[Results], Found]:
    """A percentile of the time from close() or from the call to the event."""

    def find(results: Results) -> Found:
        way = results.way("latency", start)
        p50, p99, worst = (percentile(way["seconds"], each) for each in (0.5, 0.99, 1.0))
        figure = f"p50 {duration(p50)}, p99 {duration(p99)}, worst {duration(worst)}"
        return Found(figure, percentile(way["seconds"], share) / MS)

    return find


def ingest(start: str, title: str) -> Callable[[Results], Found]:
    """From the call to the answer, beside memcpy on one thread."""

    def find(results: Results) -> Found:
        mine = results.way("ingest", start, title=title)
        share = ratio(results.way("ingest", FLOOR_ONE, title=title), mine)
        return Found(f"{duration(median(mine))} for {size(mine['bytes'])}", share, share)

    return find


def ingest_memory(results: Results) -> Found:
    """Most memory that four clients cost."""
    extra = [record["extra_bytes"] for record in results.some("ingest") if "extra_bytes" in record]
    if not extra:
        raise NotMeasured
    return Found(f"+{size(max(extra))}", max(extra) / MB)


def tensor_cost(results: Results) -> Found:
    """Microseconds per tensor beside its bytes."""
    theirs = results.one("names", phase="safe_open")["microseconds"]
    mine = sum(
        record["microseconds"] for record in results.some("names") if record["phase"] not in {"safe_open", "daemon"}
    )
    return Found(f"{mine:.1f} us; safe_open and copy_: {theirs:.1f} us", theirs / mine)


def pause(results: Results) -> Found:
    """How long beginning a forward pass takes around a commit, of the worst model size."""
    worst = max(percentile(record["around"], 0.99) for record in results.some("versions", part="pause"))
    return Found(f"p99 {duration(worst)}", worst / MS)


def pause_growth(results: Results) -> Found:
    """How much longer a commit takes for the largest model than for the smallest."""
    models = sorted(results.some("versions", part="pause"), key=lambda record: int(record["bytes"]))
    small, large = (percentile(record["commits"], 0.5) for record in (models[0], models[-1]))
    growth = models[-1]["bytes"] / models[0]["bytes"]
    return Found(f"{duration(small)} and {duration(large)}; the model is {growth:.0f} times as large", large / small)


def tokens(results: Results) -> Found:
    """Share of the tokens per second that is left while versions stream in."""
    worst = min(record["busy"] / record["idle"] for record in results.some("versions", part="daemon"))
    return Found(f"{worst:.2f} of the idle rate", worst)


def streaming_memory(results: Results) -> Found:
    """Memory beyond what the daemon had before, while versions stream in."""
    extra = max(record["extra_bytes"] for record in results.some("versions", part="daemon"))
    return Found(f"+{size(extra)}", extra / MB)


def points(results: Results, part: str, start: str) -> list[tuple[float, float]]:
    """Return size and median seconds of a way, for each size of growth.py, ascending; raise NotMeasured if none."""
    found = [record for record in results.some("growth", part=part) if str(record["way"]).startswith(start)]
    if not found:
        raise NotMeasured
    return sorted((record["x"], median(record)) for record in found)


def byte_growth(results: Results) -> Found:
    """The exponent with which time grows with bytes, between the two largest sizes: 1 is in proportion."""
    ordered = points(results, "bytes", EVENT)
    if len(ordered) < 2:  # noqa: PLR2004 - a slope
        raise NotMeasured
    (x0, y0), (x1, y1) = ordered[-2:]
    slope = math.log(y1 / y0) / math.log(x1 / x0)
    return Found(f"{duration(y0)} for {size(x0)}, {duration(y1)} for {size(x1)}: exponent {slope:.2f}", slope)


def many_tensors(results: Results) -> Found:
    """The shard with the most tensors, beside the usual way on one thread."""
    count, mine = points(results, "tensors", EVENT)[-1]
    theirs = dict(points(results, "tensors", "usual: load_file")).get(count)
    if theirs is None:
        raise NotMeasured
    return Found(f"{duration(mine)} for {count:,} tensors; load_file and copy_: {duration(theirs)}", theirs / mine)


def files(results: Results) -> list[Record]:
    """Return the records of files at once, ascending."""
    return sorted(results.some("growth", part="files"), key=lambda record: int(record["x"]))


def lost(results: Results) -> Found:
    """Files that were not applied exactly once."""
    most = files(results)[-1]
    wrong = sum(
        record["lost"] + record["twice"] + record["refused"] + record["waiting"] + abs(record["counted"] - record["x"])
        for record in files(results)
    )
    return Found(f"{wrong:.0f} of up to {most['x']:,}, in {duration(most['seconds'])}", wrong)


def file_growth(results: Results) -> Found:
    """How much more a file costs when very many come than when few come."""
    few, many = files(results)[0], files(results)[-1]
    each, most = few["seconds"] / few["x"], many["seconds"] / many["x"]
    return Found(f"{duration(each)} each of {few['x']:,}, {duration(most)} each of {many['x']:,}", most / each)


def file_memory(results: Results) -> Found:
    """Memory for each file that is remembered."""
    most = files(results)[-1]
    return Found(f"+{size(most['extra_bytes'])} for {most['x']:,}", most["extra_bytes"] / most["x"] / 1000)


def audience(results: Results) -> Found:
    """Latency at the last of very many subscribers."""
    most = max(results.some("growth", part="subscribers"), key=lambda record: int(record["x"]))
    value = percentile(most["latencies"], 0.99)
    return Found(f"p99 {duration(value)} at the last of {most['x']}", value / MS)


def idle(results: Results) -> Found:
    """CPU while nothing happens."""
    shares = [
        record["idle_cpu"] for name in ("overhead", "latency") for record in results.all(name) if "idle_cpu" in record
    ]
    if not shares:
        raise NotMeasured
    return Found(f"{max(shares):.2%} of a core", max(shares) * 100)


def beyond(results: Results) -> Found:
    """Memory beyond two generations of weights."""
    extra = [
        record["beyond_bytes"]
        for name in ("overhead", "latency")
        for record in results.all(name)
        if "beyond_bytes" in record
    ]
    if not extra:
        raise NotMeasured
    return Found(size(max(extra)), max(extra) / MB)


def start(model: str) -> Callable[[Results], Found]:
    """From the start of the process to READY; what is compared is the part that is ours: without imports."""

    def find(results: Results) -> Found:
        record = results.one("overhead", model=model)
        totals = sorted(record["starts"], key=lambda one: float(one["imports"] + one["building"] + one["loading"]))
        middle = totals[len(totals) // 2]
        ours = middle["building"] + middle["loading"]
        return Found(f"{ours + middle['imports']:.2f} s, imports {middle['imports']:.2f} s of it", ours)

    return find


def peers(results: Results) -> Found:
    """The fastest other loader beside fusewire."""
    mine = results.way("peers", EVENT)
    others = {
        str(record["way"]): median(record) for record in results.all("peers", part="time") if "copy_" in record["way"]
    }
    if not others:
        raise NotMeasured
    name = min(others, key=others.__getitem__)
    share = ratio(results.way("peers", FLOOR), mine)
    figure = f"{duration(median(mine))}; {name}: {duration(others[name])}"
    return Found(figure, others[name] / median(mine), share)


PAIR, SHARD = "fused pair", "V2-wide shard"
LAYER = "a third of a layer"
GOALS: Sequence[Goal] = (
    Goal("fused pair, close() to event", folder(PAIR), "at least {} of the floor", least=0.8),
    Goal("V2-wide shard, close() to event", folder(SHARD), "at least {} of the floor", least=0.9),
    Goal("fused pair, beside the usual reload", beside_usual(PAIR), "at least {} times as fast", least=2),
    Goal("V2-wide shard, beside the usual reload", beside_usual(SHARD), "at least {} times as fast", least=1),
    Goal("16 KB by the folder, idle", latency("folder: close() to event, idle", 0.5), "p50 at most {} ms", most=1),
    Goal("16 KB by the folder, idle", latency("folder: close() to event, idle", 0.99), "p99 at most {} ms", most=5),
    Goal("16 KB by the socket, idle", latency("socket: call to event, idle", 0.5), "p50 at most {} ms", most=1),
    Goal("16 KB by the socket, idle", latency("socket: call to event, idle", 0.99), "p99 at most {} ms", most=5),
    Goal(
        "16 KB by the folder, idle, the worst",
        latency("folder: close() to event, idle", 1.0),
        "at most {} ms",
        most=100,
    ),
    Goal(
        "16 KB by the folder, beside large shards",
        latency("folder: close() to event, beside", 0.99),
        "p99 at most {} ms",
        most=20,
    ),
    Goal(
        "16 KB by the socket, beside large shards",
        latency("socket: call to event, beside", 0.99),
        "p99 at most {} ms",
        most=20,
    ),
    Goal(
        "pushing by shared memory",
        ingest("chunks by shared memory", LAYER),
        "at least {} of memcpy on 1 thread",
        least=0.85,
    ),
    Goal("pushing as messages", ingest("chunks as messages", LAYER), "at least {} of memcpy on 1 thread", least=0.45),
    Goal("memory while four clients push", ingest_memory, "at most {} MB", most=64),
    Goal("cost of a tensor beside its bytes", tensor_cost, "at least {} times as fast as safe_open", least=1),
    Goal("beginning a pass while a version goes live", pause, "p99 at most {} ms", most=1),
    Goal("commit, smallest and largest model", pause_growth, "at most {} times as long", most=3),
    Goal("tokens per second while versions stream in", tokens, "at least {} of the idle rate", least=0.6),
    Goal("memory while versions stream in", streaming_memory, "at most {} MB", most=16),
    Goal("growth with bytes", byte_growth, "exponent at most {}", most=1.1),
    Goal("growth with tensors", many_tensors, "at least {} times as fast as load_file", least=1),
    Goal("files at once: lost, refused or applied twice", lost, "at most {}", most=0),
    Goal(
        "files at once: growth with their number", file_growth, "at most {} times the time of one among few", most=1.5
    ),
    Goal("files at once: memory", file_memory, "at most {} KB a file", most=4),
    Goal("100 subscribers, 16 KB by the folder", audience, "p99 at most {} ms", most=20),
    Goal("start to READY, demo's model", start("demo's model"), "at most {} s without imports", most=0.5),
    Goal("start to READY, V2-wide model with 2 GB", start("V2-wide model"), "at most {} s without imports", most=10),
    Goal("idle", idle, "at most {} % of a core", most=0.5),
    Goal("memory beyond two generations", beyond, "at most {} MB", most=256),
    Goal("beside the fastest other loader", peers, "at least {} times as fast", least=1),
)


def rows(results: Results) -> list[Row]:
    """Return the whole table."""
    return [goal.row(results) for goal in GOALS]
