"""The header parser: every way in which a shard can be broken, by construction; safetensors itself is the oracle."""

from __future__ import annotations

import json
import struct
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize
from safetensors.numpy import load, save

from fusewire.daemon.errors import Reason, ShardRejected
from fusewire.daemon.shard import (
    DTYPE_BITS,
    EXPLAINED_BYTES,
    ShardHeader,
    header_length,
    parse_header,
)

LIMIT = 16 * 1024 * 1024


def read(shard: bytes, limit: int = LIMIT) -> ShardHeader:
    length = header_length(shard[:8], len(shard), limit)
    return parse_header(shard[8 : 8 + length], len(shard))


def raw(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: Any = (2,), offsets: Any = (0, 4), dtype: Any = "BF16", **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


SMALL = save({"a": np.arange(3, dtype=np.float32), "b": np.ones((2, 2), dtype=np.int8)}, {"format": "pt"})


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_rubbish_is_refused_or_is_a_shard(shard: bytes) -> None:
    try:
        read(shard)
    except ShardRejected:
        return
    load(shard)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPE_BITS, "F4", None]),
        "shape": st.lists(st.integers(-1, 4), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | JSON,
    }
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.text(max_size=4), ENTRIES | JSON, max_size=3), st.integers(0, 40))
def test_plausible_headers(header: dict[str, Any], size: int) -> None:
    shard = raw(header, bytes(size))
    try:
        found = read(shard)
    except ShardRejected:
        return
    assert {e.name for e in found.tensors} == set(header) - {"__metadata__"}
    assert sum(e.stop - e.start for e in found.tensors) == size == found.nbytes


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: name != "__metadata__"),
        st.lists(st.integers(0, 3), max_size=4),
        min_size=1,  # safetensors 0.8 writes an empty dict as something that is not JSON
    ),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
)
def test_what_safetensors_writes_is_read(shapes: dict[str, list[int]], metadata: dict[str, str]) -> None:
    arrays = {name: np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape) for name, shape in shapes.items()}
    shard = save(arrays, metadata)
    header = read(shard)

    assert {e.name: e.shape for e in header.tensors} == {name: array.shape for name, array in arrays.items()}
    assert header.metadata == metadata
    for e in header.tensors:
        begin = header.data_offset
        assert shard[begin + e.start : begin + e.stop] == arrays[e.name].tobytes()


def test_unaligned_and_empty_tensors_are_legal() -> None:
    header = {
        "a": entry([1], [0, 1], "U8"),
        "b": entry([1], [1, 5], "F32"),
        "c": entry([0, 7], [5, 5]),
        "d": entry([], [5, 7]),
    }
    found = read(raw(header, bytes(7)))

    assert [(e.name, e.start, e.stop) for e in found.tensors] == [("a", 0, 1), ("b", 1, 5), ("c", 5, 5), ("d", 5, 7)]


def test_padding_with_spaces_is_legal() -> None:
    assert read(raw(json.dumps({"a": entry()}).encode() + b"   ", bytes(4))).nbytes == 4


def test_the_limit_is_ours() -> None:
    with pytest.raises(ShardRejected, match=r"limits\.header_bytes") as refused:
        read(SMALL, limit=20)
    assert refused.value.reason is Reason.TOO_LARGE


def test_every_dtype_of_ours_is_one_of_theirs() -> None:
    for dtype, bits in DTYPE_BITS.items():
        shard = raw({"a": entry([1], [0, bits // 8], dtype)}, bytes(bits // 8))
        assert [name for name, _ in deserialize(shard)] == ["a"]
        assert read(shard).tensors[0].dtype == dtype


def test_metadata_may_look_like_a_tensor() -> None:
    metadata = {"dtype": "F4", "shape": "[2]", "data_offsets": "0:4", "a:b": '{"x": "\\u003a:"}', "": "\\:\n"}
    for text in (json.dumps(metadata), json.dumps(metadata).replace(":b", "\\u003ab"), json.dumps(metadata, indent=2)):
        whole = b'{"__metadata__":%b,"x:\\u003A":%b}' % (text.encode(), json.dumps(entry()).encode())
        found = read(raw(whole, bytes(4)))
        assert found.metadata == metadata
        assert [e.name for e in found.tensors] == ["x::"]


KEYS = st.sampled_from(["a", "\\u0061", "b:", "b\\u003a", "b\\u003A", "\\\\u003a", "dtype", "__metadata__"])
SPACE = st.sampled_from(["", " ", "\n\t"])


@st.composite
def texts(draw: st.DrawFn) -> str:
    """A header of empty tensors in every spelling, in which keys may stand twice, be missing or be one too many."""

    def an_object(pairs: list[tuple[str, str]]) -> str:
        return "{" + ",".join(f'{draw(SPACE)}"{key}"{draw(SPACE)}:{draw(SPACE)}{value}' for key, value in pairs) + "}"

    whole = []
    for name in draw(st.lists(KEYS, max_size=4)):
        pairs = [("dtype", '"U8"'), ("shape", "[0]"), ("data_offsets", "[0,0]")]
        if name == "__metadata__":
            pairs = [(key, '"x:\\u003a"') for key in draw(st.lists(KEYS, max_size=3))]
        elif draw(st.integers(0, 5)) == 0:
            pairs += draw(st.lists(st.sampled_from([*pairs, ("x", '{"y":":"}'), ("\\u0064type", '"U8"')]), max_size=2))
        whole.append((name, an_object(draw(st.permutations(pairs)))))
    return an_object(whole)


@settings(max_examples=400, deadline=None)
@given(texts())
def test_no_key_escapes_the_count(text: str) -> None:
    """Against an independent count: every object pair that JSON holds."""
    doubled = False

    def pairs_seen(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal doubled
        doubled |= len(dict(pairs)) != len(pairs)
        return dict(pairs)

    content = json.loads(text, object_pairs_hook=pairs_seen)
    content.pop("__metadata__", None)
    legal = not doubled and all(value.keys() == {"dtype", "shape", "data_offsets"} for value in content.values())
    if legal:
        assert {e.name for e in read(raw(text.encode())).tensors} == set(content)
    else:
        with pytest.raises(ShardRejected) as refused:
            read(raw(text.encode()))
        assert refused.value.reason is Reason.MALFORMED_HEADER


def test_a_long_header_with_a_key_twice_is_refused_too() -> None:
    header = {f"model.layers.{n}.weight": entry(offsets=[4 * n, 4 * n + 4]) for n in range(15_000)}
    text = json.dumps(header).encode()
    assert len(text) > EXPLAINED_BYTES
    assert len(read(raw(text, bytes(60_000))).tensors) == 15_000
    twice = text.replace(b"layers.7.weight", b"layers.8.weight")
    with pytest.raises(ShardRejected, match="stands twice") as refused:
        read(raw(twice, bytes(60_000)))
    assert refused.value.reason is Reason.MALFORMED_HEADER


def test_a_header_of_many_tensors_is_read_quickly() -> None:
    """Loosely, since machines differ: the size of DeepSeek-V3's table in well under the patience of a client."""
    header = {f"model.layers.{n}.weight": entry(offsets=[4 * n, 4 * n + 4]) for n in range(91_991)}
    shard = raw(header, bytes(4 * 91_991))
    begin = time.process_time()

    assert len(read(shard).tensors) == 91_991
    assert time.process_time() - begin < 1.5
