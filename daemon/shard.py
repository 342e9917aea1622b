"""The header of a safetensors shard, read strictly. Pure: bytes in, a checked table of contents out.

Format (8 bytes of little-endian length, that many bytes of JSON, data): every tensor has a dtype, a shape and a
range of the data; the ranges cover the data without holes or overlaps. What is refused here is refused before a
byte of the shard is copied.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from .errors import Reason, ShardRejected, printable

LENGTH_BYTES = 8
DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
}
"""Dtypes whose elements fill whole bytes; all others are refused."""
MAX_RANK = 8
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}


class TensorEntry(NamedTuple):
    """One tensor of a shard."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte, counted from the beginning of the data."""
    stop: int


class ShardHeader(NamedTuple):
    """The table of contents of a shard."""

    tensors: tuple[TensorEntry, ...]
    """In the order of their bytes."""
    metadata: dict[str, str]
    data_offset: int
    """Where the data begins in the file."""
    nbytes: int
    """Size of the data."""


def header_length(prefix: bytes, file_size: int, limit: int) -> int:
    """Read the length of the JSON from a shard's first 8 bytes.

    Args:
        prefix: The first 8 bytes, or the whole file if it is shorter.
        file_size: Size of the whole shard in bytes.
        limit: Longest JSON that is read.

    Raises:
        ShardRejected: TRUNCATED, MALFORMED_HEADER or TOO_LARGE.
    """
    if len(prefix) < LENGTH_BYTES:
        raise ShardRejected(
            Reason.TRUNCATED,
            f"{file_size} bytes: a safetensors shard begins with {LENGTH_BYTES} bytes of length",
        )
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length < 2:  # noqa: PLR2004 - "{}"
        raise ShardRejected(Reason.MALFORMED_HEADER, f"header of {length} bytes: at least 2 are needed")
    if length > limit:
        raise ShardRejected(
            Reason.TOO_LARGE,
            f"header of {length} bytes: the limit is {limit} (limits.header_bytes); is it a safetensors file?",
        )
    if LENGTH_BYTES + length > file_size:
        raise ShardRejected(
            Reason.TRUNCATED, f"header of {length} bytes in a shard of {file_size} bytes: the end is missing"
        )
    return length


def parse_header(text: bytes, file_size: int) -> ShardHeader:
    """Check a shard's JSON against the format and against the size of the shard.

    Args:
        text: The JSON, all of it.
        file_size: Size of the whole shard in bytes.

    Raises:
        ShardRejected: MALFORMED_HEADER, TRUNCATED or TRAILING_BYTES; the detail names the tensor.
    """
    content = _json(text)
    metadata = _metadata(content.pop("__metadata__", {}))
    entries = sorted((_entry(name, value) for name, value in content.items()), key=_by_position)
    end = 0
    for entry in entries:
        if entry.start != end:
            what = "overlaps another tensor" if entry.start < end else f"leaves a hole of {entry.start - end} bytes"
            raise _malformed(entry.name, f"begins at {entry.start} and {what}")
        end = entry.stop
    data_offset = LENGTH_BYTES + len(text)
    if data_offset + end > file_size:
        raise ShardRejected(
            Reason.TRUNCATED,
            f"{file_size} bytes; the header promises {data_offset + end}: the end is missing",
        )
    if data_offset + end < file_size:
        raise ShardRejected(
            Reason.TRAILING_BYTES,
            f"{file_size} bytes; the header promises {data_offset + end}: what is the rest?",
        )
    return ShardHeader(tuple(entries), metadata, data_offset, end)


class _Malformed(Exception):
    """Raised inside the JSON parser; its message becomes the detail."""


def _json(text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text.decode(), object_pairs_hook=_object, parse_float=_no_float, parse_constant=_no_float)
    except _Malformed as error:
        raise ShardRejected(Reason.MALFORMED_HEADER, str(error)) from error
    except RecursionError as error:
        raise ShardRejected(Reason.MALFORMED_HEADER, "the header is nested too deeply") from error
    except ValueError as error:  # UnicodeDecodeError, JSONDecodeError, integers of thousands of digits
        detail = f"the header is not valid JSON: {printable(error, 120)}"
        raise ShardRejected(Reason.MALFORMED_HEADER, detail) from error
    if not text.startswith(b"{") or not isinstance(content, dict):
        raise ShardRejected(Reason.MALFORMED_HEADER, "the header is not a JSON object")
    return content


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object whose keys are all different: most parsers let the last of them win in silence."""
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _Malformed(f"the key {printable(twice, 100)} stands twice in the header")
    return made


def _no_float(text: str) -> None:
    raise _Malformed(f"the number {printable(text, 40)} in the header is not a whole one")


def _metadata(value: Any) -> dict[str, str]:  # noqa: ANN401 - whatever JSON held
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ShardRejected(Reason.MALFORMED_HEADER, "__metadata__ is not an object of strings")
    return value


def _entry(name: str, value: Any) -> TensorEntry:  # noqa: ANN401 - whatever JSON held
    if type(value) is not dict or value.keys() != _ENTRY_KEYS:
        raise _malformed(name, "has to have the keys dtype, shape and data_offsets, and no others")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    bits = DTYPE_BITS.get(dtype) if type(dtype) is str else None
    if bits is None:
        raise _malformed(name, f"has the unknown dtype {printable(dtype, 40)}")
    if type(shape) is not list or len(shape) > MAX_RANK or not _whole_numbers(shape):
        raise _malformed(name, f"has an impossible shape {printable(shape, 60)}")
    if type(offsets) is not list or len(offsets) != 2 or not _whole_numbers(offsets):  # noqa: PLR2004
        raise _malformed(name, f"has impossible data_offsets {printable(offsets, 60)}")
    start, stop = offsets
    nbytes = math.prod(shape) * bits // 8
    if stop - start != nbytes:
        raise _malformed(name, f"has {stop - start} bytes of data; its dtype and shape need {nbytes}")
    return TensorEntry(name, dtype, tuple(shape), start, stop)


def _whole_numbers(values: Sequence[object]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _by_position(entry: TensorEntry) -> tuple[int, int]:
    return entry.start, entry.stop


def _malformed(name: str, what: str) -> ShardRejected:
    return ShardRejected(Reason.MALFORMED_HEADER, f"tensor {printable(name, 80)} {what}")
