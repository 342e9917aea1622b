"""What a shard holds, and where each tensor would go: what `fusewire inspect` prints. Copies nothing."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import msgspec

from fusewire.model import DeepseekV2Config, SlotTable, TensorMeta, WeightsError

from .errors import Reason, ShardRejected
from .payload import open_file
from .shard import ShardHeader


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a shard."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    fate: str
    """``placed``, ``skipped`` or the reason for which it would be refused; empty without a config."""
    target: str
    """Where it would go, or why it would not."""


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """A whole shard."""

    shard: str
    nbytes: int
    metadata: dict[str, str]
    tensors: tuple[Line, ...]

    @property
    def refused(self) -> int:
        """How many tensors the model would refuse."""
        return sum(line.fate not in {"", "placed", "skipped"} for line in self.tensors)


def inspect(shard: Path, config: Path | None, header_limit: int) -> Inspection:
    """Read a shard's header, and look its tensors up in the slot table of a config.json, if one is given.

    Raises:
        ShardRejected: It is no well-formed shard.
        ConfigError: The config can't be used.
    """
    payload = open_file(shard, leases=False, settle=0.0, incomplete_after=0.0, header_limit=header_limit)
    payload.close()
    table = SlotTable.build(DeepseekV2Config.from_file(config)) if config is not None else None
    return Inspection(
        shard=os.fspath(shard),
        nbytes=payload.header.nbytes,
        metadata=payload.header.metadata,
        tensors=tuple(_lines(payload.header, table)),
    )


def config_beside(shard: Path) -> Path | None:
    """Return the config.json in a shard's own folder, if there is one."""
    beside = shard.parent / "config.json"
    return beside if beside.is_file() else None


def _lines(header: ShardHeader, table: SlotTable | None) -> list[Line]:
    lines = []
    for entry in header.tensors:
        fate, target = _fate(entry.name, TensorMeta(entry.dtype, entry.shape), table) if table else ("", "")
        lines.append(
            Line(
                tensor=entry.name,
                dtype=entry.dtype,
                shape=entry.shape,
                nbytes=entry.stop - entry.start,
                fate=fate,
                target=target,
            )
        )
    return lines


def _fate(name: str, meta: TensorMeta, table: SlotTable) -> tuple[str, str]:
    try:
        plan = table.plan({name: meta})
    except WeightsError as error:
        return error.offenders[0].kind, error.offenders[0].detail
    if plan.skipped:
        return "skipped", plan.skipped[0][1]
    (slot,) = plan.slots
    if slot.count > 1:
        return "placed", f"{slot.parameter} (all {slot.count} parts)"
    shape = table.parameters[slot.parameter].shape
    columns = math.prod(shape[1:]) if slot.shape != shape else 0
    if not columns:
        return "placed", slot.parameter
    if len(shape) == len(slot.shape) + 1:  # a stack of experts
        expert, rest = divmod(slot.offset, columns)
        first = rest // shape[-1]
        return "placed", f"{slot.parameter}[{expert}, {first}:{first + slot.shape[0]}]"
    first = slot.offset // columns
    return "placed", f"{slot.parameter}[{first}:{first + slot.shape[0]}]"


def as_dict(inspection: Inspection) -> dict[str, Any]:
    """Return plain data for JSON."""
    return dict(msgspec.to_builtins(inspection))


__all__ = ["Inspection", "Line", "Reason", "ShardRejected", "as_dict", "config_beside", "inspect"]
