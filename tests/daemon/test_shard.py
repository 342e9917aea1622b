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
    MAX_COLONS,
    MAX_TENSORS,
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

BAD: dict[str, tuple[bytes, Reason]] = {
    "empty": (b"", Reason.TRUNCATED),
    "7 bytes": (b"\0" * 7, Reason.TRUNCATED),
    "length 0": (b"\0" * 8, Reason.MALFORMED_HEADER),
    "length 1": (raw(b"{"), Reason.MALFORMED_HEADER),
    "length over the file": (struct.pack("<Q", 100) + b"{}", Reason.TRUNCATED),
    "length 2^63": (struct.pack("<Q", 2**63) + b"{}", Reason.TOO_LARGE),
    "length 2^64-1": (b"\xff" * 8 + b"{}", Reason.TOO_LARGE),
    "not UTF-8": (raw(b'{"\xff\xfe":1}'), Reason.MALFORMED_HEADER),
    "open brace": (raw(b"{ "), Reason.MALFORMED_HEADER),
    "list": (raw([]), Reason.MALFORMED_HEADER),
    "null": (raw(None), Reason.MALFORMED_HEADER),
    "string": (raw("x"), Reason.MALFORMED_HEADER),
    "leading space": (raw(b" {}"), Reason.MALFORMED_HEADER),
    "BOM": (raw(b"\xef\xbb\xbf{}"), Reason.MALFORMED_HEADER),
    "two objects": (raw(b"{}{}"), Reason.MALFORMED_HEADER),
    "200k brackets": (raw(b"[" * 200_000), Reason.MALFORMED_HEADER),
    "200k objects": (raw(b'{"a":' * 200_000), Reason.MALFORMED_HEADER),
    "digits": (raw(b'{"a":' + b"9" * 100_000 + b"}"), Reason.MALFORMED_HEADER),
    "duplicate tensor": (
        raw(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(4)),
        Reason.MALFORMED_HEADER,
    ),
    "duplicate key": (
        raw(b'{"a":{"dtype":"BF16","dtype":"BF16","shape":[2],"data_offsets":[0,4]}}', bytes(4)),
        Reason.MALFORMED_HEADER,
    ),
    "duplicate metadata": (raw(b'{"__metadata__":{"a":"1","a":"2"}}'), Reason.MALFORMED_HEADER),
    "trailing byte": (raw({"a": entry()}, bytes(5)), Reason.TRAILING_BYTES),
    "missing byte": (raw({"a": entry()}, bytes(3)), Reason.TRUNCATED),
    "no data": (raw({"a": entry()}), Reason.TRUNCATED),
    "overlap": (raw({"a": entry(), "b": entry(offsets=[2, 6])}, bytes(6)), Reason.MALFORMED_HEADER),
    "same bytes twice": (raw({"a": entry(), "b": entry()}, bytes(4)), Reason.MALFORMED_HEADER),
    "hole": (raw({"a": entry(), "b": entry(offsets=[6, 10])}, bytes(10)), Reason.MALFORMED_HEADER),
    "hole at the front": (raw({"a": entry(offsets=[2, 6])}, bytes(6)), Reason.MALFORMED_HEADER),
    "reversed": (raw({"a": entry(offsets=[4, 0])}, bytes(4)), Reason.MALFORMED_HEADER),
    "negative offset": (raw({"a": entry(offsets=[-4, 0])}, bytes(4)), Reason.MALFORMED_HEADER),
    "float offset": (raw({"a": entry(offsets=[0, 4.0])}, bytes(4)), Reason.MALFORMED_HEADER),
    "exponent": (raw(b'{"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4e0]}}', bytes(4)), Reason.MALFORMED_HEADER),
    "NaN": (raw(b'{"a":{"dtype":"BF16","shape":[NaN],"data_offsets":[0,4]}}', bytes(4)), Reason.MALFORMED_HEADER),
    "true": (raw({"a": entry(shape=[True, 2])}, bytes(4)), Reason.MALFORMED_HEADER),
    "string shape": (raw({"a": entry(shape="2")}, bytes(4)), Reason.MALFORMED_HEADER),
    "negative shape": (raw({"a": entry(shape=[-1, -2])}, bytes(4)), Reason.MALFORMED_HEADER),
    "huge shape": (raw({"a": entry(shape=[2**62, 2**62])}, bytes(4)), Reason.MALFORMED_HEADER),
    "overflow to fit": (raw({"a": entry(shape=[2**32, 2**32, 2], offsets=[0, 0])}), Reason.MALFORMED_HEADER),
    "overflow behind a zero": (raw({"a": entry(shape=[0, 2**62, 4], offsets=[0, 0])}), Reason.MALFORMED_HEADER),
    "dimension over 63 bits": (raw({"a": entry(shape=[0, 2**63], offsets=[0, 0])}), Reason.MALFORMED_HEADER),
    "half a surrogate pair": (raw(b'{"\\ud800":%b}' % json.dumps(entry()).encode(), bytes(4)), Reason.MALFORMED_HEADER),
    "not UTF-8 where nobody looks": (raw(b'{"a":{"x":"\xff"}}'), Reason.MALFORMED_HEADER),
    "duplicate by escape": (
        raw(b'{"a:":%b,"a\\u003A":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(4)),
        Reason.MALFORMED_HEADER,
    ),
    "duplicate of another kind": (
        raw(b'{"a":{},"a":%b}' % json.dumps(entry()).encode(), bytes(4)),
        Reason.MALFORMED_HEADER,
    ),
    "duplicate __metadata__": (raw(b'{"__metadata__":{"a":"1"},"__metadata__":{"a":"1"}}'), Reason.MALFORMED_HEADER),
    "many dimensions": (raw({"a": entry(shape=[1] * 64 + [2])}, bytes(4)), Reason.MALFORMED_HEADER),
    "wrong size": (raw({"a": entry(shape=[3])}, bytes(4)), Reason.MALFORMED_HEADER),
    "one offset": (raw({"a": entry(offsets=[4])}, bytes(4)), Reason.MALFORMED_HEADER),
    "three offsets": (raw({"a": entry(offsets=[0, 2, 4])}, bytes(4)), Reason.MALFORMED_HEADER),
    "no dtype": (raw({"a": {"shape": [2], "data_offsets": [0, 4]}}, bytes(4)), Reason.MALFORMED_HEADER),
    "one key more": (raw({"a": entry(extra=1)}, bytes(4)), Reason.MALFORMED_HEADER),
    "unknown dtype": (raw({"a": entry(dtype="F4")}, bytes(4)), Reason.MALFORMED_HEADER),
    "dtype of another type": (raw({"a": entry(dtype=["BF16"])}, bytes(4)), Reason.MALFORMED_HEADER),
    "tensor is a list": (raw({"a": []}), Reason.MALFORMED_HEADER),
    "tensor is null": (raw({"a": None}), Reason.MALFORMED_HEADER),
    "metadata is a list": (raw({"__metadata__": []}), Reason.MALFORMED_HEADER),
    "metadata of numbers": (raw({"__metadata__": {"a": 1}}), Reason.MALFORMED_HEADER),
    "nested metadata": (raw({"__metadata__": {"a": {"b": "c"}}}), Reason.MALFORMED_HEADER),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_shards(case: str) -> None:
    shard, reason = BAD[case]
    begin = time.perf_counter()
    with pytest.raises(ShardRejected) as refused:
        read(shard)

    assert refused.value.reason is reason
    assert refused.value.detail.isprintable()
    assert len(refused.value.detail) < 400
    assert time.perf_counter() - begin < 1


def test_every_truncation_of_a_small_shard() -> None:
    for size in range(len(SMALL)):
        with pytest.raises(ShardRejected) as refused:
            read(SMALL[:size])
        assert refused.value.reason is Reason.TRUNCATED


def test_trailing_bytes() -> None:
    with pytest.raises(ShardRejected) as refused:
        read(SMALL + b"\0")
    assert refused.value.reason is Reason.TRAILING_BYTES


def test_every_flip_of_one_bit_of_the_header() -> None:
    """What is still accepted, safetensors reads with the same names, shapes and bytes."""
    accepted = 0
    end = 8 + int.from_bytes(SMALL[:8], "little")
    for position in range(end):
        for bit in range(8):
            shard = bytearray(SMALL)
            shard[position] ^= 1 << bit
            try:
                header = read(bytes(shard))
            except ShardRejected:
                continue
            accepted += 1
            theirs = load(bytes(shard))
            assert {e.name: e.shape for e in header.tensors} == {name: a.shape for name, a in theirs.items()}
            for tensor in header.tensors:
                mine = shard[header.data_offset + tensor.start : header.data_offset + tensor.stop]
                assert bytes(mine) == theirs[tensor.name].tobytes()
    assert accepted > 20, "flips within names and metadata are legal"


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


def filled(head: bytes, unit: bytes, tail: bytes) -> bytes:
    """As long a header as is read at all."""
    return head + unit * ((LIMIT - len(head) - len(tail)) // len(unit)) + tail


TENSORS = b",".join(b'"%x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % n for n in range(MAX_TENSORS + 2))
LONG = {
    "objects": filled(b'{"a":[', b"{},", b"{}]}"),
    "lists": filled(b'{"a":[', b"[],", b"[]]}"),
    "numbers": filled(b'{"a":{"dtype":"U8","shape":[', b"0,", b'0],"data_offsets":[0,0]}}'),
    "the same key": filled(b'{"__metadata__":{', b'"":"",', b'"":""}}'),
    "keys": b'{"__metadata__":{' + b",".join(b'"%x":""' % n for n in range(MAX_COLONS)) + b"}}",
    "brackets": filled(b'{"a":', b"[", b""),
    "digits": filled(b'{"a":', b"9", b"}"),
    "tensors": b"{" + TENSORS + b"}",
    "escapes": filled(b'{"a', b"\\u003a", b'":0}'),
    "short, but slow to explain": b'{"a":[' + b"[]," * (EXPLAINED_BYTES // 3 - 10) + b"[]]}",
}


@pytest.mark.parametrize("case", LONG)
def test_no_header_costs_more_than_a_second(case: str) -> None:
    assert len(LONG[case]) <= LIMIT
    begin = time.process_time()
    with pytest.raises(ShardRejected) as refused:
        read(raw(LONG[case]))

    assert time.process_time() - begin < 1
    assert len(refused.value.detail) < 400


def test_a_header_of_many_tensors_is_read_quickly() -> None:
    """Loosely, since machines differ: the size of DeepSeek-V3's table in well under the patience of a client."""
    header = {f"model.layers.{n}.weight": entry(offsets=[4 * n, 4 * n + 4]) for n in range(91_991)}
    shard = raw(header, bytes(4 * 91_991))
    begin = time.process_time()

    assert len(read(shard).tensors) == 91_991
    assert time.process_time() - begin < 1.5
