"""The slot table: which tensor of a checkpoint fills which rows of which parameter.

A parameter is the concatenation of its members along the rows, and every member is one checkpoint tensor: that
one rule makes every fusion (q_a + kv_a, gate + up, all experts into one stack) rows of the same table. A new
family is new rows in `_layer`, not a new branch in the loader. Pure: no tensor is made here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .config import DTYPES, DeepseekV2Config
from .errors import Offender, WeightsError

FLOATS = frozenset({"BF16", "F16", "F32"})
"""safetensors dtypes that a slot accepts; one that is not the parameter's own is cast."""

Shape = tuple[int, ...]


class TensorMeta(NamedTuple):
    """What a shard's header says of a tensor."""

    dtype: str
    """safetensors' name, such as ``BF16``."""
    shape: Shape


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one checkpoint tensor goes: a contiguous run of one parameter."""

    name: str
    """The tensor's name in a checkpoint."""
    index: int
    """Position in the table, from 0; neighbours in a parameter are neighbours here."""
    parameter: str
    offset: int
    """First element within the flattened parameter."""
    shape: Shape
    dtypes: frozenset[str]
    """Accepted safetensors dtypes."""
    layer: int | None
    part: str
    """The checkpoint module, such as ``q_a_proj``."""
    leaf: str
    """``weight``, ``bias`` or ``e_score_correction_bias``."""
    fused: bool
    """Whether it is one of the parts of its layer's Fusion."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class ParameterSpec(NamedTuple):
    """One parameter of the model."""

    name: str
    shape: Shape
    dtype: str
    """safetensors' name."""


class Fusion(NamedTuple):
    """The parts that have to come together before a layer's fused parameter may be used."""

    layer: int
    parameter: str
    """Without the leaf: ``model.layers.3.self_attn.fused_qkv_a_proj_with_mqa``."""
    slots: tuple[Slot, ...]
    """All parts of all leaves."""


class LoadPlan(NamedTuple):
    """Where the tensors of one shard go."""

    slots: tuple[Slot, ...]
    skipped: tuple[tuple[str, str], ...]
    """(name, reason) of tensors that are known and not needed."""


class _Member(NamedTuple):
    """One checkpoint tensor of a parameter: the module's name and its shape."""

    module: str
    shape: Shape


class _Row(NamedTuple):
    """One parameter and what it is made of, in order."""

    parameter: str
    shape: Shape
    members: tuple[_Member, ...]
    leaf: str = "weight"
    fusion: bool = False
    dtype: str | None = None
    """None: the model's."""


