"""What people see of statuses, events and shards on a terminal. Pure: data in, text or rich renderables out.

Everything from outside passes through `printable` and is never read as rich's markup.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from . import events, wire
from .errors import printable

if TYPE_CHECKING:
    from .inspection import Inspection, ModelPlan  # which loads torch

_STYLES = {"ready": "green", "not_ready": "yellow", "starting": "yellow", "stopping": "red"}
_ICONS: dict[type[events.Event], tuple[str, str]] = {
    events.LayerFused: ("+", "green"),
    events.ShardRefused: ("!", "red"),
    events.FusionExpired: ("!", "red"),
    events.VersionIncomplete: ("?", "yellow"),
    events.VersionAborted: ("!", "red"),
    events.VersionSuperseded: ("!", "yellow"),
    events.VersionRolledBack: ("*", "bold yellow"),
    events.VersionLive: ("*", "bold green"),
    events.ModelReady: ("*", "bold green"),
    events.Stopping: ("-", "yellow"),
}
SHOWN = 10
"""Entries of a list that are shown; the rest is counted."""


def json_line(told: msgspec.Struct) -> str:
    """One line of JSON for a program. All but printable ASCII is escaped; nothing is cut, nothing is lost."""
    text = json.dumps(msgspec.to_builtins(told), separators=(",", ":"))
    return text.replace("\x7f", "\\u007f")


def ranges(numbers: Iterable[int]) -> str:
    """Write whole numbers compactly: ``0-2,5``; ``none`` without any."""
    runs = itertools.groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    spans = [[number for _, number in run] for _, run in runs]
    return ",".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans) or "none"


def size(nbytes: float) -> str:
    """Write a number of bytes with its unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:  # noqa: PLR2004 - SI
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def duration(seconds: float) -> str:
    """Write a number of seconds in the two largest units that it has."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            count, rest = divmod(seconds, length)
            smaller = {"d": ("h", 3600), "h": ("min", 60), "min": ("s", 1)}[unit]
            return f"{count:.0f} {unit} {rest // smaller[1]:.0f} {smaller[0]}"
    return f"{seconds:.1f} s"


def version(number: int | None) -> str:
    """Write a version; the rolling one has no number."""
    return "rolling" if number is None else str(number)


def event_line(event: events.AnyEvent) -> Text:
    """One line for an event."""
    icon, style = _ICONS.get(type(event), (" ", "dim" if isinstance(event, events.Heartbeat) else ""))
    moment = time.strftime("%H:%M:%S", time.localtime(event.time))
    return Text.assemble(
        (f"{moment} ", "dim"),
        (f"{icon} {printable(event.message)}", style),
        (f"  [version {version(event.version)}]", "dim"),
    )


def snapshot_line(snapshot: wire.Snapshot) -> Text:
    """One line for the state that a listener begins with."""
    state = "ready" if snapshot.ready else "not ready"
    fused = ranges(layer for layer, _ in snapshot.fused)
    return Text(
        f"now: {state}, version {version(snapshot.version)}, layers fused: {fused}, "
        f"{len(snapshot.pending)} halves waiting (event {snapshot.seq} of boot {printable(snapshot.boot)})"
    )


def answer_line(answer: wire.Answer) -> Text:
    """One line for the answer to a pushed shard."""
    style = {"applied": "green", "accepted": "green", "rejected": "red", "busy": "yellow"}[answer.status]
    text = Text.assemble((answer.status, style), f" {printable(answer.shard)}")
    if answer.status == "rejected":
        text.append(f": {printable(answer.reason)}: {printable(answer.detail)}")
    elif answer.status == "busy":
        text.append(f": {printable(answer.detail)}")
    else:
        text.append(f": version {version(answer.version)}, {answer.tensors} tensors, {size(answer.nbytes)}")
        if answer.fused:
            text.append(f", fused layers {ranges(answer.fused)}", "green")
        if answer.waiting:
            text.append(f", {len(answer.waiting)} waiting for a partner", "yellow")
    return text


def order_line(status: str, detail: str) -> Text:
    """One line for what came of an order."""
    style = "red" if status == "rejected" else "green"
    return Text.assemble((status, style), f" {printable(detail)}")


def versions_view(told: wire.VersionList) -> RenderableType:
    """All versions, and what the next one waits for."""
    waits = Text(f"staging: {printable(told.staging_waits) or 'free'}", "dim")
    return Group(_versions_table(told.versions), waits) if told.versions else waits


def _versions_table(versions: Sequence[wire.VersionStatus]) -> Table:
    rows = []
    for one in versions:
        facts = [one.detail] if one.detail else []
        if one.waiting_shards:
            facts.append(f"{one.waiting_shards} shards wait for its turn")
        if one.state == "open" and one.missing_count:
            more = f" and {one.missing_count - 1} more" if one.missing_count > 1 else ""
            facts.append(f"missing: {one.missing[0]}{more}")
        if one.stalled:
            facts.append(f"stalled: nothing for {duration(one.idle)}")
        state = f"{one.state}, staged" if one.staged else str(one.state)
        rows.append((version(one.version), state, str(one.filled or ""), "; ".join(facts)))
    return _table("versions", ("version", "state", "slots", "what"), rows)


def status_view(status: wire.Status) -> RenderableType:
    """All that a status says."""
    layers = status.layers
    facts = Table.grid(padding=(0, 2))
    rows: list[tuple[str, RenderableType]] = [
        ("state", Text(status.state.replace("_", " "), _STYLES[status.state])),
        ("model", Text(printable(status.model))),
        ("mode", Text(printable(status.mode))),
        ("version", Text("none yet" if status.version is None else str(status.version))),
        ("staging", Text(printable(status.staging_waits) or "free")),
        ("slots", Text(f"{status.slots_filled} of {status.slots_total} filled")),
        ("layers fused", Text(f"{len(layers.fused)} of {layers.fusable}: {ranges(layers.fused)}")),
        ("layers loaded", Text(f"{len(layers.loaded)} of {layers.total}: {ranges(layers.loaded)}")),
        ("layers waiting", Text(ranges(layers.waiting))),
        ("throughput", Text(f"{size(status.throughput)}/s while copying, last minute")),
        ("shards", Text(_shards(status))),
        ("up", Text(f"{duration(status.uptime)}, pid {status.pid}, boot {printable(status.boot)}")),
    ]
    rows += [(f"health: {printable(part, 40)}", _health(told)) for part, told in status.health.items()]
    rows += [("note", Text(printable(note))) for note in status.notes]
    for name, value in rows:
        facts.add_row(Text(name, "dim"), value)
    parts: list[RenderableType] = [facts]
    if status.versions:
        parts.append(_versions_table(status.versions))
    if status.pending:
        parts.append(pending_view(status.pending))
    if status.waiting_shards:
        rows_ = [(w.shard, w.source, w.state, w.why) for w in status.waiting_shards]
        parts.append(_table("shards not done yet", ("shard", "source", "state", "why"), rows_))
    if status.rejected:
        rejected = [(r.shard, r.source, r.reason, r.detail) for r in reversed(status.rejected)]
        parts.append(_table("rejected shards, newest first", ("shard", "source", "reason", "detail"), rejected))
    return Group(*parts)


def pending_view(pending: Iterable[wire.PendingHalf]) -> RenderableType:
    """The halves that wait."""
    rows = [
        (half.tensor, version(half.version), duration(half.age), size(half.nbytes), ", ".join(half.missing))
        for half in pending
    ]
    if not rows:
        return Text("nothing waits: every half has its partner")
    return _table("halves waiting for a partner", ("tensor", "version", "age", "size", "missing"), rows)


def _shards(status: wire.Status) -> str:
    counters = status.counters
    return (
        f"{counters.get('shards_applied', 0):.0f} applied ({size(counters.get('bytes_applied', 0))}), "
        f"{counters.get('shards_rejected', 0):.0f} rejected, {len(status.waiting_shards)} not done yet"
    )


def _health(told: str) -> Text:
    return Text(printable(told), "green" if told == "ok" else "red")


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", caption_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows[:SHOWN]:
        table.add_row(*(Text(printable(cell)) for cell in row))
    if len(rows) > SHOWN:
        table.caption = f"and {len(rows) - SHOWN} more; --json shows all"
    return table


def inspection_view(found: Inspection) -> RenderableType:
    """All tensors of a shard, and where each would go."""
    table = Table(title=Text(f"{printable(found.shard)}: {len(found.tensors)} tensors, {size(found.nbytes)}"))
    for column in ("tensor", "dtype", "shape", "size", "fate", "where, or why not"):
        table.add_column(column, overflow="fold")
    for line in found.tensors:
        style = {"placed": "green", "skipped": "yellow", "": ""}.get(line.fate, "red")
        shape = "x".join(map(str, line.shape)) or "scalar"
        cells = (line.tensor, line.dtype, shape, size(line.nbytes), line.fate, line.target)
        table.add_row(*(Text(printable(cell), style if cell is line.fate else "") for cell in cells))
    metadata = ", ".join(f"{printable(key, 60)} = {printable(value, 60)}" for key, value in found.metadata.items())
    return Group(table, Text(f"metadata: {metadata or 'none'}"))


def plan_view(plan: ModelPlan) -> RenderableType:
    """What a model is made of."""
    facts = Table.grid(padding=(0, 2))
    rows = [
        ("model", f"{plan.model_type}, {plan.layers} layers"),
        ("checkpoint tensors", f"{plan.tensors} with a slot; each parameter is filled exactly once"),
        ("parameters", str(plan.parameters)),
        ("fused layers", str(plan.fused_layers)),
        *(("  such as", line) for line in plan.fused),
        ("come together", f"{plan.pairs} groups of tensors"),
        ("stored dequantised", f"{plan.dequantised} fp8 weights"),
        *((f"skipped: {name}", reason) for name, reason in plan.skipped.items()),
        *((f"bytes, {dtype}", size(nbytes)) for dtype, nbytes in plan.nbytes.items()),
        ("bytes on each rank", f"{size(sum(plan.nbytes.values()))} on 1 rank"),
    ]
    for name, text in rows:
        facts.add_row(Text(printable(name), "dim"), Text(printable(text)))
    return facts
