"""The header of a safetensors shard, read strictly. Pure: bytes in, a checked table of contents out.

Format (8 bytes of little-endian length, that many bytes of JSON, data): every tensor has a dtype, a shape and a
range of the data; the ranges cover the data without holes or overlaps. What is refused here is refused before a
byte of the shard is copied.

A header is read twice at most. First quickly, by msgspec, which lets the last of two equal keys win in silence: so
the keys are counted as well. Only if that does not prove it good is it read slowly, to tell what is wrong.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Annotated, Any, NamedTuple

import msgspec

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
LARGEST = 2**63 - 1
"""Largest dimension, offset and number of elements."""
MAX_TENSORS = 200_000
"""Tensors of one shard: twice as many as DeepSeek-V3 has in all. With MAX_COLONS it bounds the work on a header."""
MAX_COLONS = 1_000_000
"""Colons of one header: four for each tensor, one for each key of the metadata, and those within names and texts."""
EXPLAINED_BYTES = 1 << 20
"""Longest broken header that is read a second time, slowly, to say exactly what is wrong with it."""
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
        ShardRejected: MALFORMED_HEADER, TRUNCATED, TRAILING_BYTES or TOO_LARGE; the detail names the tensor.
    """
    entries, metadata = _decode(text)
    tensors = sorted(
        [_tensor(name, entry.dtype, entry.shape, entry.data_offsets) for name, entry in entries.items()],
        key=attrgetter("start", "stop"),
    )
    end = 0
    for tensor in tensors:
        if tensor.start != end:
            what = "overlaps another tensor" if tensor.start < end else f"leaves a hole of {tensor.start - end} bytes"
            raise _malformed(tensor.name, f"begins at {tensor.start} and {what}")
        end = tensor.stop
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
    return ShardHeader(tuple(tensors), metadata, data_offset, end)


def _tensor(name: str, dtype: object, shape: object, offsets: object) -> TensorEntry:
    """Check one entry. Tuples hold whole numbers between 0 and LARGEST; anything that is no tuple is refused."""
    bits = DTYPE_BITS.get(dtype) if type(dtype) is str else None
    if bits is None:
        raise _malformed(name, f"has the unknown dtype {printable(dtype, 40)}")
    if type(shape) is not tuple:
        raise _malformed(name, f"has an impossible shape {printable(shape, 60)}")
    if len(shape) > MAX_RANK:
        raise _malformed(name, f"has {len(shape)} dimensions; {MAX_RANK} are the most that is read")
    if type(offsets) is not tuple or len(offsets) != 2:  # noqa: PLR2004
        raise _malformed(name, f"has impossible data_offsets {printable(offsets, 60)}")
    start, stop = offsets
    nbytes = math.prod(shape) * bits // 8
    if stop - start != nbytes:
        raise _malformed(name, f"has {stop - start} bytes of data; its dtype and shape need {nbytes}")
    if not nbytes and math.prod(filter(None, shape)) > LARGEST:  # a zero hides an overflow from the line above
        raise _malformed(name, f"has an impossible shape {printable(shape, 60)}")
    return TensorEntry(name, dtype, shape, start, stop)  # type: ignore[arg-type]  # str: it has bits


# ------------------------------------------------------------------------------------- quickly, or not at all

_Whole = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]


class _Entry(msgspec.Struct, gc=False):
    """A tensor's entry. ``__metadata__`` has to pass for one, too: hence nothing is required, and strings will do."""

    dtype: str | None = None
    shape: tuple[_Whole, ...] | str | None = None
    data_offsets: tuple[_Whole, _Whole] | str | None = None


class _Top(msgspec.Struct, gc=False):
    """The header without its tensors, which are skipped."""

    metadata: dict[str, str] | None = msgspec.field(name="__metadata__", default=None)


_ENTRIES = msgspec.json.Decoder(dict[str, _Entry])
_TOP = msgspec.json.Decoder(_Top)
_MINUS_ZERO = re.compile(rb"[\[,\s]-0[\],\s]")
"""In a list of numbers, or in a name that looks like one. msgspec takes it for 0, safetensors for a float."""


