"""The slot table: which tensor of a checkpoint fills which rows of which parameter.

A parameter is the concatenation of its members along the rows, and every member is one checkpoint tensor: that
one rule makes every fusion (q_a + kv_a, gate + up, all experts into one stack) rows of the same table. A new
family is new rows in `_layer`, not a new branch in the loader. Pure: no tensor is made here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .config import DTYPES, DeepseekV2Config
from .errors import Offender, WeightsError

FLOATS = frozenset({"BF16", "F16", "F32"})
"""safetensors dtypes that a plain slot accepts; one that is not the parameter's own is cast."""
FP8 = frozenset({"F8_E4M3"})
SCALE = frozenset({"F32"})
SCALE_LEAF = "weight_scale_inv"
FOREIGN_LEAVES = frozenset({"qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_2"})
"""What AWQ, GPTQ, compressed-tensors and NVFP4 name the tensors that they put in the place of a weight."""

FUSED_MODULE = "fused_qkv_a_proj_with_mqa"

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
    numel: int
    """Number of elements: the product of ``shape``, since it is asked for again and again."""
    dtypes: frozenset[str]
    """Accepted safetensors dtypes."""
    layer: int | None
    part: str
    """The checkpoint module, such as ``q_a_proj``."""
    leaf: str
    """``weight``, ``bias`` or ``e_score_correction_bias``."""
    group: int | None = None
    """Index of the Group that it has to be put in place with; None: it may go alone."""
    scale: int | None = None
    """Of an fp8 weight that is stored dequantised: index of the slot of its scale."""
    indices: range = range(0)
    """The slots that it fills, ``index`` first: more than one for a stack of experts."""

    @property
    def count(self) -> int:
        """How many slots it fills."""
        return len(self.indices)


class ParameterSpec(NamedTuple):
    """One parameter of the model."""

    name: str
    shape: Shape
    dtype: str
    """safetensors' name."""


class Group(NamedTuple):
    """Slots that have to come together: halves of a pair, or an fp8 weight and its scale, or both."""

    layer: int
    parameter: str
    """Without the leaf: ``model.layers.3.self_attn.fused_qkv_a_proj_with_mqa``."""
    slots: tuple[Slot, ...]
    """All parts of all leaves."""

    @property
    def computed(self) -> bool:
        """Whether parts have to be computed with before they can be placed: then all wait in copies."""
        return any(slot.scale is not None for slot in self.slots)


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
    linear: bool = False
    """Whether fp8 checkpoints quantise it."""
    view: bool = False
    """Whether the forward pass needs plain views of it: it is never kept quantised."""
    stacked: str = ""
    """Checkpoint name of a tensor that holds all members as they lie here."""


@dataclass(frozen=True, slots=True)
class SlotTable:
    """All slots of a model, by checkpoint name, with the parameters and groups that they make up."""

    config: DeepseekV2Config
    slots: dict[str, Slot]
    parameters: dict[str, ParameterSpec]
    groups: tuple[Group, ...]
    fusions: dict[int, Group]
    """Layer -> the group of its fused_qkv_a_proj_with_mqa."""
    stacks: dict[str, Slot]
    """Tensors that stand for many slots at once: all experts of a layer, as transformers 5 can write them."""

    @classmethod
    def build(cls, config: DeepseekV2Config, dtype: str | None = None, *, keep_fp8: bool = True) -> SlotTable:
        """Expand a config.

        Args:
            config: The model's numbers.
            dtype: safetensors' name of the parameters' dtype; None: as the config says.
            keep_fp8: Whether quantised weights stay so, with their scales beside them; else, and wherever they
                can't, they are stored dequantised.
        """
        builder = _Builder(config, dtype or DTYPES[config.torch_dtype], keep_fp8=keep_fp8)
        for layer, row in _rows(config):
            builder.add(layer, row)
        groups = tuple(Group(layer, parameter, slots) for layer, parameter, slots in builder.groups)
        fusions = {group.layer: group for group in groups if group.parameter.endswith(f".{FUSED_MODULE}")}
        return cls(config, builder.slots, builder.parameters, groups, fusions, builder.stacks)

    def slot(self, name: str) -> Slot:
        """Return the slot of a checkpoint tensor, or the one that stands for a stack of them."""
        return self.slots.get(name) or self.stacks[name]

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

    def locate(self, names: Iterable[str]) -> tuple[list[Slot], list[str]]:
        """Return the slots of some checkpoint tensors, and the names that are unknown; known ones are skipped."""
        slots, unknown = [], []
        for name in names:
            slot = self.slots.get(name) or self.stacks.get(name)
            if slot is not None:
                slots.append(slot)
            elif self.skip_reason(name) is None:
                unknown.append(name)
        return slots, unknown

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
            slot = known.get(name) or self.stacks.get(name)
            if slot is None:
                reason = self.skip_reason(name)
                if reason is None:
                    offenders.append(self._unknown(name))
                else:
                    skipped.append((name, reason))
            elif shape != slot.shape:
                offenders.append(Offender(name, "wrong_shape", f"shape {list(shape)}, expected {list(slot.shape)}"))
            elif dtype not in slot.dtypes:
                accepted = ", ".join(sorted(slot.dtypes))
                hint = "; an fp8 weight is never cast without its scale" if dtype.startswith("F8_") else ""
                offenders.append(Offender(name, "wrong_dtype", f"dtype {dtype}, accepted {accepted}{hint}"))
            else:
                slots.append(slot)
        if offenders:
            raise WeightsError(tuple(offenders))
        return LoadPlan(tuple(slots), tuple(skipped))

    def _unknown(self, name: str) -> Offender:
        module, _, leaf = name.rpartition(".")
        if leaf in FOREIGN_LEAVES and f"{module}.weight" in self.slots:
            detail = (
                f"{leaf} belongs to a quantisation that is not supported (supported: fp8 with {SCALE_LEAF}, or none)"
            )
        elif leaf == SCALE_LEAF and f"{module}.weight" in self.slots:
            detail = "a scale of fp8 weights, but the config.json has no fp8 quantization_config"
        else:
            detail = "no tensor of this model has this name"
        return Offender(name, "unknown_tensor", detail)