@dataclass(frozen=True, slots=True)
class SlotTable:
    """All slots of a model, by checkpoint name, with the parameters and fusions that they make up."""

    config: DeepseekV2Config
    slots: dict[str, Slot]
    parameters: dict[str, ParameterSpec]
    fusions: dict[int, Fusion]

    @classmethod
    def build(cls, config: DeepseekV2Config, dtype: str | None = None) -> SlotTable:
        """Expand a config.

        Args:
            config: The model's numbers.
            dtype: safetensors' name of the parameters' dtype; None: as the config says.
        """
        dtype = dtype or DTYPES[config.torch_dtype]
        slots: dict[str, Slot] = {}
        parameters: dict[str, ParameterSpec] = {}
        fusions: dict[int, Fusion] = {}
        for layer, row in _rows(config):
            name = f"{row.parameter}.{row.leaf}" if row.leaf else row.parameter
            parameters[name] = ParameterSpec(name, row.shape, row.dtype or dtype)
            offset = 0
            parts = []
            for module, shape in row.members:
                part = module.rpartition(".")[2]
                slot = Slot(
                    f"{module}.{row.leaf or 'weight'}",
                    len(slots),
                    name,
                    offset,
                    shape,
                    FLOATS,
                    layer,
                    part,
                    row.leaf or "weight",
                    row.fusion,
                )
                slots[slot.name] = slot
                parts.append(slot)
                offset += math.prod(shape)
            if row.fusion and layer is not None:
                before = fusions[layer].slots if layer in fusions else ()
                fusions[layer] = Fusion(layer, row.parameter, (*before, *parts))
        return cls(config, slots, parameters, fusions)

    def check(self) -> None:
        """Check that the slots fill each element of each parameter exactly once.

        Raises:
            AssertionError: There is a hole or an overlap; the message names the parameter.
        """
        filled = dict.fromkeys(self.parameters, 0)
        for position, slot in enumerate(self.slots.values()):
            if slot.index != position or slot.offset != filled[slot.parameter]:
                raise AssertionError(f"{slot.name} overlaps, or leaves a hole in, {slot.parameter}")
            filled[slot.parameter] += slot.numel
        for name, spec in self.parameters.items():
            if filled[name] != math.prod(spec.shape):
                raise AssertionError(f"{name}: {filled[name]} of {math.prod(spec.shape)} elements filled")

    def skip_reason(self, name: str) -> str | None:
        """Say why a checkpoint tensor is not needed; None if it is needed or unknown."""
        segments = name.split(".")
        if segments[-2:] == ["rotary_emb", "inv_freq"]:
            return "computed from the config"
        if name == "lm_head.weight" and self.config.tie_word_embeddings:
            return "tied to model.embed_tokens.weight"
        if segments[:2] == ["model", "layers"] and len(segments) > 3 and segments[2].isdecimal():  # noqa: PLR2004
            layers = self.config.num_hidden_layers
            if layers <= int(segments[2]) < layers + self.config.num_nextn_predict_layers:
                return "multi-token prediction layer, not used for decoding"
        return None

    def plan(self, metas: Mapping[str, TensorMeta]) -> LoadPlan:
        """Check tensors against the table.

        Args:
            metas: Name -> dtype and shape, as the shard's header says.

        Raises:
            WeightsError: Some tensor is unknown, or of the wrong shape or dtype; all of them are listed.
        """
        slots: list[Slot] = []
        skipped: list[tuple[str, str]] = []
        offenders: list[Offender] = []
        known = self.slots
        for name, (dtype, shape) in metas.items():
            slot = known.get(name)
            if slot is None:
                reason = self.skip_reason(name)
                if reason is None:
                    offenders.append(_unknown(name))
                else:
                    skipped.append((name, reason))
            elif shape != slot.shape:
                offenders.append(Offender(name, "wrong_shape", f"shape {list(shape)}, expected {list(slot.shape)}"))
            elif dtype not in slot.dtypes:
                offenders.append(
                    Offender(name, "wrong_dtype", f"dtype {dtype}, accepted {', '.join(sorted(slot.dtypes))}")
                )
            else:
                slots.append(slot)
        if offenders:
            raise WeightsError(tuple(offenders))
        return LoadPlan(tuple(slots), tuple(skipped))


def _unknown(name: str) -> Offender:
    return Offender(name, "unknown_tensor", "no tensor of this model has this name")


def _rows(config: DeepseekV2Config) -> Iterator[tuple[int | None, _Row]]:
    """All parameters in the order of the modules, each with its layer."""
    vocabulary = (config.vocab_size, config.hidden_size)
    yield None, _alone("model.embed_tokens", vocabulary)
    for layer in range(config.num_hidden_layers):
        for row in _layer(config, layer):
            yield layer, row
    yield None, _alone("model.norm", (config.hidden_size,))
    if not config.tie_word_embeddings:
        yield None, _alone("lm_head", vocabulary)