def _decode(text: bytes) -> tuple[dict[str, _Entry], dict[str, str]]:
    """Read the entries and the metadata, and prove that there is no key but those that are returned.

    Every key brings one colon, and all other colons stand in names and metadata. A key that came twice (all but the
    last were dropped) or that no entry has (it was skipped, unchecked) leaves a colon too many.
    """
    for what, count, most in (("objects", text.count(b"{"), MAX_TENSORS + 2), ("keys", text.count(b":"), MAX_COLONS)):
        if count > most:
            detail = f"the header holds {count} {what}; {most} are the most that is read: split the shard"
            raise ShardRejected(Reason.TOO_LARGE, detail)
    try:
        entries, top = _ENTRIES.decode(text), _TOP.decode(text)
    except (ValueError, RecursionError) as error:
        raise _explained(text, f"the header is not that of a safetensors shard: {printable(error, 120)}") from error
    metadata = top.metadata or {}
    colons = (entries.pop("__metadata__", None) is not None) + 4 * len(entries) + len(metadata)
    colons += _colons(entries) + _colons(metadata) + _colons(metadata.values()) - _escaped_colons(text)
    if not text.startswith(b"{") or text.count(b":") != colons:
        raise _explained(text, "a key in the header stands twice, is missing, or does not belong there")
    if b"-0" in text and _MINUS_ZERO.search(text) and b"-" in _outside_of_strings(text):
        raise ShardRejected(Reason.MALFORMED_HEADER, "a number in the header is -0: not all readers take that for 0")
    return entries, metadata


def _outside_of_strings(text: bytes) -> bytes:
    """Return what is left of JSON without its strings."""
    return b"".join(text.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])


def _colons(strings: Iterable[str]) -> int:
    return "".join(strings).count(":")


def _escaped_colons(text: bytes) -> int:
    r"""Count the colons that are written as ``\u003a``. A backslash that is itself escaped begins no escape."""
    if b"\\u003" not in text:
        return 0
    bare = text.replace(rb"\\", b"__")
    return bare.count(rb"\u003a") + bare.count(rb"\u003A")


# ------------------------------------------------------------------------------ slowly, to tell what is wrong


class _Malformed(Exception):
    """Raised inside the JSON parser; its message becomes the detail."""


def _explained(text: bytes, otherwise: str) -> ShardRejected:
    """Say what is wrong with a broken header, if it is not too long for that."""
    if len(text) <= EXPLAINED_BYTES:
        try:
            _read_slowly(text)
        except ShardRejected as found:
            return found
    return ShardRejected(Reason.MALFORMED_HEADER, otherwise)


def _read_slowly(text: bytes) -> None:
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
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ShardRejected(Reason.MALFORMED_HEADER, "__metadata__ is not an object of strings")
    for name, entry in content.items():
        if type(entry) is not dict or entry.keys() != _ENTRY_KEYS:
            raise _malformed(name, "has to have the keys dtype, shape and data_offsets, and no others")
        _tensor(name, entry["dtype"], _whole_numbers(entry["shape"]), _whole_numbers(entry["data_offsets"]))


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object whose keys are all different."""
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _Malformed(f"the key {printable(twice, 100)} stands twice in the header")
    return made


def _no_float(text: str) -> None:
    raise _Malformed(f"the number {printable(text, 40)} in the header is not a whole one")


def _whole_numbers(values: object) -> object:
    """Make a tuple of a list of whole numbers; anything else stays what it is."""
    fits = type(values) is list and all(type(value) is int and 0 <= value <= LARGEST for value in values)
    return tuple(values) if fits else values  # type: ignore[arg-type]  # a list


def _malformed(name: str, what: str) -> ShardRejected:
    return ShardRejected(Reason.MALFORMED_HEADER, f"tensor {printable(name, 80)} {what}")
