"""What a shard holds, and where each tensor would go: what `fusewire inspect` prints. Copies nothing."""

from __future__ import annotations

import math
import os
from pathlib import Path

import msgspec

from fusewire.model import TORCH_DTYPES, DeepseekV2Config, Slot, SlotTable, TensorMeta, WeightsError

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


class ModelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is made of."""

    config: str
    model_type: str
    layers: int
    tensors: int
    """Checkpoint tensors that have a slot: each parameter's rows are filled by them exactly once."""
    parameters: int
    fused_layers: int
    """Layers that have a fused_qkv_a_proj_with_mqa."""
    fused: tuple[str, ...]
    """The halves of a fused layer and the rows that each fills."""
    pairs: int
    """Groups of tensors that have to come together, the fused layers' among them."""
    dequantised: int
    """fp8 weights that are stored dequantised."""
    skipped: dict[str, str]
    """Tensors that are known and not needed -> why."""
    nbytes: dict[str, int]
    """dtype -> bytes of the parameters on the one rank that there is."""


def plan(config_path: Path, *, keep_fp8: bool) -> ModelPlan:
    """Expand a config.json.

    Raises:
        ConfigError: It can't be used.
    """
    config = DeepseekV2Config.from_file(config_path)
    table = SlotTable.build(config, keep_fp8=keep_fp8)
    table.check()
    nbytes: dict[str, int] = {}
    for spec in table.parameters.values():
        size = math.prod(spec.shape) * TORCH_DTYPES[spec.dtype].itemsize
        nbytes[spec.dtype] = nbytes.get(spec.dtype, 0) + size
    first = next(iter(table.fusions.values()), None)
    skipped = {"*.rotary_emb.inv_freq": table.skip_reason("x.rotary_emb.inv_freq")}
    for layer in range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers):
        skipped[f"model.layers.{layer}.*"] = table.skip_reason(f"model.layers.{layer}.eh_proj.weight")
    if config.tie_word_embeddings:
        skipped["lm_head.weight"] = table.skip_reason("lm_head.weight")
    return ModelPlan(
        config=os.fspath(config_path),
        model_type=config.model_type,
        layers=config.num_hidden_layers,
        tensors=len(table.slots),
        parameters=len(table.parameters),
        fused_layers=len(table.fusions),
        fused=tuple(f"{slot.name} -> {_target(slot, table)}" for slot in first.slots) if first else (),
        pairs=len(table.groups),
        dequantised=sum(slot.scale is not None for slot in table.slots.values()),
        skipped={name: reason for name, reason in skipped.items() if reason},
        nbytes=nbytes,
    )


def inspect(shard: Path, config: Path | None, header_limit: int, *, keep_fp8: bool = True) -> Inspection:
    """Read a shard's header, and look its tensors up in the slot table of a config.json, if one is given.

    Raises:
        ShardRejected: It is no well-formed shard.
        ConfigError: The config can't be used.
    """
    payload = open_file(shard, leases=False, settle=0.0, incomplete_after=0.0, header_limit=header_limit)
    payload.close()
    table = SlotTable.build(DeepseekV2Config.from_file(config), keep_fp8=keep_fp8) if config is not None else None
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
    return "placed", _target(plan.slots[0], table)


def _target(slot: Slot, table: SlotTable) -> str:
    """Write the rows that a slot fills."""
    if slot.count > 1:
        return f"{slot.parameter} (all {slot.count} parts)"
    shape = table.parameters[slot.parameter].shape
    columns = math.prod(shape[1:]) if slot.shape != shape else 0
    if not columns:
        return slot.parameter
    if len(shape) == len(slot.shape) + 1:  # a stack of experts
        expert, rest = divmod(slot.offset, columns)
        first = rest // shape[-1]
        return f"{slot.parameter}[{expert}, {first}:{first + slot.shape[0]}]"
    first = slot.offset // columns
    return f"{slot.parameter}[{first}:{first + slot.shape[0]}]"