def _layer(config: DeepseekV2Config, layer: int) -> Iterator[_Row]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    prefix = f"model.layers.{layer}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    biases: tuple[str, ...] = ("weight", "bias") if config.attention_bias else ("weight",)

    rank, kv_rows = config.q_lora_rank, config.kv_lora_rank + config.qk_rope_head_dim
    if rank is None:
        yield _alone(f"{attention}.q_proj", (heads * config.qk_head_dim, hidden))
        for leaf in biases:
            yield _stack(f"{attention}.kv_a_proj_with_mqa", hidden, {f"{attention}.kv_a_proj_with_mqa": kv_rows}, leaf)
    else:
        halves = {f"{attention}.q_a_proj": rank, f"{attention}.kv_a_proj_with_mqa": kv_rows}
        for leaf in biases:
            stacked = _stack(f"{attention}.fused_qkv_a_proj_with_mqa", hidden, halves, leaf)
            yield stacked._replace(fusion=True)
        yield _alone(f"{attention}.q_a_layernorm", (rank,))
        yield _alone(f"{attention}.q_b_proj", (heads * config.qk_head_dim, rank))
    yield _alone(f"{attention}.kv_a_layernorm", (config.kv_lora_rank,))
    kv_b_rows = heads * (config.qk_nope_head_dim + config.v_head_dim)
    yield _alone(f"{attention}.kv_b_proj", (kv_b_rows, config.kv_lora_rank))
    for leaf in biases:
        yield _stack(f"{attention}.o_proj", heads * config.v_head_dim, {f"{attention}.o_proj": hidden}, leaf)

    if config.is_moe(layer):
        yield from _experts(config, mlp)
    else:
        yield from _mlp(mlp, hidden, config.intermediate_size)
    yield _alone(f"{prefix}.input_layernorm", (hidden,))
    yield _alone(f"{prefix}.post_attention_layernorm", (hidden,))


def _experts(config: DeepseekV2Config, mlp: str) -> Iterator[_Row]:
    hidden, width, count = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts or 0
    yield _alone(f"{mlp}.gate", (count, hidden))
    if config.is_v3:
        bias = _Member(f"{mlp}.gate", (count,))
        yield _Row(f"{mlp}.gate", (count,), (bias,), leaf="e_score_correction_bias", dtype="F32")
    into, out = (width, hidden), (hidden, width)
    gate_up = tuple(
        _Member(f"{mlp}.experts.{expert}.{part}", into) for expert in range(count) for part in ("gate_proj", "up_proj")
    )
    down = tuple(_Member(f"{mlp}.experts.{expert}.down_proj", out) for expert in range(count))
    yield _Row(f"{mlp}.experts.w13_weight", (count, 2 * width, hidden), gate_up, leaf="")
    yield _Row(f"{mlp}.experts.w2_weight", (count, hidden, width), down, leaf="")
    if config.n_shared_experts:
        yield from _mlp(f"{mlp}.shared_experts", hidden, width * config.n_shared_experts)


def _mlp(prefix: str, hidden: int, width: int) -> Iterator[_Row]:
    halves = {f"{prefix}.gate_proj": width, f"{prefix}.up_proj": width}
    yield _stack(f"{prefix}.gate_up_proj", hidden, halves)
    yield _alone(f"{prefix}.down_proj", (hidden, width))


def _alone(module: str, shape: Shape) -> _Row:
    """A parameter that is one checkpoint tensor of the same name."""
    return _Row(module, shape, (_Member(module, shape),))


def _stack(parameter: str, columns: int, members: Mapping[str, int], leaf: str = "weight") -> _Row:
    """A parameter whose rows are those of its members, one after the other; a bias has no columns."""

    def shape(rows: int) -> Shape:
        return (rows, columns) if leaf == "weight" else (rows,)

    made = tuple(_Member(module, shape(rows)) for module, rows in members.items())
    return _Row(parameter, shape(sum(members.values())), made, leaf)


def names_by_layer(slots: Iterable[Slot]) -> dict[int | None, list[str]]:
    """Group the names of slots by layer, for messages."""
    grouped: dict[int | None, list[str]] = {}
    for slot in slots:
        grouped.setdefault(slot.layer, []).append(slot.name)
    return grouped
