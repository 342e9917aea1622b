"""glibc's threshold for non-temporal copies: weights are larger than any cache, and should not pass through it.

With the threshold lowered, a copy of a block goes past the caches, which is a quarter faster for shards of any size and
leaves the cache to forward passes. glibc reads its tunables before the first line of a program runs, so the daemon
starts itself once more. See tunables in glibc's manual, and docs/performance.md for what it brings.
"""

from __future__ import annotations

import os
import platform
import sys

VARIABLE = "GLIBC_TUNABLES"
TUNABLE = "glibc.cpu.x86_non_temporal_threshold"
THRESHOLD = "0x200000"
_ONCE = "FUSEWIRE_TUNED"
"""Set for the second start: there is no third."""


def needed(environment: dict[str, str], *, libc: str, machine: str) -> bool:
    """Whether another start would change anything."""
    return (
        libc == "glibc"
        and machine in {"x86_64", "AMD64"}
        and TUNABLE not in environment.get(VARIABLE, "")
        and _ONCE not in environment
    )


def tuned(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment of the second start; other tunables stay as they are."""
    kept = environment.get(VARIABLE, "")
    return environment | {VARIABLE: f"{kept}:{TUNABLE}={THRESHOLD}".lstrip(":"), _ONCE: "1"}


def start_again_if_needed() -> None:
    """Replace this program by itself with the threshold lowered, unless that is so already. Same process id."""
    environment = dict(os.environ)
    if needed(environment, libc=platform.libc_ver()[0], machine=platform.machine()):
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], tuned(environment))  # noqa: S606 - ourselves
