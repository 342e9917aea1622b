"""What inputs are made of: a string of bytes that is read as decisions, trees of JSON that may be wrong, and mutations.

An input is such a string and nothing else: the same string makes the same input again, in any program and at any time.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class Choices:
    """Decisions, read from bytes. Once these are used up every decision is the first of those there are."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def below(self, limit: int) -> int:
        """Return a whole number from 0 to below ``limit``."""
        size = (limit - 1).bit_length() // 8 + 1
        return int.from_bytes(self.take(size), "little") % limit

    def take(self, size: int) -> bytes:
        """Return so many bytes, or those that are left."""
        self._at += size
        return self._data[self._at - size : self._at]

    def one_in(self, count: int) -> bool:
        """Say yes once in so many times."""
        return self.below(count) == 1

    def pick(self, options: Sequence[T]) -> T:
        """Choose one."""
        return options[self.below(len(options))]

    def some(self, most: int, make: Callable[[], T]) -> list[T]:
        """Make a few things, ``most`` at most."""
        return [make() for _ in range(self.below(most + 1))]


# ---------------------------------------------------------------------------------------------------------- JSON


class Raw(str):
    """JSON as it is to be written, whether it is any or not."""

    __slots__ = ()


class Pairs(list[tuple[str, Any]]):
    """An object, in which a key may stand twice."""

    __slots__ = ()


HOSTILE = (
    "",
    "\x1b[31mred\x1b[0m",
    "a\nb\r\tc",
    "nul\0",
    "\ud800",
    "\udfff\ud800",
    "\u202egnp.txt",
    "\u2028\u2029\u200b\ufeff",
    "\x9b31m\x7f",
    "n" * 5000,
    "\U0010ffff\ue000",
    "../../etc/passwd",
    "%s{0}{}$(id)`id`",
    "[bold]markup[/bold]",
)
"""Texts that do harm where they are printed, cut or joined without a thought."""
ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63) - 1,
    Raw("9" * 400),
    Raw("9" * 5000),
    1.5,
    Raw("1e400"),
    Raw("-0.0"),
    Raw("4e0"),
    Raw("NaN"),
    Raw("Infinity"),
    Raw("0x10"),
    Raw("[" * 3000),
    Raw('{"a":' * 3000),
    Raw("nul"),
    Raw('"\\ud800"'),
    Raw('"\\u0000"'),
    Raw("'x'"),
    Raw(""),
    *HOSTILE,
    [],
    [[]],
    [0, 0],
    Pairs(),
    Pairs([("a", 1), ("a", 2)]),
)


def odd(choices: Choices) -> Any:
    """Choose an odd value; a copy, since what is in a tree may be changed further."""
    return copy.deepcopy(choices.pick(ODD))


def tree(value: Any) -> Any:
    """Make a tree that can be mutated of what `json.loads` returns."""
    if isinstance(value, dict):
        return Pairs((key, tree(inner)) for key, inner in value.items())
    return [tree(inner) for inner in value] if isinstance(value, list | tuple) else value


def containers(value: Any) -> list[Any]:
    """Return all lists and objects of a tree that hold anything."""
    found: list[Any] = []
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, list) and one:
            found.append(one)
            todo += [inner for _, inner in one] if isinstance(one, Pairs) else one
    return found


def mutate_tree(value: Any, choices: Choices) -> Any:
    """Change something in a tree, in place; return the tree, which may be another one."""
    there = containers(value)
    if not there or choices.one_in(40):
        return odd(choices)
    one = choices.pick(there)
    at = choices.below(len(one))
    choices.pick(_TREE_STEPS)(one, at, choices)
    return value


def _replace(one: Any, at: int, choices: Choices) -> None:
    value = odd(choices)
    one[at] = (one[at][0], value) if isinstance(one, Pairs) else value


def _nudge(one: Any, at: int, choices: Choices) -> None:
    """Change a number a little."""
    inner = one[at][1] if isinstance(one, Pairs) else one[at]
    if type(inner) is int:
        inner += choices.pick((1, -1, 2, -2, 4, -4, 8, 2**32, 2**63, -(2**63)))
        one[at] = (one[at][0], inner) if isinstance(one, Pairs) else inner


def _remove(one: Any, at: int, _choices: Choices) -> None:
    del one[at]