class _Builder:
    """Turns rows into slots, parameters and groups."""

    def __init__(self, config: DeepseekV2Config, dtype: str, *, keep_fp8: bool) -> None:
        self._block = config.fp8.block if config.fp8 is not None else 0
        self._dtype = dtype
        self._keep = keep_fp8
        self.slots: dict[str, Slot] = {}
        self.parameters: dict[str, ParameterSpec] = {}
        self.groups: list[tuple[int, str, tuple[Slot, ...]]] = []
        self.stacks: dict[str, Slot] = {}
        self._fusions: dict[int, int] = {}

    def add(self, layer: int | None, row: _Row) -> None:
        """Add a parameter and the slots that fill it."""
        name = f"{row.parameter}.{row.leaf}" if row.leaf else row.parameter
        if not (self._block and row.linear):
            self._add(layer, row, name, row.dtype or self._dtype, FLOATS)
        elif self._keep and not row.view and self._stacks(row):
            self._add(layer, row, name, "F8_E4M3", FP8)
            self._add_scales(layer, row, name)
        else:
            self._add_dequantised(layer, row, name)

    def _stacks(self, row: _Row) -> bool:
        """Whether the members' blocks stay blocks when they are stacked: all but the last end at a block's edge."""
        return all(member.shape[0] % self._block == 0 for member in row.members[:-1])

    def _blocks(self, shape: Shape) -> Shape:
        return tuple(-(-size // self._block) for size in shape)

    def _group(self, layer: int | None, row: _Row) -> int | None:
        """Return the group of a row's slots, opening one where there is none; all leaves of a pair share theirs."""
        if layer is None:
            return None
        if row.fusion and layer in self._fusions:
            return self._fusions[layer]
        self.groups.append((layer, row.parameter, ()))
        if row.fusion:
            self._fusions[layer] = len(self.groups) - 1
        return len(self.groups) - 1

    def _join(self, group: int | None, slots: Iterable[Slot]) -> None:
        if group is not None:
            layer, parameter, before = self.groups[group]
            self.groups[group] = (layer, parameter, (*before, *slots))

    def _add(self, layer: int | None, row: _Row, name: str, dtype: str, dtypes: frozenset[str]) -> None:
        """Members that go into their rows as they are, or cast."""
        self.parameters[name] = ParameterSpec(name, row.shape, dtype)
        group = self._group(layer, row) if row.fusion else None
        offset = 0
        made = []
        for module, shape in row.members:
            slot = self._slot(module, row.leaf or "weight", name, offset, shape, dtypes, layer=layer, group=group)
            made.append(slot)
            offset += slot.numel
        self._join(group, made)
        if row.stacked and dtypes is FLOATS:
            stack = dataclasses.replace(
                made[0],
                name=row.stacked,
                shape=row.shape,
                numel=math.prod(row.shape),
                indices=range(made[0].index, made[0].index + len(made)),
            )
            self.stacks[row.stacked] = stack

    def _add_scales(self, layer: int | None, row: _Row, name: str) -> None:
        members = tuple(_Member(member.module, self._blocks(member.shape)) for member in row.members)
        experts = row.shape[:-2]
        rows = sum(member.shape[0] for member in members) // math.prod(experts)
        scales = row._replace(shape=(*experts, rows, members[0].shape[1]), members=members, leaf=SCALE_LEAF, stacked="")
        self._add(layer, scales, f"{name.removesuffix('weight')}{SCALE_LEAF}", "F32", SCALE)

    def _add_dequantised(self, layer: int | None, row: _Row, name: str) -> None:
        """Members that are multiplied with their scales on the way into their rows; the scales are kept."""
        self.parameters[name] = ParameterSpec(name, row.shape, self._dtype)
        offset = 0
        for module, shape in row.members:
            group = self._group(layer, row if row.fusion else row._replace(parameter=module))
            blocks, scales = self._blocks(shape), f"{module}.{SCALE_LEAF}"
            self.parameters[scales] = ParameterSpec(scales, blocks, "F32")
            scale = self._slot(module, SCALE_LEAF, scales, 0, blocks, SCALE, layer=layer, group=group)
            weight = self._slot(module, "weight", name, offset, shape, FP8, layer=layer, group=group, scale=scale.index)
            self._join(group, (scale, weight))
            offset += weight.numel

    def _slot(  # noqa: PLR0913 - one argument for each column of the table
        self,
        module: str,
        leaf: str,
        parameter: str,
        offset: int,
        shape: Shape,
        dtypes: frozenset[str],
        *,
        layer: int | None,
        group: int | None,
        scale: int | None = None,
    ) -> Slot:
        part = module.rpartition(".")[2]
        name = f"{module}.{leaf}"
        index, numel = len(self.slots), math.prod(shape)
        itself = range(index, index + 1)
        slot = Slot(name, index, parameter, offset, shape, numel, dtypes, layer, part, leaf, group, scale, itself)
        self.slots[name] = slot
        return slot


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
        yield _linear(f"{attention}.q_proj", (heads * config.qk_head_dim, hidden))
        for leaf in biases:
            yield _stack(f"{attention}.kv_a_proj_with_mqa", hidden, {f"{attention}.kv_a_proj_with_mqa": kv_rows}, leaf)
    else:
        halves = {f"{attention}.q_a_proj": rank, f"{attention}.kv_a_proj_with_mqa": kv_rows}
        for leaf in biases:
            stacked = _stack(f"{attention}.{FUSED_MODULE}", hidden, halves, leaf)
            yield stacked._replace(fusion=True)
        yield _alone(f"{attention}.q_a_layernorm", (rank,))
        yield _linear(f"{attention}.q_b_proj", (heads * config.qk_head_dim, rank))
    yield _alone(f"{attention}.kv_a_layernorm", (config.kv_lora_rank,))
    kv_b_rows = heads * (config.qk_nope_head_dim + config.v_head_dim)
    yield _linear(f"{attention}.kv_b_proj", (kv_b_rows, config.kv_lora_rank))._replace(view=True)
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
    for parameter, shape, members, stacked in (
        ("w13_weight", (count, 2 * width, hidden), gate_up, "gate_up_proj"),
        ("w2_weight", (count, hidden, width), down, "down_proj"),
    ):
        stack = f"{mlp}.experts.{stacked}"
        yield _Row(f"{mlp}.experts.{parameter}", shape, members, leaf="", linear=True, stacked=stack)
    if config.n_shared_experts:
        yield from _mlp(f"{mlp}.shared_experts", hidden, width * config.n_shared_experts)


def _mlp(prefix: str, hidden: int, width: int) -> Iterator[_Row]:
    halves = {f"{prefix}.gate_proj": width, f"{prefix}.up_proj": width}
    yield _stack(f"{prefix}.gate_up_proj", hidden, halves)
    yield _linear(f"{prefix}.down_proj", (hidden, width))


def _alone(module: str, shape: Shape) -> _Row:
    """A parameter that is one checkpoint tensor of the same name."""
    return _Row(module, shape, (_Member(module, shape),))


def _linear(module: str, shape: Shape) -> _Row:
    """The same, for the weight of a Linear."""
    return _alone(module, shape)._replace(linear=True)


def _stack(parameter: str, columns: int, members: Mapping[str, int], leaf: str = "weight") -> _Row:
    """A parameter whose rows are those of its members, one after the other; a bias has no columns."""

    def shape(rows: int) -> Shape:
        return (rows, columns) if leaf == "weight" else (rows,)

    made = tuple(_Member(module, shape(rows)) for module, rows in members.items())
    return _Row(parameter, shape(sum(members.values())), made, leaf, linear=leaf == "weight")


def names_by_layer(slots: Iterable[Slot]) -> dict[int | None, list[str]]:
    """Group the names of slots by layer, for messages."""
    grouped: dict[int | None, list[str]] = {}
    for slot in slots:
        grouped.setdefault(slot.layer, []).append(slot.name)
    return grouped
