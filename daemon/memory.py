"""How much memory there is for weights, before any of it is taken."""

from __future__ import annotations

from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def available_bytes(device: str) -> int | None:
    """Return how many bytes can be allocated on a torch device; None if nobody knows.

    In host memory that is the least of what the kernel calls available and what each control group leaves us.
    """
    where = torch.device(device)
    if where.type == "cuda":
        return int(torch.cuda.mem_get_info(where)[0])
    if where.type != "cpu":
        return None
    limits = [limit for limit in (_system(_MEMINFO), _cgroup(_OWN_CGROUP, _CGROUP)) if limit is not None]
    return min(limits, default=None)


def _system(meminfo: Path) -> int | None:
    """MemAvailable of /proc/meminfo (proc(5)), which is in KiB."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _cgroup(own: Path, root: Path) -> int | None:
    """memory.max less memory.current of our control group (version 2) and of all above it, the least of them."""
    try:
        entry = next(line for line in own.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return None
    least = None
    group = root / entry.removeprefix("0::").lstrip("/")
    while group.is_relative_to(root):
        try:
            limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
            if limit != "max":
                least = min(max(0, int(limit) - used), least) if least is not None else max(0, int(limit) - used)
        except (OSError, ValueError):
            pass
        if group == root:
            break
        group = group.parent
    return least