def _double(one: Any, at: int, choices: Choices) -> None:
    one.insert(choices.below(len(one) + 1), copy.deepcopy(one[at]))


def _swap(one: Any, at: int, choices: Choices) -> None:
    other = choices.below(len(one))
    if isinstance(one, Pairs):  # the values, under the keys that stay
        (key, mine), (their_key, theirs) = one[at], one[other]
        one[at], one[other] = (key, theirs), (their_key, mine)
    else:
        one[at], one[other] = one[other], one[at]


def _rename(one: Any, at: int, choices: Choices) -> None:
    if isinstance(one, Pairs):
        key = one[at][0]
        one[at] = (choices.pick((*HOSTILE, key + "s", key.upper(), one[0][0], "__metadata__")), one[at][1])


def _add(one: Any, _at: int, choices: Choices) -> None:
    value = odd(choices)
    one.append((choices.pick(("x", "op", "kind", "event", *HOSTILE)), value) if isinstance(one, Pairs) else value)


_TREE_STEPS = (_nudge, _replace, _nudge, _remove, _double, _swap, _rename, _add)


def write(value: Any, choices: Choices) -> bytes:
    """Write a tree as JSON, in one of many spellings. Half of a surrogate pair becomes an escape, or no UTF-8."""
    comma, colon = choices.pick(((",", ":"), (",", ":"), (", ", ": "), (" ,\n", "\t: ")))
    plain = choices.one_in(3)

    def text(value: str) -> str:
        if not plain:
            return json.dumps(value)
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(char if char >= " " else f"\\u{ord(char):04x}" for char in escaped) + '"'

    def any_of(value: Any) -> str:
        if isinstance(value, Raw):
            return value
        if isinstance(value, str):
            return text(value)
        if isinstance(value, Pairs):
            return "{" + comma.join(text(key) + colon + any_of(inner) for key, inner in value) + "}"
        if isinstance(value, list):
            return "[" + comma.join(any_of(inner) for inner in value) + "]"
        return json.dumps(value)

    return any_of(value).encode(errors="surrogatepass")


# --------------------------------------------------------------------------------------------------------- bytes

TOKENS = (
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\\",
    b"\\u003a",
    b"\\ud83d",
    b"\0",
    b"\xff",
    b"\xc3\x28",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"-",
    b".0",
    b"e9",
    b"\n",
    b"null",
    b"__metadata__",
    b"'''",
    b'"""',
    b"=",
    b"#",
    b"[[",
    b"1979-05-27T07:32:00Z",
    b"{" * 200,
    b"[" * 3000,
    b"9" * 5000,
)


def mutate_bytes(content: bytes, choices: Choices) -> bytes:
    """Change a few bytes, or many."""
    at = choices.below(len(content) + 1)
    return choices.pick(_BYTE_STEPS)(content, at, choices)


def _flip(content: bytes, at: int, choices: Choices) -> bytes:
    return content[:at] + bytes(byte ^ (1 << choices.below(8)) for byte in content[at : at + 1]) + content[at + 1 :]


def _set(content: bytes, at: int, choices: Choices) -> bytes:
    return content[:at] + choices.take(1) + content[at + 1 :]


def _insert(content: bytes, at: int, choices: Choices) -> bytes:
    return content[:at] + choices.pick(TOKENS) + content[at:]


def _cut_out(content: bytes, at: int, choices: Choices) -> bytes:
    return content[:at] + content[at + 1 + choices.below(8) :]


def _cut_off(content: bytes, at: int, _choices: Choices) -> bytes:
    return content[:at]


def _repeat(content: bytes, at: int, choices: Choices) -> bytes:
    piece = content[at : at + 1 + choices.below(32)]
    return content[:at] + piece * (1 + choices.below(4)) + content[at:]


def _rubbish(_content: bytes, _at: int, choices: Choices) -> bytes:
    return choices.take(choices.below(200))


_BYTE_STEPS = (_flip, _set, _insert, _cut_out, _cut_off, _repeat, _flip, _insert, _rubbish)


def mutated(value: Any, choices: Choices) -> bytes:
    """Write a tree after a few changes, most of the time well-formed."""
    for _ in range(choices.pick((1, 0, 0, 1, 2))):
        value = mutate_tree(value, choices)
    content = write(value, choices)
    for _ in range(choices.pick((0, 0, 0, 0, 1, 2))):
        content = mutate_bytes(content, choices)
    return content
