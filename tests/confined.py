"""Run a program under the system call rules of a systemd unit: ``python confined.py UNIT PROGRAM …``.

A filter is easily a call too strict, and some libraries abort over a refused call that others pass over. Here
the unit's own rules are loaded with libseccomp, which systemd uses too. Only what the unit says of calls and
address families is applied, and only for the machine's own architecture; no namespaces, users or devices.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

LIBRARY = "libseccomp.so.2"
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_EQUAL = 4
_FAMILIES = 46
"""AF_MAX of the kernel."""


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("value", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    )


def values(unit: str, directive: str) -> list[str]:
    """Return the values of a directive, one for each of its lines."""
    return re.findall(rf"(?m)^{directive}=(.*)$", unit)


def expand(name: str) -> set[str]:
    """Return the calls of a set such as ``@system-service``; of a plain name, itself."""
    if not name.startswith("@"):
        return {name}
    command = ["systemd-analyze", "--no-pager", "syscall-filter", name]
    listed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
    members = {line.strip() for line in listed.splitlines()[1:] if line.strip()}
    return set[str]().union(*(expand(member) for member in members if not member.startswith("#")))


def allowed_calls(unit: str) -> set[str]:
    """Follow the unit's SystemCallFilter lines: the first is an allow-list, later ones take away or add."""
    allowed = expand("@default")
    for line in values(unit, "SystemCallFilter"):
        calls = set[str]().union(*(expand(name) for name in line.removeprefix("~").split()))
        allowed = allowed - calls if line.startswith("~") else allowed | calls
    return allowed


def confine(unit: str) -> None:
    """Apply a unit's rules to this process and what it becomes."""
    seccomp = ctypes.CDLL(LIBRARY, use_errno=True)
    seccomp.seccomp_init.restype = ctypes.c_void_p
    families = {int(getattr(socket, name)) for name in values(unit, "RestrictAddressFamilies")[0].split()}
    refused = [family for family in range(_FAMILIES) if family not in families]
    _load(seccomp, _ALLOW, _ERRNO | errno.EAFNOSUPPORT, {"socket"}, refused)
    denial = _ERRNO | getattr(errno, values(unit, "SystemCallErrorNumber")[0])
    _load(seccomp, denial, _ALLOW, allowed_calls(unit))


def _load(seccomp: ctypes.CDLL, default: int, action: int, calls: Iterable[str], first: Iterable[int] = ()) -> None:
    """Load one filter: ``action`` for the calls (with each of the first arguments), else ``default``."""
    context = ctypes.c_void_p(seccomp.seccomp_init(ctypes.c_uint32(default)))
    conditions: list[_Comparison | None] = [_Comparison(0, _EQUAL, value, 0) for value in first]
    for call in sorted(calls):
        number = seccomp.seccomp_syscall_resolve_name(call.encode())
        if number < 0:
            continue  # of another architecture, or newer than the library
        for condition in conditions or [None]:
            count, pointer = (0, None) if condition is None else (1, ctypes.byref(condition))
            added = seccomp.seccomp_rule_add_array(context, ctypes.c_uint32(action), number, count, pointer)
            _check(added, call)
    _check(seccomp.seccomp_load(context), "seccomp_load")
    seccomp.seccomp_release(context)


def _check(result: int, what: str) -> None:
    if result:
        raise OSError(-result, os.strerror(-result), what)


if __name__ == "__main__":
    confine(Path(sys.argv[1]).read_text())
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - that is the point
